"""What a draw costs, a row, at a large vocabulary: today's compiled sampler beside another commit's code, in turns, in one process.

    python bench/sampling.py [--vocab 151936] [--rows 1,32] [--threads 1] [--against c943c08] [--rounds 40] [--json sampling.json]

Logits are seeded: peaked ones fall off as a language model's do (a few candidates, a long tail), flat ones are Gaussian of deviation 2.2, the worst a random
model gives. Each figure is the median over the rounds, in milliseconds a row: of the processor's time where one thread draws, else by the clock; everything is counted that
the engine's thread does for a draw. Both find logits that were just written, as the head's product leaves them, and nothing else in the nearest caches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.backends.cpu import load_sampler
from paceline.core.generation import SamplingParams
from paceline.engine.sampling import DrawState, Sampler
from paceline.store.home import Home

MODES: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
    "greedy": ({"temperature": 0.0}, None, None),
    "temperature 1 (the API's default)": ({}, 0.08, 0.04),
    "0.7, top-p 0.8, top-k 20 (Qwen3's)": ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, 0.1, 0.05),
    "temperature 1, top-p 0.95": ({"top_p": 0.95}, None, None),
    "temperature 1, min-p 0.05": ({"min_p": 0.05}, None, None),
    "greedy, logprobs 5": ({"temperature": 0.0, "logprobs": 5}, None, None),
    "temperature 1, logprobs 5": ({"logprobs": 5}, None, None),
    "temperature 1, penalties": ({"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {7: 2.0}}, None, None),
}
PARTS = ("noise", "draw_state", "sampling")
PROMPT = range(1000, 3000)


def former(commit: str, folder: Path) -> tuple[Any, Any]:
    """(sampling, draw_state) as they were at a commit."""
    package = folder / "former"
    package.mkdir()
    root = Path(__file__).parents[1]
    for part in PARTS:
        shown = subprocess.run(
            ["git", "-C", root, "show", f"{commit}:src/paceline/engine/{part}.py"], check=True, capture_output=True, text=True
        )
        text = shown.stdout
        for other in PARTS:
            text = text.replace(f"paceline.engine.{other} ", f"former.{other} ")
        (package / f"{part}.py").write_text(text)
    sys.path.insert(0, str(folder))
    return importlib.import_module("former.sampling"), importlib.import_module("former.draw_state")


def logits(kind: str, rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    row_RV = (rng.standard_normal((rows, vocab)) * 2.2).astype(np.float32)
    if kind == "peaked":
        for row_V in row_RV:
            row_V[rng.integers(0, vocab, 200)] += (rng.exponential(4.0, 200) + 4.0).astype(np.float32)
    return row_RV


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")


def timed(threads: int, draw: Callable[[], Any]) -> tuple[float, Any]:
    """(ms, what was drawn). One thread's own time, which others on the machine take no part of; of several, the clock's."""
    now = time.thread_time if threads == 1 else time.perf_counter
    began = now()
    drawn = draw()
    return (now() - began) * 1e3, drawn


def compare(
    sampler: Sampler, states: list[DrawState], before: Any, old: list[Any], row_RV: np.ndarray, rounds: int, threads: int
) -> tuple[float, ...]:
    """(ms a row today, ms a row before, share of draws that are the same)."""
    rows, same = len(states), 0
    scratch_RV, fresh_RV = row_RV.copy(), row_RV.copy()
    times: tuple[list[float], list[float]] = ([], [])
    for at in range(rounds + 2):
        np.copyto(fresh_RV, row_RV)
        today, drawn = timed(
            threads, partial(lambda at: sampler.draw(fresh_RV, [state.row(row, at) for row, state in enumerate(states)]), at)
        )
        np.copyto(scratch_RV, row_RV)
        then, (tokens, _) = timed(threads, partial(lambda at: before.draw(scratch_RV, old, [at] * rows), at))
        same += sum(one.token == token for one, token in zip(drawn, tokens, strict=True))
        if at >= 2:
            times[0].append(today / rows)
            times[1].append(then / rows)
    return median(times[0]), median(times[1]), same / (rows * (rounds + 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", default="c943c08")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    before_code, before_state = former(asked.against, Path(tempfile.mkdtemp()))
    sampler = load_sampler(asked.vocab, asked.threads, Home.from_environment().kernels)
    before = before_code.Sampler(asked.vocab, frozenset())
    print(f"{processor()}; vocabulary {asked.vocab}, {asked.threads} threads; ms a row: today, {asked.against}, how many times faster")
    report: list[dict[str, Any]] = []
    for kind in ("peaked", "flat"):
        for rows in map(int, asked.rows.split(",")):
            row_RV = logits(kind, rows, asked.vocab)
            for name, (fields, least, reach) in MODES.items():
                params = SamplingParams(**fields)
                states = [DrawState(params, row, PROMPT) for row in range(rows)]
                old = [before_state.DrawState(params, row, PROMPT, bans_eos=False) for row in range(rows)]
                today, then, share = compare(sampler, states, before, old, row_RV, asked.rounds, asked.threads)
                goal = "" if least is None or rows > 1 or asked.threads > 1 else f"  at most {least}, reach {reach}"
                print(
                    f"{kind:7} {rows:3} rows  {name:36} {today:7.3f} {then:7.3f} {then / today:6.1f}x  same draws {share:.2%}{goal}",
                    flush=True,
                )
                report.append({"logits": kind, "rows": rows, "mode": name, "ms": today, "before_ms": then, "same": share})
    sampler.close()
    if asked.json:
        asked.json.write_text(json.dumps({"processor": processor(), "threads": asked.threads, "vocab": asked.vocab, "rows": report}))


if __name__ == "__main__":
    main()
