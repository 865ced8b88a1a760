"""`engine.sampling.Sampler` in compiled kernels, for every processor. Threads share the rows, and run without the interpreter's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import draw
from paceline.core.errors import DrawFailed
from paceline.core.generation import TokenLogprob
from paceline.engine.sampling import Drawn, DrawRow, undrawable

Float32 = npt.NDArray[np.float32]

LOGITS_A_THREAD = 1 << 18
"""Logits for which one more thread is woken: about 60 us of work, while waking it takes half of that. Raising it: fewer threads share a batch."""

_ASKED, _TOKEN = Struct("=qQ6q6d"), Struct("=q")
_IDS, _LOGPROBS = Struct(f"={1 + draw.MAX_TOP}q"), Struct(f"={1 + draw.MAX_TOP}d")
"""Parts of a row's words, in the layout of `draw`."""
_FIRST, _STRIDE = 8 * draw.N_CONTROL, 8 * draw.N_WORDS
"""Bytes before the words of the first row, and bytes of each row's words."""
_NOT_ADJUSTED = tuple(np.empty(0, kind) for kind in (np.int32, np.float32, np.bool_, np.float32, np.float32))

_draw_rows: Callable[..., None] = draw.draw_rows


class CompiledSampler:
    """Draws the tokens that `PlainSampler` draws.

    Args:
        vocab: number of tokens of the model.
        threads: number of threads that share a batch's rows, including the caller's.
    """

    def __init__(self, vocab: int, threads: int) -> None:
        self._vocab = vocab
        self._closed = False
        self._arguments: tuple[Any, ...] | None = None
        """Arguments of `draw_rows` for the batch that is being drawn; None: no batch is."""
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
        buffer, adjusted = _described(rows)
        shared = (logits_RV[0], logits_RV.strides[0], n, np.frombuffer(buffer, np.int64), *adjusted)
        # A thread that wakes late finds every row claimed, or no batch. So it touches no logits of a batch that is over.
        self._arguments = (*shared, False)
        for wake in self._wake[: max(0, len(rows) * n // LOGITS_A_THREAD - 1)]:
            wake.release()
        try:
            _draw_rows(*shared, True)
        finally:
            self._arguments = None  # they refer to the logits, which may soon be resized or freed
        return [_drawn(row, n, buffer, at) for row, at in zip(rows, range(_FIRST, len(buffer), _STRIDE), strict=True)]

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
            self._take_part()

    def _take_part(self) -> None:
        arguments = self._arguments  # read once, because the batch may end meanwhile
        if arguments is not None:
            _draw_rows(*arguments)


def _described(rows: Sequence[DrawRow]) -> tuple[bytearray, tuple[npt.NDArray[Any], ...]]:
    """Return the arguments of `draw_rows` for rows: the words, then the columns of the adjusted tokens, and scratch.

    It calls NumPy rarely, because one call takes longer than writing a row's words.
    """
    buffer = bytearray(_FIRST + len(rows) * _STRIDE)
    start = 0
    for row, at in zip(rows, range(_FIRST, len(buffer), _STRIDE), strict=True):
        state, params = row.state, row.state.params
        stop = start + len(row.adjusted)
        _ASKED.pack_into(
            buffer,
            at,
            row.logits_row,
            state.seed % (1 << 64),
            row.position,
            params.top_k,
            -1 if params.logprobs is None else params.logprobs,
            state.greedy,
            start,
            stop,
            state.inverse_temperature,
            params.top_p,
            state.log_min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        start = stop
    if not start:
        return buffer, _NOT_ADJUSTED
    tokens = [row.adjusted for row in rows]
    columns = (
        np.concatenate([one.ids_A for one in tokens]),
        np.concatenate([one.bias_A for one in tokens]),
        np.concatenate([one.seen_A for one in tokens]),
        np.concatenate([one.count_A for one in tokens]),
    )
    return buffer, (*columns, np.empty(start, np.float32))


def _drawn(row: DrawRow, n: int, buffer: bytearray, at: int) -> Drawn | DrawFailed:
    """Return the result of the draw that the words of a row at byte `at` hold."""
    (token,) = _TOKEN.unpack_from(buffer, at + 8 * draw.IDS)
    if token < 0:
        return undrawable(row)
    n_top = row.state.params.logprobs
    if n_top is None:
        return Drawn(token, None)
    stop = 1 + min(n_top, n)
    ids, logprobs = _IDS.unpack_from(buffer, at + 8 * draw.IDS), _LOGPROBS.unpack_from(buffer, at + 8 * draw.LOGPROBS)
    return Drawn(token, TokenLogprob(token, logprobs[0], tuple(zip(ids[1:stop], logprobs[1:stop], strict=True))))
