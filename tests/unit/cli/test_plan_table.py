from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from paceline.cli.plan import run_plan, show
from paceline.core.errors import ConfigError, ImpossiblePin
from paceline.core.ids import NodeId
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.plan import PlanRequest
from paceline.node.ways import explained, parse_pin, parse_ways
from paceline.store.catalog import BUNDLED

SHAPE = ModelShape(24, 2048, 100 << 20, 300 << 20, 2048, 32768)
OFFER = ModelOffer("[red]m[/red]", Role.VERIFIER, "int4", 20.0, 200.0, "d" * 64, shape=SHAPE)
FLEET = [
    NodeCard(
        NodeId("ant"),
        1,
        (),
        b"",
        1,
        0,
        memory_free_bytes=2 << 30,
        memory_total_bytes=1,
        models=(OFFER,),
        links=(Link(NodeId("bee"), "x:1", 0.001, 1e8),),
    ),
    NodeCard(NodeId("bee"), 1, (), b"", 1, 0, memory_free_bytes=2 << 30, memory_total_bytes=1, models=(OFFER,)),
]


def test_a_plan_as_a_person_reads_it() -> None:
    console = Console(file=io.StringIO(), width=120)
    show(console, explained(PlanRequest("[red]m[/red]"), lambda: FLEET))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for part in (
        "[red]m[/red], int4 weights, 512 tokens of prompt",
        "bee [0..",
        "-> ant [",
        "limited by memory",
        "can't run it alone: ant needs",
    ):
        assert part in shown
    assert "[0..9]: the layers that a machine runs" in shown
    assert "bee loads its layers first" in shown
    assert not any(word in shown for word in ("ranks:", "drafting:", "[embedding"))


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run_plan(PlanRequest("[red]m[/red]"), (lambda: FLEET, None, (), {}), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["chosen"]["way"] == "pipeline"
    assert said["constraint"] == "memory"


def test_pins_and_ways_are_read() -> None:
    with pytest.raises(ImpossiblePin, match="2 machines are pinned"):
        explained(PlanRequest("[red]m[/red]", ways=parse_ways("alone, draft"), pins=(parse_pin("ant"), parse_pin("bee"))), lambda: FLEET)
    with pytest.raises(ConfigError, match="relay"):
        parse_ways("relay")


def test_what_runs_here_already_is_not_said_to_be_loaded_first() -> None:
    said = [" ".join(explained(PlanRequest(BUNDLED), loaded=loaded).lines) for loaded in ((), (BUNDLED,))]
    assert ["loads the model first" in each for each in said] == [True, False]
