"""Tensor ranks on one host beside one process: prefill and decode of a model, in turns, as ratios.

    python bench/tensor.py                              # the bundled model
    python bench/tensor.py --model 8b.gguf --rounds 2 --answer 16
    python bench/tensor.py --exchange                   # one exchange alone (`tensor_exchange.py`)

Compared: two ranks of one thread each, one process of one thread, one of two. Each turn is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from paceline.backends import cpu
from paceline.store.home import Home

ENGINES = {"2 ranks": ("--threads", "2", "--tensor", "2"), "1 thread": ("--threads", "1"), "2 threads": ("--threads", "2")}
ROWS = {"prefill 512": ("1 thread", 1.6, 1.85), "decode 16": ("1 thread", 1.5, 1.75), "decode 1": ("2 threads", 0.85, 0.95)}
"""What each figure of two ranks stands beside, and at least and at best what that ratio shall be, for the bundled model."""

EXCHANGES = {"shared memory": ("25 / 60", "10 / 25"), "mutual TLS": ("60 / 150", "40 / 100")}
"""Over what ranks meet, and what one exchange shall take at most, in microseconds."""


def turn(options: argparse.Namespace, engine: tuple[str, ...]) -> dict[str, float]:
    """Tokens a second, by row."""
    command = [sys.executable, "-m", "paceline", "bench", "--json", "--rounds", "1", "--concurrency", "1,16", "--model", options.model]
    done = subprocess.run([*command, "--answer", str(options.answer), *engine], stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    decoded = {f"decode {row['concurrency']}": row["total_decode_per_s"] for row in report["rows"]}
    return {"prefill 512": report["prefill_per_s"], **decoded}


def exchanges(rounds: int, rows: int, *, realtime: bool) -> int:
    """One exchange of 576 values, or of as many for each of several rows, between two warm ranks."""
    cpu.prepare(cpu.lowerings_here()[0], Home.from_environment().kernels)
    import tensor_exchange

    tensor_exchange.rows = rows
    found = defaultdict[str, list[Any]](list)
    for _ in range(rounds):
        for over in EXCHANGES:
            found[over].append(tensor_exchange.measure(over, 20 if rows == 1 else 2, realtime=realtime))
    print(f"one exchange of {rows} x 576 values, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for over, (asked, reach) in EXCHANGES.items():
        p50, p95 = (median(getattr(each, part) for each in found[over]) for part in ("p50", "p95"))
        print(f"{over}: p50 / p95 {p50:.1f} / {p95:.1f} us (asked {asked}, reach {reach})")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--exchange", action="store_true", help="one exchange alone, over shared memory and over mutual TLS")
    parser.add_argument("--rows", type=int, default=1, help="with --exchange: of a batch, 576 values each")
    parser.add_argument("--realtime", action="store_true", help="with --exchange: before all else that the machine does")
    options = parser.parse_args()
    if options.exchange:
        return exchanges(options.rounds, options.rows, realtime=options.realtime)
    found = defaultdict[tuple[str, str], list[float]](list)
    for _ in range(options.rounds):
        for name, engine in ENGINES.items():
            for row, rate in turn(options, engine).items():
                found[name, row].append(rate or float("nan"))
    print(f"{options.model}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for row, (other, least, reach) in ROWS.items():
        ratios = [mine / its for mine, its in zip(found["2 ranks", row], found[other, row], strict=True)]
        rates = ", ".join(f"{name} {median(found[name, row]):.0f}" for name in ENGINES)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{row}: 2 ranks / {other} {median(ratios):.2f}x ({spread}; asked {least}x, reach {reach}x); tok/s: {rates}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
