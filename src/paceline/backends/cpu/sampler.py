"""`engine.sampling.Sampler` in compiled kernels, on every processor: rows shared by threads that run without the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import draw
from paceline.core.errors import DrawFailed
from paceline.core.generation import TokenLogprob
from paceline.engine.draw_state import DrawRow
from paceline.engine.sampling import Drawn, undrawable

Float32 = npt.NDArray[np.float32]

LOGITS_A_THREAD = 1 << 18
"""Logits for which a thread is woken: some 60 us of work, and waking one takes half of that. Raising it wakes fewer."""

_draw_rows: Callable[..., None] = draw.draw_rows


class CompiledSampler:
    """Draws the tokens that `PlainSampler` draws.

    Args:
        vocab: tokens of the model.
        threads: that share a batch's rows, the caller's included.
    """

    def __init__(self, vocab: int, threads: int) -> None:
        self._vocab = vocab
        self._closed = False
        self._arguments: tuple[Any, ...] = ()
        self._wake = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(wake,), name=f"paceline-draws-{i}", daemon=True) for i, wake in enumerate(self._wake)
        ]
        for thread in self._threads:
            thread.start()

    def draw(self, logits_RV: Float32, rows: Sequence[DrawRow]) -> list[Drawn | DrawFailed]:
        if not rows:
            return []
        n = min(self._vocab, logits_RV.shape[1])
        if logits_RV.dtype != np.float32 or logits_RV.strides[1] != 4:
            logits_RV = np.ascontiguousarray(logits_RV, np.float32)
        whole_R, real_R, adjusted = _described(rows)
        ids_RO = np.empty((len(rows), 1 + draw.MAX_TOP), np.int64)
        logprobs_RO = np.empty((len(rows), 1 + draw.MAX_TOP), np.float64)
        control = np.zeros(draw.N_CONTROL, np.int64)
        shared = (logits_RV.ctypes.data, logits_RV.strides[0], n, whole_R, real_R, *adjusted, ids_RO, logprobs_RO, control)
        # A thread that wakes late finds every row claimed: it touches no logits of a batch that is over.
        self._arguments = (*shared, False)
        for wake in self._wake[: max(0, len(rows) * n // LOGITS_A_THREAD - 1)]:
            wake.release()
        _draw_rows(*shared, True)
        return [
            undrawable(row) if ids[0] < 0 else Drawn(ids[0], _logprob(row.state.params.logprobs, n, ids, logprobs))
            for row, ids, logprobs in zip(rows, ids_RO.tolist(), logprobs_RO.tolist(), strict=True)
        ]

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._closed = True
        for wake in self._wake:
            wake.release()
        for thread in self._threads:
            thread.join()

    def _serve(self, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            if self._closed:
                return
            _draw_rows(*self._arguments)


def _described(rows: Sequence[DrawRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], tuple[npt.NDArray[Any], ...]]:
    """What `draw_rows` takes of rows: whole numbers, real ones, columns of the adjusted tokens with scratch."""
    whole: list[tuple[int, ...]] = []
    real: list[tuple[float, ...]] = []
    start = 0
    for row in rows:
        state, params = row.state, row.state.params
        stop = start + len(row.adjusted)
        n_top = -1 if params.logprobs is None else params.logprobs
        seed = (state.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        whole.append((row.logits_row, seed, row.position, params.top_k, n_top, state.greedy, start, stop))
        real.append(
            (
                float(state.inverse_temperature),
                params.top_p,
                float(state.log_min_p),
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        )
        start = stop
    tokens = [row.adjusted for row in rows]
    return (
        np.array(whole, np.int64),
        np.array(real, np.float64),
        (
            np.concatenate([one.ids_A for one in tokens]),
            np.concatenate([one.bias_A for one in tokens]),
            np.concatenate([one.seen_A for one in tokens]),
            np.concatenate([one.count_A for one in tokens]),
            np.empty(start, np.float32),
        ),
    )


def _logprob(n_top: int | None, n: int, ids: list[int], logprobs: list[float]) -> TokenLogprob | None:
    if n_top is None:
        return None
    stop = 1 + min(n_top, n)
    return TokenLogprob(ids[0], logprobs[0], tuple(zip(ids[1:stop], logprobs[1:stop], strict=True)))
