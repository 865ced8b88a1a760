"""What a node prints as its plan is what it builds: fleets in executed.txt, from the view to the machines that a route is opened over.

Real here: the plan, what `serve_planned` makes of it, the layers that stay, the loads that are begun, the router's choice, and whom the engine asks for
drafts. Not here: weights, sockets and kernels; an opener writes down whom it was asked to open a route over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.scenarios.fleet_text import FleetText

from paceline.backends.cpu.shares import deal
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan, WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import FleetView, LiveCard, TrustPolicy, Use
from paceline.fleet.plan import ALONE, Objective
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.node import pipelines
from paceline.node.pipelines import LoadTold, serve_planned
from paceline.node.planning import Constraints
from paceline.node.ways import parse_pin
from paceline.ways.draft.finding import Verifier, drafters
from paceline.ways.draft.price import DRAFT
from paceline.ways.pipeline.executor.route import RouteStage
from paceline.ways.pipeline.meter import PipelineMeter
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes import build
from paceline.ways.pipeline.routes import router as ahead
from paceline.ways.pipeline.splits import PIPELINE
from paceline.ways.tensor.price import TENSOR

MODELS = [
    "model mid layers 32 hidden 4096 layer 130M edges 600M kv 4096 context 65536 vocabulary v",
    "model cut layers 32 hidden 4096 layer 130M edges 600M kv 4096 context 65536 heads 8 inner 14336 words 128256 attention 25M",
    "model tiny layers 12 hidden 512 layer 4M edges 30M kv 512 context 65536 vocabulary v",
]


def fleets() -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in (Path(__file__).parent / "executed.txt").read_text().splitlines():
        match line.split():
            case ["fleet", *words]:
                name, lines = " ".join(words), []
            case [] | ["#", *_]:
                pass
            case ["serve", *_]:
                yield name, [*lines, line]
            case _:
                lines.append(line)


class Built(Exception):
    """Raised in the place of what would be built. Ends `serve_planned`."""

    @property
    def message(self) -> str:
        return str(self.args[0])


@dataclass
class Node:
    """One node of a fleet of cards: what `serve_planned` and the pipeline's build ask of it."""

    node_id: NodeId
    fleet_text: FleetText
    loop: asyncio.AbstractEventLoop
    asked: list[LayerSpan] = field(default_factory=list[LayerSpan])
    """To load ahead."""
    plans: dict[str, str] = field(default_factory=dict[str, str])

    def cards(self) -> Sequence[NodeCard]:
        return list(self.fleet_text.cards.values())

    def trust(self) -> Mapping[NodeId, Trust]:
        return self.fleet_text.trust

    def wait_for_change(self, seconds: float) -> None:
        del seconds

    def drafter(self) -> str:
        """Whom the engine asks for drafts where none was named."""
        offer = self.fleet_text.cards[self.node_id].models[0]
        view = FleetView(self.node_id, tuple(LiveCard(card, 0.0, trust=self.fleet_text.trust[card.node_id]) for card in self.cards()))
        found = drafters(TrustPolicy().eligible(view, Use.DRAFT), Verifier(self.node_id, offer.model, offer.vocabulary), "")
        return f"{found[0].node_id} drafting with {found[0].model_id}"


def part(node_id: NodeId, layers: LayerRange) -> str:
    return f"{node_id} [{layers.start}..{layers.stop - 1}]" if layers else f"{node_id} [embedding and head]"


def executed(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> tuple[list[str], str]:
    """What was said, and what was built."""
    fleet = FleetText()
    for line in [*MODELS, *lines[:-1]]:
        fleet.read(line)
    _, own, model, *words = lines[-1].split()
    pins = tuple(parse_pin(words[place + 1]) for place, word in enumerate(words) if word == "pin")
    layers = int(words[words.index("own") + 1]) if "own" in words else None
    asked_for = {"pipeline": {PIPELINE}, "no-pipeline": {ALONE, DRAFT}, "ranks": {TENSOR}}
    ways = next((asked_for[word] for word in words if word in asked_for), {ALONE, DRAFT, PIPELINE, TENSOR})
    settings = PipelineSettings(search_seconds=0, max_shards_per_request=2, allow_self_as_shard="no-self" not in words)
    objective = Objective.THROUGHPUT if "throughput" in words else Objective.LATENCY
    asked = Constraints(frozenset(ways), PipelineOrder(settings, pins, layers, objective))
    said: list[str] = []

    async def run() -> str:
        node = Node(NodeId(own), fleet, asyncio.get_running_loop())
        shape = fleet.models[model].shape
        assert shape is not None

        def set_up(*_: object, **__: object) -> Any:
            spec = SimpleNamespace(n_layers=shape.n_layers, hidden=shape.hidden, max_context=shape.max_context)
            kv = SimpleNamespace(tokens=4096, context=4096)
            head = partial(SimpleNamespace, numerics_id="m", holds_identity=True, block_size=16, close=lambda: None)
            return SimpleNamespace(
                opened=SimpleNamespace(name=model, spec=spec),
                settings=NodeSettings(model),
                weights=WeightsFormat.INT4,
                digest=fleet.models[model].digest,
                most=EngineConfig(4096),
                kernels="null",
                room=lambda _: kv,
                config=lambda _: EngineConfig(4096),
                load=lambda layers, *_: head(layers=layers),
            )

        class Opener:
            least_blocks, block_size = 2, 16

            def __init__(self, *_: object) -> None: ...

            async def open(self, parts: Sequence[LayerSpan], **_: object) -> Any:
                stages = [RouteStage(each.node_id, each.layers, "", "m", holds_identity=True) for each in parts]
                return SimpleNamespace(stages=stages, close=lambda: None)

        def executor(head: object, n_layers: int, router: Any, *_: object, **__: object) -> None:
            del head
            stages = router.find(5.0).stages
            assert node.asked == [LayerSpan(stage.node_id, stage.layers) for stage in stages], "those that load ahead are those that run"
            first = LayerRange(0, min((stage.layers.start for stage in stages), default=n_layers))
            raise Built(" -> ".join([part(node.node_id, first), *(part(stage.node_id, stage.layers) for stage in stages)]))

        async def to_load(_: object, __: object, node_id: NodeId, layers: LayerRange) -> None:
            node.asked.append(LayerSpan(node_id, layers))

        def one_or_ranks(settings: NodeSettings, *_: object) -> None:
            if not settings.tensor_on:
                raise Built(f"{own} alone")
            assert shape.divided is not None
            attention = shape.divided.attention_bytes / shape.layer_bytes
            inner = shape.divided.ffn
            raise Built(
                "ranks on "
                + " + ".join(
                    f"{node_id or own} {len(share.kv_heads) / shape.divided.n_kv_heads * attention + len(share.inner(shape.divided)) / inner * (1 - attention):.0%}"
                    for node_id, share in zip(settings.tensor_on, deal(shape.divided, settings.tensor), strict=True)
                )
            )

        async def places(settings: NodeSettings, *_: object) -> set[NodeId | None]:
            assert {*settings.tensor_on} <= {None, *fleet.cards}
            return {*settings.tensor_on}

        monkeypatch.setattr(pipelines, "resolve", lambda *_: SimpleNamespace(name=model))
        monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: node)
        monkeypatch.setattr(pipelines, "build_node", one_or_ranks)
        monkeypatch.setattr(pipelines, "places_of", places)
        monkeypatch.setattr(pipelines, "tensor_ends", lambda _: None)
        monkeypatch.setattr(build, "set_up", set_up)
        monkeypatch.setattr(build, "RouteOpener", Opener)
        monkeypatch.setattr(build, "SpareKeeper", lambda *_: SimpleNamespace(keep=lambda *_: None, stop=lambda: None))
        monkeypatch.setattr(build, "PipelineExecutor", executor)
        monkeypatch.setattr(ahead, "ask_to_load", to_load)

        async def offer(*_: object) -> None: ...

        slots = SimpleNamespace(take=lambda _: lambda: None, taken=settings.max_concurrent_pipelines if "full" in words else 0)
        models = SimpleNamespace(bound=None)
        whole: Any = SimpleNamespace(fleet=node, home=None, offer=offer, slots=slots, models=models, pipelines=PipelineMeter())
        told = LoadTold(lambda *_: None, lambda *_: None, lambda _: None, said.append)
        try:
            await serve_planned(whole, NodeSettings(model), asked, SystemClock(), told)
        except Built as built:
            drafted = bool(said) and " drafting with " in said[-1].partition(": ")[2].partition(":")[0]
            return f"{own}, {node.drafter()}" if drafted else built.message
        raise AssertionError("something else was built")

    return said, asyncio.run(run())


FLEETS = list(fleets())


@pytest.mark.parametrize(("name", "lines"), FLEETS, ids=[name for name, _ in FLEETS])
def test_the_plan_that_is_printed_is_what_is_built(monkeypatch: pytest.MonkeyPatch, name: str, lines: list[str]) -> None:
    said, built = executed(monkeypatch, lines)
    if said:
        assert said[-1].startswith(f"Plan for {lines[-1].split()[2]}: {built}: ")
    else:  # there is none: what is missing a load says best
        assert built == "a alone"
        assert name in HOPELESS


HOPELESS = {"no memory anywhere", "guests alone could help"}


def test_settings_of_pipelines_constrain_the_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = dict(FLEETS)
    lines = fleet["this machine holds no layers of its own pipelines"]
    assert executed(monkeypatch, lines)[1] == "a [embedding and head] -> b [0..31]"
    assert executed(monkeypatch, [*lines[:-1], "serve a mid"])[1].startswith("a [0..")
    lines = fleet["as many pipelines begin here as may, so that it runs alone"]
    assert executed(monkeypatch, lines)[1] == "a alone"
    assert executed(monkeypatch, [*lines[:-1], "serve a mid"])[1] != "a alone"


def test_how_long_a_context_a_machine_serves_parts_no_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict(FLEETS)["a slow one that serves a shorter context beside a quick one that has the model on its disk"]
    assert executed(monkeypatch, lines)[1] == "a [embedding and head] -> b [0..31]"


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("two alike on a quick link share each layer", "ranks on a 50% + b 50%"),
        ("ranks of unlike speeds", "ranks on a 68% + b 32%"),
        ("ranks behind a slow link are slower than one machine", "a alone"),
        ("ranks behind a quick network whose calls take long", "ranks on a 50% + b 50%"),
        ("ranks that compute other bytes", "a alone"),
        ("ranks behind a slow link, asked for", "ranks on a 50% + b 50%"),
        ("a rank with less memory has less of each layer", "ranks on a 68% + b 32%"),
    ],
)
def test_tensor_ranks_are_chosen_where_they_pay(monkeypatch: pytest.MonkeyPatch, name: str, built: str) -> None:
    assert executed(monkeypatch, dict(FLEETS)[name])[1] == built


def test_there_are_twenty_fleets() -> None:
    assert len(FLEETS) >= 20
