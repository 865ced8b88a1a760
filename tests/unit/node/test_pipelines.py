"""What does not fit a machine after all is planned anew without it, where that is allowed, and said."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ways.pipeline.routes.test_choosing import CARDS
from tests.unit.ways.pipeline.routes.test_router import Eyes

from paceline.core.clock import SystemClock
from paceline.core.errors import OutOfMemory, PipelineDisabled
from paceline.fleet.plan import ALONE, Plan
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.node import pipelines
from paceline.node.pipelines import Constraints, LoadTold, serve_planned
from paceline.ways.pipeline.routes.build import PipelineOrder
from paceline.ways.pipeline.splits import PIPELINE


def served(monkeypatch: pytest.MonkeyPatch, *, enabled: bool, ways: set[Any]) -> tuple[list[str], Plan | None]:
    """What was said, and the plan of the pipeline that was built; this machine has the memory for no model."""
    said: list[str] = []
    spread: list[Plan] = []

    def too_large(settings: NodeSettings, _: object) -> None:
        raise OutOfMemory(f"The weights of {settings.model} need 90.0 GiB")

    async def over_others(*given: Any) -> None:
        spread.append(next(each for each in given if isinstance(each, Plan)))

    async def offer(*_: object) -> None: ...

    monkeypatch.setattr(pipelines, "resolve", lambda *_: SimpleNamespace(name="m"))
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: Eyes(CARDS))
    monkeypatch.setattr(pipelines, "build_node", too_large)
    monkeypatch.setattr(pipelines, "_serve_spread", over_others)
    whole: Any = SimpleNamespace(fleet=None, home=None, offer=offer, models=SimpleNamespace(bound=None))
    asked = Constraints(frozenset(ways), PipelineOrder(PipelineSettings(enabled=enabled)))
    told = LoadTold(lambda *_: None, lambda *_: None, lambda _: None, said.append)
    asyncio.run(serve_planned(whole, NodeSettings("m"), asked, SystemClock(), told))
    return said, spread[0] if spread else None


def test_what_does_not_fit_here_is_spread_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    said, made = served(monkeypatch, enabled=True, ways={ALONE, PIPELINE})
    assert said[0].startswith("Plan for m: own alone: "), "the plan's first choice is tried first"
    assert said[1].startswith("m does not fit this machine alone: The weights of m need 90.0 GiB")
    assert made is not None
    assert made.chosen.way == PIPELINE
    assert made.chosen.stages[0].node_id == "own"


def test_where_spreading_is_not_allowed_the_error_is_the_load_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemory, match=r"need 90\.0 GiB"):
        served(monkeypatch, enabled=True, ways={ALONE})


def test_where_pipelines_are_switched_off_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineDisabled):
        served(monkeypatch, enabled=False, ways={PIPELINE})
