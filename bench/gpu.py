"""Steps of a model on an NVIDIA GPU: how long they take, and whether a row has the same bytes cut otherwise and beside others.

    python bench/make_model.py /tmp/8b.gguf --preset llama-8b
    python bench/gpu.py /tmp/8b.gguf

`--device cpu` runs the same through torch on a processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.backends import torch
from paceline.backends.options import DeviceKind, LoadOptions
from paceline.core.model import WeightsFormat
from paceline.engine.executor import Path as KernelPath
from paceline.engine.local import LayerRunner, RowPlan
from paceline.store.catalog import open_weights
from paceline.store.digests import DigestCache
from paceline.store.home import Home

STEPS = ((64, 1, 511), (1, 1, 511), (4, 1, 511), (16, 1, 511), (1, 8, 511), (1, 1, 8000), (1, 1, 32_000), (16, 1, 8000), (1, 512, 0), (1, 1024, 0), (1, 512, 7680))  # fmt: skip
"""Sequences, rows of each, position of the first."""
LENGTH = 3000
CUTS = (
    (1500, 1500),
    (*[1] * 8, LENGTH - 8),
    (LENGTH - 76, 64, *[1] * 12),
    (1023, 2, 1022, 1, 952),
    (2, 2, 4, 8, 16, 32, 64, 128, LENGTH - 256),
)
BESIDE = (1, 15, 39, 69)
"""Other sequences."""


class Steps:
    """Runs batches whose every sequence has blocks of its own, tokens drawn alike in every run."""

    def __init__(self, runner: LayerRunner[Any], vocab: int) -> None:
        self._runner, self._vocab = runner, vocab

    def run(self, firsts: Sequence[int], rows: int, seed: int, first_block: int = 0, per: int | None = None) -> Any:
        """Activations of `rows` rows from each position on.

        Args:
            per: blocks of a sequence. Default: as many as it needs.
        """
        per = per or -(-(max(firsts) + rows) // self._runner.block_size)
        tables = np.arange(len(firsts) * per, dtype=np.int32).reshape(len(firsts), per) + first_block
        starts, counts = np.arange(len(firsts), dtype=np.int32) * rows, np.full(len(firsts), rows, np.int32)
        ids = np.random.default_rng(seed).integers(0, self._vocab, LENGTH).astype(np.int32)
        own = np.concatenate([ids[(first + np.arange(rows)) % LENGTH] for first in firsts])
        plan = RowPlan(starts, counts, np.array(firsts, np.int32), np.full_like(counts, KernelPath.PROMPT), tables)
        return self._runner.run_layers(self._runner.embed(own), plan)

    def logits(self, sequences: int, rows: int, first: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        x_TD = self.run([first] * sequences, rows, 1)
        return self._runner.logits(x_TD, np.arange(rows - 1, rows * sequences, rows, dtype=np.int32))

    def cut(self, pieces: Sequence[int], first_block: int) -> bytes:
        """Bits of one sequence's rows, run in pieces."""
        per, at, found = -(-LENGTH // self._runner.block_size), 0, list[bytes]()
        for piece in pieces:
            found.append(self._runner.to_wire(self.run([at], piece, 0, first_block, per)).tobytes())
            at += piece
        return b"".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=[DeviceKind.CUDA, DeviceKind.CPU], default=DeviceKind.CUDA, type=DeviceKind)
    parser.add_argument("--tokens", type=int, default=168_000, help="of KV, 8192 at least; steps that need more are left out")
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    home, began_s = Home.from_environment(), time.perf_counter()
    source = open_weights(options.model, DigestCache(home))
    asked = LoadOptions(
        source.spec.all_layers, WeightsFormat.BF16, options.tokens // 16, threads=options.threads, kernel_cache=home.kernels
    )
    runner = torch.load(source, asked, device=options.device)
    print(f"loaded in {time.perf_counter() - began_s:.1f} s; identity {'holds' if runner.holds_identity else 'does not hold'}")
    steps = Steps(runner, source.spec.vocab)
    for sequences, rows, first in STEPS:
        if sequences * -(-(first + rows) // runner.block_size) > runner.n_blocks or first + rows > source.spec.max_context:
            continue
        times, finite = list[float](), True
        while len(times) < 5 or sum(times) < 0.3:
            began_s = time.perf_counter()
            logits = steps.logits(sequences, rows, first)
            times.append(time.perf_counter() - began_s)
            finite &= bool(np.isfinite(logits).all())
        middle_s = statistics.median(times[2:])
        print(
            f"{sequences} x {rows} rows from {first}: {middle_s * 1e3:.2f} ms, {sequences * rows / middle_s:.0f} tokens/s{'' if finite else '; LOGITS ARE NOT FINITE'}"
        )
    whole = steps.cut((LENGTH,), 0)
    row_bytes, right = len(whole) // LENGTH, True
    per = -(-LENGTH // runner.block_size)
    for cut in CUTS:
        right &= (same := steps.cut(cut, per) == whole)
        print(f"cut into {', '.join(map(str, cut))}: {'the same bytes' if same else 'OTHER BYTES'}")
    for others in BESIDE:
        if (others + 1) * per > runner.n_blocks:
            continue
        steps.cut((LENGTH,), 0)
        found = runner.to_wire(steps.run([LENGTH - 1, *(37 * each % (LENGTH - 1) for each in range(others))], 1, 0, 0, per))
        right &= (same := found[:1].tobytes() == whole[-row_bytes:])
        print(f"beside {others} others: {'the same bytes' if same else 'OTHER BYTES'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
