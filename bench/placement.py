"""How near the cost model of placement comes to the engine, for this machine alone: estimate over measurement.

The card is made as a node makes it (`machine.capability`, `machine.speed`), once with the speeds measured at load and once without, as for a model
that never ran; the engine is measured as by `paceline bench`, in other lengths than the card's. 1.0 is a perfect estimate. On one thread
time is the processor's, so that other programs hardly count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, two_digits
from paceline.fleet.placement import plan
from paceline.fleet.plan import ALONE, PlanRequest
from paceline.fleet.ways import Alone
from paceline.machine.build import build_engine, introduced
from paceline.machine.capability import CapabilityReport
from paceline.machine.devices import stream_rate
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import PromptMaker, drive
from paceline.store.home import Home

LENGTHS = ((128, 128), (512, 128), (2048, 64))
"""Prompt and answer, in tokens."""


class ProcessorClock:
    """Time that this process computed for."""

    def monotonic(self) -> float:
        return time.process_time()

    def wall(self) -> float:
        return time.time()


def compare(model: str, rounds: int, threads: int | None, home: Home) -> dict[str, Any]:
    """Measure each pair of lengths and set the estimates beside it. Speeds are kept in a home of their own."""
    clock = ProcessorClock() if threads == 1 else SystemClock()
    built = build_engine(NodeSettings(model, threads=threads, max_running=1, prefix_cache=False))
    try:
        warm = introduced(built, home, clock)
        portrait = CapabilityReport(NodeId("here"), home)
        portrait.look([warm])
        card = replace(portrait.card(), memory_bytes_per_s=int(two_digits(stream_rate(built.setup.threads))))
        never_ran = replace(
            card, models=tuple(replace(offer, tokens_per_second=0.0, prefill_tokens_per_second=0.0) for offer in card.models)
        )
        prompts = PromptMaker(built.setup.opened.tokenizer)
        rows: list[dict[str, Any]] = []
        for prompt, answer in LENGTHS:
            timings = [drive(built.engine, prompts.make(1, prompt), answer, clock) for _ in range(rounds + 1)][1:]
            measured = {
                "tokens_per_s": median(timing.sequence_decode_per_s for timing in timings),
                "ttft_s": median(timing.first_token_s[0] for timing in timings),
                "total_s": median(timing.wall_s for timing in timings),
            }
            request = PlanRequest(warm.name, prompt_tokens=prompt, answer_tokens=answer, ways=frozenset({ALONE}))
            rows.append(
                {
                    "prompt": prompt,
                    "answer": answer,
                    "measured": measured,
                    "estimate_over_measured": _ratios(card, request, measured),
                    "estimate_over_measured_before_it_ran": _ratios(never_ran, request, measured),
                }
            )
        return {
            "model": warm.name,
            "threads": built.setup.threads,
            "memory_gb_per_s": card.memory_bytes_per_s / 1e9,
            "card": {"decode": card.models[0].tokens_per_second, "prefill": card.models[0].prefill_tokens_per_second},
            "rows": rows,
            "load_average": os.getloadavg()[0],
        }
    finally:
        built.close()


def _ratios(card: NodeCard, request: PlanRequest, measured: dict[str, float]) -> dict[str, float]:
    estimate = plan([card], request, (Alone(),)).chosen.estimate
    return {name: round(getattr(estimate, name) / seen, 3) for name, seen in measured.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(options.model, options.rounds, options.threads, Home(Path(folder))), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
