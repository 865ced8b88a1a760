"""Fleets in, explanations out: tests/scenarios/placement/*.txt. PACELINE_REGENERATE=1 writes what is said now; read the difference."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.scenarios.fleet_text import FleetText, blocks

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.placement import explain
from paceline.fleet.plan import Objective, Pin, PlanRequest, Way
from paceline.node.ways import plan

FILES = sorted((Path(__file__).parent / "placement").glob("*.txt"))


def request(words: list[str]) -> PlanRequest:
    """`plan MODEL [prompt N] [answer N] [weights W] [ways a,b] [pin NODE[:0-15]]... [draft-on NODE]
    [exact yes] [streams N] [orchestrator NODE] [exclude NODE]`; with streams, throughput counts."""
    model, *rest = words
    said: dict[str, str] = {}
    pins: list[Pin] = []
    for key, value in zip(rest[::2], rest[1::2], strict=True):
        if key == "pin":
            name, _, span = value.partition(":")
            first, _, last = span.partition("-")
            pins.append(Pin(NodeId(name), LayerRange(int(first), int(last) + 1) if span else None))
        else:
            said[key] = value
    return PlanRequest(
        model,
        weights=said.get("weights", ""),
        prompt_tokens=int(said.get("prompt", 512)),
        answer_tokens=int(said.get("answer", 256)),
        ways=frozenset(Way(way) for way in said["ways"].split(",")) if "ways" in said else None,
        pins=tuple(pins),
        proposer=NodeId(said["draft-on"]) if "draft-on" in said else None,
        exact="exact" in said,
        objective=Objective.THROUGHPUT if "streams" in said else Objective.LATENCY,
        streams=int(said.get("streams", 1)),
        orchestrator=NodeId(said["orchestrator"]) if "orchestrator" in said else None,
        exclude=frozenset({NodeId(said["exclude"])}) if "exclude" in said else frozenset(),
    )


def answer(fleet: FleetText, asked: PlanRequest) -> list[str]:
    cards = list(fleet.cards.values())
    random.Random(0).shuffle(cards)
    try:
        return list(explain(plan(cards, asked)))
    except PlacementError as error:
        return [f"{type(error).__name__} ({error.constraint}): {error.message}", *([f"hint: {error.hint}"] if error.hint else [])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    fleet, out = FleetText(), []
    wrong: list[str] = []
    for said, expected in blocks(path.read_text()):
        answered: list[str] = []
        for line in said:
            match line.split():
                case [] | ["#", *_]:
                    pass
                case ["plan", *words]:
                    answered += answer(fleet, request(words))
                case _:
                    fleet.read(line)
        out += [*said, "----", *answered, ""]
        if answered != expected:
            wrong.append("\n".join(["expected:", *expected, "answered:", *answered]))
    if os.environ.get("PACELINE_REGENERATE"):
        path.write_text("\n".join(out))
        return
    assert not wrong, "\n\n".join(wrong)


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 4
