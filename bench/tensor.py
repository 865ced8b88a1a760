"""Tensor ranks on one host beside one process: prefill and decode of a model, in turns, as ratios.

    python bench/tensor.py                              # the bundled model, ranks that share memory
    python bench/tensor.py --over tls                   # ranks that meet over mutual TLS, as those of two hosts do
    python bench/tensor.py --over halved                # ranks of 2:1, the second of which has half a core, beside the first alone (Linux, root)
    python bench/tensor.py --model 8b.gguf --rounds 2 --answer 16
    python bench/tensor.py --exchange                   # one exchange alone (`tensor_exchange.py`)

Compared: two ranks of one thread each, each pinned to a core with what carries its sums; one process of one thread, one of two. Each turn is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from paceline.backends import cpu
from paceline.bench.engine import BenchPlan, run_bench
from paceline.bench.fleet import BenchNode, LocalFleet, become_first
from paceline.core.clock import SystemClock
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import resolve
from paceline.store.home import Home
from paceline.ways.tensor.loading import load_group

CORES = sorted(os.sched_getaffinity(0))
ALONE = {"1 thread": (1, CORES[:1]), "2 threads": (2, CORES[:2])}
"""Processes that have the model alone: their threads, and the cores for these."""
ROWS = {
    "shared": {"prefill 512": ("1 thread", 1.6, 1.85), "decode 16": ("1 thread", 1.5, 1.75), "decode 1": ("2 threads", 0.85, 0.95)},
    "halved": {"prefill 512": ("1 thread", 1.3, 1.4), "decode 16": ("1 thread", 1.3, 1.4)},
}
ROWS["tls"] = ROWS["shared"]
"""What each figure of two ranks stands beside, and at least and at best what that ratio shall be, for the bundled model."""
CPU_CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 2000
"""Of a quota: in each, its process runs for half of it at most."""

EXCHANGES = {"shared memory": ("25 / 60", "10 / 25"), "mutual TLS": ("60 / 150", "40 / 100")}
"""Over what ranks meet, and what one exchange shall take at most, in microseconds."""


def turn(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Tokens a second, by row."""
    command = [
        sys.executable,
        __file__,
        "--turn",
        name,
        "--model",
        options.model,
        "--answer",
        str(options.answer),
        "--prompt",
        str(options.prompt),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def pin(pid: int, cores: list[int]) -> None:
    """All threads that a process has by now, and those that they start."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


@contextmanager
def halved(pids: list[int]) -> Iterator[None]:
    """Processes that have half a core each at most."""
    folders = [CPU_CGROUP / f"paceline-bench-{pid}" for pid in pids]
    try:
        for pid, folder in zip(pids, folders, strict=True):
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 2))
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for folder in folders:
            for pid in (folder / "cgroup.procs").read_text().split():
                (CPU_CGROUP / "cgroup.procs").write_text(pid)
            folder.rmdir()


def take_turn(options: argparse.Namespace) -> int:
    """One engine's turn, in this process."""
    threads, cores = ALONE.get(options.turn, (1 if options.turn == "tls" else 2, CORES[:1]))
    ranks = () if options.turn in ALONE else (2.0, 1.0) if options.turn == "halved" else (1.0, 1.0)
    settings = NodeSettings(options.model, threads=threads, draft="off", **({"tensor": ranks} if ranks else {}))
    with ExitStack() as ends:
        places = {}
        if options.turn == "tls":
            path = resolve(options.model, Home.from_environment())
            os.sched_setaffinity(0, CORES[1:2])  # the other node's, which starts now
            fleet = ends.enter_context(closing(LocalFleet(2, 1, path.path)))
            os.sched_setaffinity(0, cores)
            become_first(fleet)
            joined = FleetSettings(fleet.port, fleet.host, mdns=False, preset=parse_preset(fleet.preset))
            node = ends.enter_context(closing(BenchNode(joined, Home.from_environment(), SystemClock(), [path])))
            node.wait_for(fleet.names[1:])
            places = {1: node.rank_place(fleet.names[1])}

        def spread(*given: Any) -> Any:
            made = load_group(*given, places=places)
            for core, pid in zip(CORES, made[0].processes, strict=False):
                if pid:
                    pin(pid, [core])
            if options.turn == "halved":
                ends.enter_context(halved(list(made[0].processes[1:])))
            return made

        os.sched_setaffinity(0, cores)
        report = run_bench(settings, BenchPlan(options.prompt, answer_tokens=options.answer, concurrency=(1, 16), rounds=1), spread=spread)
    print(
        json.dumps(
            {
                "prefill 512": report.prefill_per_s,
                **{f"decode {row.concurrency}": row.total_decode_per_s for row in report.rows},
            }
        )
    )
    return 0


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
    parser.add_argument("--over", choices=ROWS, default="shared", help="what the ranks meet over, or that the second is slowed to half")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt whose answer is measured")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        return take_turn(options)
    if options.exchange:
        return exchanges(options.rounds, options.rows, realtime=options.realtime)
    found, names = defaultdict[tuple[str, str], list[float]](list), [options.over, *ALONE][: 2 if options.over == "halved" else 3]
    for _ in range(options.rounds):
        for name in names:
            for row, rate in turn(options, name).items():
                found[name, row].append(rate or float("nan"))
    print(f"{options.model}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for row, (other, least, reach) in ROWS[options.over].items():
        ratios = [mine / its for mine, its in zip(found[options.over, row], found[other, row], strict=True)]
        rates = ", ".join(f"{name} {median(found[name, row]):.3g}" for name in names)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{row}: 2 ranks ({options.over}) / {other} {median(ratios):.2f}x ({spread}; asked {least}x, reach {reach}x); tok/s: {rates}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
