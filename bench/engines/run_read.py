"""A plain read of memory, as the peer that no decoder of one stream can beat: a token is one read of all bytes of weights that a token passes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from numba import njit
from worker import Engine, Job, Times, serve

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@njit(nogil=True, cache=False)
def read(words: npt.NDArray[np.int64]) -> int:
    """The sum of all words: vectors of them are loaded and added, in order."""
    total = 0
    for word in words:
        total += word
    return total


class ReadEngine:
    def __init__(self, job: Job) -> None:
        self._now = job.now
        tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(Path(job.model)).tensors}
        if HEAD in tensors:
            # Of which a token takes one row.
            del tensors[EMBEDDING]
        self.n_bytes = sum(tensors.values())
        words = np.ones(self.n_bytes // 8, np.int64)
        self._shares = np.array_split(words, job.threads)
        self._pool = ThreadPoolExecutor(job.threads)
        read(words[:8])

    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        started_s = self._now()
        arrivals: list[float] = []
        for _ in range(answer_tokens):
            list(self._pool.map(read, self._shares))
            arrivals.append(self._now())
        return Times(started_s, [arrivals for _ in prompts])


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    engine = ReadEngine(job)
    return engine, {"bytes": engine.n_bytes}


if __name__ == "__main__":
    serve(load)
