"""What does not fit a machine after all is planned anew without it, where that is allowed, and said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ways.pipeline.routes.test_choosing import CARDS
from tests.unit.ways.pipeline.routes.test_router import Eyes

from paceline.core.clock import SystemClock
from paceline.core.errors import ImpossiblePin, OutOfMemory, PipelineDisabled, PlacementError
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.core.stats import EngineStats
from paceline.fleet.choices import FAILED_S
from paceline.fleet.placement import headline
from paceline.fleet.plan import ALONE, Choice, Pin, Plan, PlanRequest, Way
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.node import pipelines, planning
from paceline.node.pipelines import LoadTold, names_of, serve_planned
from paceline.node.planning import Constraints
from paceline.store.home import Home
from paceline.ways.pipeline.executor.route import Opening
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.splits import PIPELINE
from paceline.ways.tensor.price import TENSOR


def served(monkeypatch: pytest.MonkeyPatch, *, enabled: bool, ways: set[Any]) -> tuple[list[str], Choice | None, Any]:
    """What was said, the plan of the pipeline that was built, and what plans on; this machine has the memory for no model."""
    said: list[str] = []
    spread: list[Choice] = []

    def too_large(settings: NodeSettings, *_: object) -> None:
        raise OutOfMemory(f"The weights of {settings.model} need 90.0 GiB")

    async def over_others(*given: Any) -> Any:
        spread.append(next(each for each in given if isinstance(each, Choice)))
        return SimpleNamespace(model=SimpleNamespace(name="m"), pipeline_id="0a1b2c3d")

    async def offer(*_: object) -> None: ...

    def said_of(*_: object) -> None: ...

    monkeypatch.setattr(pipelines, "resolve", lambda *_: SimpleNamespace(name="m"))
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: Eyes(CARDS))
    monkeypatch.setattr(pipelines, "build_node", too_large)
    monkeypatch.setattr(pipelines, "_build_spread", over_others)
    whole: Any = SimpleNamespace(
        fleet=None,
        home=None,
        offer=offer,
        models=SimpleNamespace(bound=None),
        slots=SimpleNamespace(taken=0),
        attach=offer,
        show_plan=said_of,
        forget_plan=said_of,
        planning={},
        keep=said_of,
    )
    asked = Constraints(frozenset(ways), PipelineOrder(PipelineSettings(enabled=enabled)))
    told = LoadTold(lambda *_: None, lambda *_: None, lambda _: None, said.append)
    asyncio.run(serve_planned(whole, NodeSettings("m"), asked, SystemClock(), told))
    return said, spread[0] if spread else None, whole.planning["m"]


def test_what_does_not_fit_here_is_spread_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    said, made, _ = served(monkeypatch, enabled=True, ways={ALONE, PIPELINE})
    assert said[0].startswith("Plan for m: own alone: "), "the plan's first choice is tried first"
    assert said[1].startswith("m does not fit this machine alone: The weights of m need 90.0 GiB")
    assert made is not None
    assert made.way == PIPELINE
    assert made.stages[0].node_id == "own"


def test_what_did_not_fit_here_is_tried_here_again_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, follows = served(monkeypatch, enabled=True, ways={ALONE, PIPELINE})
    assert follows._asked.ways == {ALONE, PIPELINE}
    made = planning.plan(CARDS, PlanRequest("m", orchestrator=NodeId("own"), ways=frozenset({ALONE, PIPELINE})))
    assert made.chosen.way == ALONE
    made = replace(made, runners_up=())
    standing, now = follows._standing, SystemClock().monotonic()
    assert standing.look(made, now) is None
    assert standing.look(made, now + FAILED_S / 2) is None, "its memory was too little a while ago"
    assert standing.look(made, now + FAILED_S) is made.chosen


def test_where_spreading_is_not_allowed_the_error_is_the_load_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemory, match=r"need 90\.0 GiB"):
        served(monkeypatch, enabled=True, ways={ALONE})


def test_where_pipelines_are_switched_off_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineDisabled):
        served(monkeypatch, enabled=False, ways={PIPELINE})


@pytest.mark.parametrize("meant", [False, True], ids=["another", "the one that is pinned"])
def test_what_is_loaded_by_name_is_planned_and_pins_are_of_the_models_they_were_given_for(
    monkeypatch: pytest.MonkeyPatch, *, meant: bool
) -> None:
    told, spread, shown = list[tuple[int, int]](), list[Choice](), list[str]()

    async def over_others(*given: Any) -> Any:
        told_of = next(each for each in given if isinstance(each, LoadTold))
        told_of.opening(Opening(3, 4))
        spread.append(next(each for each in given if isinstance(each, Choice)))
        return SimpleNamespace(pipeline_id="0a1b2c3d")

    async def too_large() -> Any:
        raise OutOfMemory("The weights need 90.0 GiB")

    async def offer(*_: object) -> None: ...

    monkeypatch.setattr(pipelines, "resolve", lambda ref, _: SimpleNamespace(name=ref))
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: Eyes(CARDS))
    monkeypatch.setattr(pipelines, "_build_spread", over_others)
    models = SimpleNamespace(idle=[], nodes=[])
    whole: Any = SimpleNamespace(fleet=None, home=None, offer=offer, models=models, slots=SimpleNamespace(taken=0), planning={})
    whole.keep = whole.forget_plan = lambda *_: None
    whole.show_plan = lambda _name, words: shown.append(words)
    order = PipelineOrder(PipelineSettings(search_seconds=0), pins=(Pin(NodeId("nobody")),))
    pipelines.plan_loads(whole, Constraints(frozenset({ALONE, PIPELINE}), order), ["m" if meant else "x"], SystemClock())

    async def bring() -> Any:
        location: Any = SimpleNamespace(name="m")
        return await whole.models.by_plan(location, NodeSettings("m"), lambda *at: told.append(at), too_large)

    if meant:
        with pytest.raises(ImpossiblePin, match="nobody"):
            asyncio.run(bring())
    else:
        assert asyncio.run(bring()).pipeline_id == "0a1b2c3d"
        assert shown[0].endswith("; pipeline 0a1b2c3d")
        assert [choice.way for choice in spread] == [PIPELINE]
        assert told == [(3, 4)]
        assert "m" in whole.planning


@pytest.mark.parametrize("idle_gib", [0, 1, 7])
def test_what_idles_here_counts_as_room_for_what_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch, idle_gib: int) -> None:
    """Weights of 2.6 GiB and their KV, where 1 GiB is free: alone once what idles made way, or else over others, with a part for which it made way here."""
    built, asked_room = list[str](), list[LayerRange]()

    async def over_others(*given: Any) -> Any:
        built.append(PIPELINE)
        return SimpleNamespace(pipeline_id="0a1b2c3d")

    async def alone() -> Any:
        built.append(ALONE)
        return SimpleNamespace(pipeline_id="")

    async def offer(*_: object) -> None: ...

    async def room(_: NodeSettings, layers: LayerRange) -> None:
        asked_room.append(layers)

    use = SimpleNamespace(taken_bytes=idle_gib << 30)
    warm = SimpleNamespace(model=SimpleNamespace(weights="int4"))
    nodes = [SimpleNamespace(model=SimpleNamespace(name=name), warm=warm, use=lambda: use) for name in ("idle", "busy")]
    monkeypatch.setattr(pipelines, "resolve", lambda ref, _: SimpleNamespace(name=ref))
    cards = [replace(card, memory_free_bytes=1 << 30) if card.node_id == "own" else card for card in CARDS]
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: Eyes(cards))
    monkeypatch.setattr(pipelines, "_build_spread", over_others)
    models = SimpleNamespace(idle=["idle"] if idle_gib else [], nodes=nodes, room=room)
    whole: Any = SimpleNamespace(fleet=None, home=None, offer=offer, models=models, slots=SimpleNamespace(taken=0), planning={})
    whole.keep = whole.forget_plan = whole.show_plan = lambda *_: None
    pipelines.plan_loads(whole, Constraints(frozenset({ALONE, PIPELINE}), PipelineOrder(PipelineSettings())), [], SystemClock())
    location: Any = SimpleNamespace(name="m")
    asyncio.run(whole.models.by_plan(location, NodeSettings("m"), lambda *_: None, alone))
    assert built == [ALONE if idle_gib == 7 else PIPELINE]
    assert len(asked_room) == (idle_gib == 1)
    assert all(layers.start == 0 for layers in asked_room)


def loaded_without_a_plan(monkeypatch: pytest.MonkeyPatch, eyes: Eyes, asked: Constraints | None = None) -> tuple[Any, dict[str, Any]]:
    """A node on which m was loaded alone, no plan being there, and what it keeps at work."""

    async def alone() -> Any:
        return SimpleNamespace(pipeline_id="")

    async def offer(*_: object) -> None: ...

    kept = dict[str, Any]()
    monkeypatch.setattr(planning, "SHOWN_S", 0.0)
    monkeypatch.setattr(pipelines, "REPLANNED_S", 0.0)
    monkeypatch.setattr(pipelines, "resolve", lambda ref, _: SimpleNamespace(name=ref))
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: eyes)
    models = SimpleNamespace(idle=[], nodes=[], is_loaded=lambda _: True)
    whole: Any = SimpleNamespace(fleet=None, home=None, offer=offer, models=models, slots=SimpleNamespace(taken=0), shown={})
    whole.planning = {"m": "of a load before", "x": "of another"}
    whole.forget_plan, whole.show_plan = whole.planning.pop, whole.shown.__setitem__
    whole.keep = lambda work, name: kept.update({name: work})
    asked = asked or Constraints(frozenset({ALONE, PIPELINE}), PipelineOrder(PipelineSettings()))
    pipelines.plan_loads(whole, asked, [], SystemClock())
    location: Any = SimpleNamespace(name="m")
    asyncio.run(whole.models.by_plan(location, NodeSettings("m"), lambda *_: None, alone))
    return whole, kept


def test_a_load_without_a_plan_is_not_taken_for_what_was_planned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = loaded_without_a_plan(monkeypatch, Eyes([]))
    assert whole.planning.pop("m") != "of a load before"
    assert whole.planning == {"x": "of another"}


def test_a_load_without_a_plan_is_planned_and_followed_once_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = Eyes([])
    whole, kept = loaded_without_a_plan(monkeypatch, eyes)

    class Later(dict[str, str]):
        def __setitem__(self, name: str, words: str) -> None:
            super().__setitem__(name, words)
            eyes.held = CARDS

    whole.show_plan = Later().__setitem__
    late = kept.pop("plan of m")
    asyncio.run(asyncio.wait_for(late(), 60))
    assert list(kept) == ["plan of m"], "it is planned again from now on"
    assert isinstance(whole.planning["m"], pipelines._Replanning)  # pyright: ignore[reportPrivateUsage]
    assert whole.planning["m"]._standing.running.way == ALONE, "that is what runs"


def test_why_there_is_no_plan_is_shown_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, kept = loaded_without_a_plan(monkeypatch, Eyes([]))
    whole.models.is_loaded = lambda _: not whole.shown
    asyncio.run(asyncio.wait_for(kept["plan of m"](), 60))
    assert whole.shown["m"].startswith("own alone, without a plan yet: ")
    assert "m" not in whole.planning, "what is no more loaded is not planned"


def load_as_planned(
    monkeypatch: pytest.MonkeyPatch, chosen_of: Callable[[Collection[Way]], Plan], ways: Collection[Way], told: list[str]
) -> tuple[list[Way], list[Any]]:
    """Load a model where nothing can be spread: what was built, in turn, and what is followed then.

    Args:
        chosen_of: the plan, of the ways that are left.
    """
    monkeypatch.setattr(pipelines, "plan_once_shown", lambda *given: chosen_of(given[3].ways))
    monkeypatch.setattr(pipelines, "resolve", lambda ref, _: SimpleNamespace(name=ref))
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: Eyes(CARDS))
    followed, built = list[Any](), list[Way]()
    monkeypatch.setattr(pipelines, "_follow", lambda *given: followed.append(given))

    async def fails(_whole: object, _settings: object, _asked: object, _access: object, chosen: Choice, *_: object) -> Any:
        built.append(chosen.way)
        assert len(built) < 9, "it goes on for ever"
        raise PlacementError("bee went away")

    async def alone(*_: object) -> Any:
        built.append(ALONE)
        return SimpleNamespace(pipeline_id="")

    async def offer(*_: object) -> None: ...

    def unheard(*_: object) -> None: ...

    monkeypatch.setattr(pipelines, "_build_spread", fails)
    monkeypatch.setattr(pipelines, "_build_here", alone)
    whole: Any = SimpleNamespace(fleet=None, home=None, offer=offer, attach=offer, slots=SimpleNamespace(taken=0), planning={})
    asked = Constraints(frozenset(ways), PipelineOrder(PipelineSettings()))
    asyncio.run(serve_planned(whole, NodeSettings("m"), asked, SystemClock(), LoadTold(unheard, unheard, unheard, told.append)))
    (given,) = followed
    assert asked in given, "each may be tried later"
    return built, given


@pytest.mark.parametrize("others", [True, False], ids=["there is another way", "there is none"])
def test_a_pipeline_that_can_t_be_had_at_the_load_is_planned_without_and_tried_later(
    monkeypatch: pytest.MonkeyPatch, *, others: bool
) -> None:
    made = planning.plan(CARDS, PlanRequest("m", orchestrator=NodeId("own"), ways=frozenset({ALONE, PIPELINE})))
    spread, *_ = candidates()
    chosen = replace(made, chosen=spread, runners_up=(made.chosen,) if others else ())
    told = list[str]()
    load = partial(load_as_planned, monkeypatch, lambda left: chosen if PIPELINE in left else made, {ALONE, PIPELINE}, told)
    if not others:
        with pytest.raises(PlacementError, match="bee went away"):
            load()
        return
    built, given = load()
    assert built == [PIPELINE, ALONE]
    assert any("bee went away. Planning without pipeline" in line for line in told)
    assert (spread,) in given, "but this one not soon"


def test_ways_that_fail_one_after_the_other_are_each_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planning.plan(CARDS, PlanRequest("m", orchestrator=NodeId("own"), ways=frozenset({ALONE, PIPELINE})))
    spread, *_ = candidates()
    ranks = replace(spread, way=TENSOR)

    def chosen_of(left: Collection[Way]) -> Plan:
        best = ranks if TENSOR in left else spread if PIPELINE in left else made.chosen
        return replace(made, chosen=best, runners_up=(made.chosen,))

    built, given = load_as_planned(monkeypatch, chosen_of, {ALONE, PIPELINE, TENSOR}, [])
    assert built == [TENSOR, PIPELINE, ALONE]
    assert (ranks, spread) in given, "neither is tried again soon"


def test_ways_that_were_full_or_failed_at_the_start_are_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pipelines began here as may, when the model was loaded; and not any more."""
    settings = PipelineSettings()
    asked = Constraints(frozenset({ALONE, PIPELINE}), PipelineOrder(settings))
    followed = list[Constraints]()
    monkeypatch.setattr(pipelines, "_follow", lambda *given: followed.append(next(each for each in given if isinstance(each, Constraints))))

    async def alone() -> Any:
        return SimpleNamespace(pipeline_id="")

    async def offer(*_: object) -> None: ...

    monkeypatch.setattr(pipelines, "resolve", lambda ref, _: SimpleNamespace(name=ref))
    monkeypatch.setattr(pipelines, "NodeFleetAccess", lambda *_: Eyes(CARDS))
    slots = SimpleNamespace(taken=settings.max_concurrent_pipelines)
    whole: Any = SimpleNamespace(fleet=None, home=None, offer=offer, models=SimpleNamespace(idle=[], nodes=[]), slots=slots, planning={})
    pipelines.plan_loads(whole, asked, [], SystemClock())
    location: Any = SimpleNamespace(name="m")
    asyncio.run(whole.models.by_plan(location, NodeSettings("m"), lambda *_: None, alone))
    assert [each.ways for each in followed] == [asked.ways]


SPREAD = PlanRequest("m", orchestrator=NodeId("own"), ways=frozenset({PIPELINE}))


def candidates() -> list[Choice]:
    """Pipelines of this fleet, the best first."""
    made = planning.plan(CARDS, SPREAD)
    return [made.chosen, *made.runners_up]


async def replanned(
    monkeypatch: pytest.MonkeyPatch,
    fails: Collection[Way] = (),
    *,
    ways: Collection[Way] = (ALONE, PIPELINE),
    runs: Choice | None = None,
    over: tuple[LayerSpan, ...] = (),
) -> tuple[list[str], list[str]]:
    """What was built as a plan's choice was better for long, and what was shown.

    Args:
        fails: what can't be built.
        ways: that are allowed.
        runs: what the plan chose before; None: the best pipeline.
        over: what others run of it by now.
    """
    monkeypatch.setattr("paceline.fleet.choices.HELD_S", 0.0)
    monkeypatch.setattr("paceline.fleet.choices.BETTER", 1.0)
    monkeypatch.setattr(pipelines, "REPLANNED_S", 0.0)
    built: list[str] = []
    shown: list[str] = []
    done = asyncio.Event()

    async def build(way: Way) -> Any:
        built.append(way)
        if way in fails:
            raise PlacementError(f"no {way}")

    async def change(_: object, build: Any) -> bool:
        await build()
        return True

    def show(_name: str, words: str) -> None:
        shown.append(words)
        if len(shown) == 3:
            done.set()

    monkeypatch.setattr(pipelines, "_build_here", lambda *_: build(ALONE))
    monkeypatch.setattr(pipelines, "_build_spread", lambda *_: build(PIPELINE))
    whole: Any = SimpleNamespace(
        models=SimpleNamespace(
            change=change,
            is_loaded=lambda _: True,
            nodes=[
                SimpleNamespace(
                    model=SimpleNamespace(name="m"), spans=lambda: over, pipeline_id="0a1b2c3d", host=SimpleNamespace(stats=EngineStats)
                )
            ],
        ),
        slots=SimpleNamespace(taken=0),
        show_plan=show,
        planning={},
    )
    asked = Constraints(frozenset(ways), PipelineOrder(PipelineSettings()))
    eyes: Any = Eyes(CARDS)
    spread = planning.plan(CARDS, SPREAD)
    spread = spread if runs is None else replace(spread, chosen=runs)
    location: Any = SimpleNamespace(name="m")
    replanning = pipelines._Replanning(whole, NodeSettings("m"), asked, eyes, location, spread, SystemClock())  # pyright: ignore[reportPrivateUsage]
    task = asyncio.create_task(replanning._run())  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait_for(done.wait(), 60)
    task.cancel()
    return built, shown


def test_what_is_better_for_long_is_built_in_the_place_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    built, shown = asyncio.run(replanned(monkeypatch))
    assert built == [ALONE]
    assert shown[-1].startswith("own alone: ")
    assert "; otherwise own [" in shown[-1]


def test_a_better_pipeline_is_built_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *others = candidates()
    built, shown = asyncio.run(replanned(monkeypatch, ways={PIPELINE}, runs=others[-1]))
    assert built == [PIPELINE]
    assert shown[-1].startswith(f"{headline(best)}: ")


def test_where_its_route_went_to_what_is_better_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *others = candidates()
    over = tuple(LayerSpan(stage.node_id, stage.layers) for stage in best.stages[1:])
    built, shown = asyncio.run(replanned(monkeypatch, ways={PIPELINE}, runs=others[-1], over=over))
    assert built == []
    assert shown[-1].startswith(f"{headline(best)}: ")
    assert "now over" not in shown[-1]


def test_a_pipeline_that_runs_over_others_than_planned_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    over = (LayerSpan(NodeId("dog"), LayerRange(3, 24)),)
    _, shown = asyncio.run(replanned(monkeypatch, [ALONE], over=over))
    assert "; now over dog [3..23]; " in shown[0] + shown[-1]


def test_what_can_t_be_built_leaves_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    built, shown = asyncio.run(replanned(monkeypatch, [ALONE]))
    assert built == [ALONE, PIPELINE]
    assert shown[-1].startswith("own [")
    assert "; would rather be own alone: " in shown[-1]


def test_a_named_model_that_was_removed_is_no_matter_of_others_loads(tmp_path: Path) -> None:
    (tmp_path / "there.gguf").write_bytes(b"GGUF")
    assert names_of({str(tmp_path / "gone.gguf"), str(tmp_path / "there.gguf")}, Home(tmp_path / "home")) == {"there"}
