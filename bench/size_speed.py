"""Decode and prefill of a large model beside llama.cpp; prefill deep in a context beside the earlier tree, one layer of the large model at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

from tests.fakes.seeded_models import shape, write_gguf

from contender import Contender, Kind
from engines.worker import Job
from paceline.machine.speed import PromptMaker
from paceline.store.catalog import open_model
from peers import CONTEXT, Scenario, compare, enter, result, try_settings
from quiet import Patience
from size_builds import Build
from size_rows import Row, spread

CHUNK = 512
DEPTHS = (8192, 32768)
ASKED = {8192: (1.25, 1.5), 32768: (2.2, 2.8)}
SCENARIOS = (
    Scenario("decode, 1 stream", 1, 64, 32, "sequence decode", {"llama.cpp": (1.0, 1.05)}),
    # Long enough that the first still decodes when the last begins: while one decodes, prompts are computed in small chunks.
    Scenario("decode, 16 streams, total", 16, 32, 224, "total decode", {"llama.cpp": (3.0, 4.0)}),
    Scenario("prefill, 512 tokens", 1, 512, 1, "prefill", {"llama.cpp": (2.2, 3.0)}),
)


def beside_llama(ours: Build, llama: Kind, model: Path, scratch: Path, *, threads: int, rounds: int, patience: Patience) -> Iterator[Row]:
    """Both hold the model at once, and take turns; the one that waits is suspended."""
    engines = [Kind("paceline", "run_paceline.py", ("",), Path(sys.executable), True, {"PYTHONPATH": str(ours.source)}), llama]
    prompts = PromptMaker(open_model(str(model)).tokenizer)
    entrants, sequences = [], max(scenario.sequences for scenario in SCENARIOS)
    try:
        for kind in engines:
            entrant = enter(kind, Job(str(model), "", threads, sequences, CONTEXT), kind.settings, scratch, 0)
            try_settings(entrant, SCENARIOS, prompts, patience)
            entrants.append(entrant)
        compare(entrants, SCENARIOS, rounds, prompts, patience)
        report = result(entrants, SCENARIOS)
    finally:
        for entrant in entrants:
            for contender in entrant.contenders.values():
                contender.kill()
    for scenario, found in zip(SCENARIOS, report["rows"], strict=True):
        ratio = found["ratios"]["llama.cpp"]
        mine, theirs = found["engines"]["paceline"], found["engines"]["llama.cpp"]
        shares = [share for each in (mine, theirs) for share in each["bystanders"] if share is not None]
        yield Row(
            f"{model.name}: {scenario.name}",
            f"{spread(mine['rounds'], 'tok/s')}, llama.cpp {spread(theirs['rounds'], 'tok/s')}: {ratio['ratio']:.2f}x",
            f"{ratio['at_least']}x",
            f"{ratio['reach_for']}x",
            ratio["ratio"] >= ratio["at_least"],
            f"in turns, {rounds} rounds; others took up to {max(shares, default=0):.0%} of the machine; llama.cpp at {theirs['setting']}",
            {"rounds": {"paceline": mine["rounds"], "llama.cpp": theirs["rounds"]}},
        )


def deep_prefill(ours: Build, before: Build, scratch: Path, *, depths: tuple[int, ...] = DEPTHS) -> Iterator[Row]:
    """A prompt as long as the deepest, chunk by chunk in turns, one thread each; what counts is the chunk that ends at each depth, and its neighbours."""
    one = replace(shape("llama-8b", n_layers=1), vocab=2048)
    model = write_gguf(scratch / "8b-one-layer.gguf", one, "Q4_K_M")
    deepest = max(depths)
    prompt = tuple(Random(0).choices(range(64, one.vocab), k=deepest + CHUNK))
    running: dict[str, Contender] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for build in (ours, before):
            kind = Kind(build.name, "run_chunks.py", ("",), Path(sys.executable), True, {"PYTHONPATH": str(build.source)})
            running[build.name] = Contender(kind, Job(str(model), "", 1, 1, deepest + 2 * CHUNK), scratch / "chunks.log")
            running[build.name].resume()
            running[build.name].run([prompt[:CHUNK]], 1)
            running[build.name].pause()
            seconds[build.name] = []
        for chunk in range(len(prompt) // CHUNK):
            for name, contender in running.items():
                contender.resume()
                timing = contender.run([] if chunk else [prompt], 1)
                contender.pause()
                seconds[name].append(timing.wall_s)
    finally:
        for contender in running.values():
            contender.kill()
    for depth in depths:
        at = depth // CHUNK
        near = {name: [CHUNK / each for each in taken[at - 2 : at + 1]] for name, taken in seconds.items()}
        ratio = median(near[ours.name]) / median(near[before.name])
        least, reach = ASKED.get(depth, (1.0, 1.0))
        layers = shape("llama-8b").n_layers
        yield Row(
            f"8B prefill at {depth} of context, a thread",
            f"{spread([each / layers for each in near[ours.name]], 'tok/s')}, {before.name} {spread([each / layers for each in near[before.name]], 'tok/s')}: {ratio:.2f}x",
            f"{least}x",
            f"{reach}x",
            ratio >= least,
            f"one layer of the 8B's sizes, over {layers}: embedding and head are left out; three chunks of {CHUNK} around it, in turns",
            {"chunk_s": seconds},
        )
