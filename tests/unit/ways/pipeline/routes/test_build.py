"""Layers that no machine could ever run are refused before any is looked for, and what a build that fails had begun is ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.ways.pipeline.routes.test_choosing import CARDS, OWN

from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, ImpossiblePin, OutOfMemory, PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.core.model import ActivationDtype, LayerRange
from paceline.fleet.card import NodeCard
from paceline.fleet.placement import plan
from paceline.fleet.plan import Objective, Pin, PlanRequest
from paceline.machine.config_file import PipelineSettings
from paceline.machine.kv_tier import KvDiskLimits
from paceline.machine.settings import NodeSettings
from paceline.ways.pipeline.order import PipelineOrder, request_of
from paceline.ways.pipeline.price import Pipelined
from paceline.ways.pipeline.routes import build
from paceline.ways.pipeline.routes import build as orders
from paceline.ways.pipeline.routes.build import build_engine_over, check_layers, plan_in_time
from paceline.ways.pipeline.routes.stage_kv import StagesKv
from paceline.ways.pipeline.splits import PIPELINE

BEE = NodeId("bee")


def order(own_layers: int | None, *spans: LayerRange | None) -> PipelineOrder:
    return PipelineOrder(PipelineSettings(), tuple(Pin(BEE, span) for span in spans), own_layers)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (order(30), "--own-layers 30 leaves none"),
        (order(99), "--own-layers 99 leaves none"),
        (order(None, LayerRange(5, 41)), "bee layers 5 to 40, and m has 30"),
        (order(None, LayerRange(30, 31)), "bee layers 30,"),
    ],
)
def test_layers_that_are_not_there(asked: PipelineOrder, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_layers(asked, "m", 30)


@pytest.mark.parametrize("asked", [order(None), order(0), order(29), order(None, None), order(1, LayerRange(1, 30))])
def test_layers_that_are(asked: PipelineOrder) -> None:
    check_layers(asked, "m", 30)


def test_a_pinned_machine_that_was_not_seen_yet_is_waited_for_and_refused_when_time_is_up() -> None:
    said, clock = list[str](), FakeClock()
    eyes = SimpleNamespace(wait_for_change=clock.advance)
    asked = PlanRequest("m", orchestrator=OWN, pins=(Pin(NodeId("late")),), ways=frozenset({PIPELINE}))
    with pytest.raises(ImpossiblePin, match="late is pinned and is not in the fleet"):
        plan_in_time(lambda: plan(CARDS, asked, (Pipelined(),)), cast("Any", eyes), "m", 0.5, clock, said.append)
    assert said == ["Waiting for machines that m could run on, for up to 0.5 s: late has not been seen yet"]


def test_where_no_disk_keeps_kv_none_is_counted() -> None:
    executor: Any = SimpleNamespace(route=None)
    clock, kept = SystemClock(), KvDiskLimits(1 << 20)
    for limits, counted in ((None, False), (kept, True)):
        kv = StagesKv(
            executor, MagicMock(), "d", ActivationDtype.BF16, Path(), limits, clock, dict[NodeId, Trust], MagicMock(), MagicMock()
        )
        assert bool(kv.counts) is counted


@pytest.mark.parametrize("broken", ["served", "sampler", "Engine"])
def test_what_fails_behind_the_route_ends_the_route(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    setup, executor, fake = MagicMock(), MagicMock(), MagicMock()
    setup.opened.spec.n_layers, setup.opened.spec.max_context, setup.settings.context, fake.kv.context = 4, 2048, None, 512
    for name in ("check_layers", "begin_loads", "RouteOpener", "FleetRouter", "SpareKeeper", "Holders", "SpotCheck", "Wanted", "request_of", "StageRequest",
                 "PipelineLimits", "Speed", "vocabulary_id", "context_of"):  # fmt: skip
        monkeypatch.setattr(build, name, getattr(fake, name))
    monkeypatch.setattr("paceline.machine.build.Engine", fake.Engine)
    monkeypatch.setattr(build, "set_up", lambda *_, **__: setup)
    monkeypatch.setattr(build, "fitting", lambda *_: (fake.planned, LayerRange(0, 2), fake.kv))
    monkeypatch.setattr(build, "_whole_blocks", lambda _: 16)
    monkeypatch.setattr(build, "replace", lambda made, **_: made)
    monkeypatch.setattr(build, "PipelineExecutor", lambda *_, **__: executor)
    fake.Wanted.return_value.request.prompt_tokens, setup.config.return_value.max_rows = 1, 64
    fake.StageRequest.return_value.least_blocks, fake.planned.estimate.ttft_s = 16, 1.0
    (fake if broken == "Engine" else setup).configure_mock(**{f"{broken}.side_effect": OutOfMemory("for this")})
    with pytest.raises(OutOfMemory, match="for this"):
        build_engine_over(NodeSettings("m", context=512), PipelineOrder(PipelineSettings(enabled=True)), fake, fake, fake, SystemClock())
    executor.close.assert_called_once()
    assert setup.sampler.return_value.close.called == (broken == "Engine")


def test_where_too_little_memory_is_here_and_no_machine_takes_more_what_is_short_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(_: object, asked: PipelineOrder, *__: object) -> Any:
        if asked.own_layers is not None:
            raise PlacementError("no machine can run the other layers")
        return SimpleNamespace(stages=[SimpleNamespace(layers=range(3))])

    def room(layers: LayerRange) -> None:
        raise OutOfMemory(f"KV of {len(layers)} layers needs 3.0 GiB")

    monkeypatch.setattr(orders, "_planned", planned)
    with pytest.raises(OutOfMemory, match=r"KV of 3 layers needs 3.0 GiB, and others can't take more: no machine can run the other layers"):
        orders.fitting(cast("Any", None), order(None), cast("Any", SimpleNamespace(room=room)), SystemClock())


def test_what_a_person_allows_holds_when_less_fits_than_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_of_the_plan, rooms = list[PlanRequest](), [OutOfMemory("KV of 3 layers needs 3.0 GiB"), "room"]

    def plan(_: object, request: PlanRequest, *__: object) -> Any:
        asked_of_the_plan.append(request)
        return SimpleNamespace(chosen=SimpleNamespace(stages=[SimpleNamespace(layers=range(2))]))

    def room(_: LayerRange) -> object:
        found = rooms.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(orders, "plan", plan)
    settings = PipelineSettings(max_shards_per_request=2, min_host_trust=Trust.TRUSTED)
    planned = SimpleNamespace(stages=[SimpleNamespace(layers=range(3))])
    asked = PipelineOrder(settings, (Pin(BEE),), objective=Objective.THROUGHPUT, planned=cast("Any", planned), exact=True)
    fleet = SimpleNamespace(node_id=NodeId("me"), cards=list[NodeCard], trust=dict[NodeId, Trust])
    setup = MagicMock(digest="d" * 64, weights="int4", room=room)
    setup.settings.context, setup.most.max_rows = 4096, 64
    _, own, _ = orders.fitting(cast("Any", fleet), asked, setup, SystemClock())
    assert own == LayerRange(0, 2)
    (request,) = asked_of_the_plan
    assert (request.exact, request.max_shards, request.min_host_trust) == (True, 2, Trust.TRUSTED)
    assert (request.pins, request.objective, request.orchestrator_layers) == ((Pin(BEE),), Objective.THROUGHPUT, 2)


def test_who_may_hold_no_layers_of_its_own_pipeline_is_given_none() -> None:
    asked = PipelineOrder(PipelineSettings(allow_self_as_shard=False))
    assert request_of(asked, "m", "", NodeId("me"), (9, 9)).orchestrator_layers == 0
