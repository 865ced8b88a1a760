"""What a step shares and draws at size: a short request behind a long prompt, the pauses of an answer beside one, a draw from a large vocabulary.

Each is measured by its own bench (`scheduling.py`, `sampling.py`) in a process of its own, in little time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from size_builds import BEFORE, ROOT, Build
from size_rows import Row, spread

LONG, SHORT = 8000, 20
PAUSES_S = 60.0
"""Of an answer that are looked at: the budget of a step holds from the first."""
DRAWS = {"temperature 1": "temperature 1 (the API's default)", "0.7, top-p 0.8, top-k 20": "0.7, top-p 0.8, top-k 20 (Qwen3's)"}
ASKED_MS = {"temperature 1": (0.08, 0.04), "0.7, top-p 0.8, top-k 20": (0.1, 0.05)}


def scheduling(ours: Build, model: Path, scratch: Path, *, threads: int, rounds: int) -> Iterator[Row]:
    """First tokens and pauses."""
    options = ["--model", model, "--long", LONG, "--short", SHORT, "--rounds", rounds, "--after", 1, 4, "--seconds", PAUSES_S]
    found = _run(ours, "scheduling.py", scratch, *options, "--threads", threads)
    short, pauses = found["short_behind_long"], found["pauses_beside_long"]
    behind = [each / short["alone_s"] for times in short["behind_s"].values() for each in times]
    yield Row(
        f"first token of {SHORT} tokens behind a prompt of {LONG}, {model.name}",
        f"{spread(behind, 'times as long as alone')}, alone {short['alone_s']:.2f} s",
        "3x",
        "1.5x",
        max(behind) <= 3,
        "the worst counts; one and four seconds after the prompt came; the first of them is the process's first",
        short,
    )
    worst = pauses["beside_worst_s"]
    yield Row(
        f"longest gap between two tokens while a prompt of {LONG} is computed, {model.name}",
        f"{worst:.2f} s, median {pauses['beside_median_s']:.2f} s, alone {pauses['alone_s']:.2f} s; {pauses['tokens_beside']} tokens; "
        f"the most computed for one is {pauses['worst_times_by_cpu']:.2f} times what one alone takes",
        "0.5 s",
        "0.3 s",
        worst <= 0.5,
        f"the first {PAUSES_S:.0f} s of it",
        pauses,
    )


def sampling(ours: Build, scratch: Path) -> Iterator[Row]:
    """One row, one thread."""
    found = _run(ours, "sampling.py", scratch, "--rows", 1, "--against", BEFORE)
    for name, mode in DRAWS.items():
        rows = [row for row in found["rows"] if row["mode"] == mode]
        (least, reach), worst = ASKED_MS[name], max(row["ms"] for row in rows)
        yield Row(
            f"a draw, vocabulary {found['vocab']}, {name}",
            ", ".join(f"{row['logits']} logits {row['ms']:.3f} ms ({BEFORE} {row['before_ms']:.3f})" for row in rows),
            f"{least} ms",
            f"{reach} ms",
            worst <= least,
            "median of one thread's time; logits were just written, and the earlier code between two draws leaves nothing else in the caches",
            {"rows": rows},
        )


def _run(ours: Build, bench: str, scratch: Path, *options: object) -> dict[str, Any]:
    """What a bench of this folder reports."""
    report = scratch / f"{bench}.json"
    command = [sys.executable, str(ROOT / "bench" / bench), *map(str, options), "--json", str(report)]
    subprocess.run(command, env=ours.environment(), check=True, stdout=subprocess.DEVNULL)
    return json.loads(report.read_text())
