"""Several models on one machine: loaded when they are asked for, kept warm, and never taken away in the middle of an answer."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.seeded_models import TINY, write_gguf
from tests.unit.machine.test_host import BOUND_S, drain, run, until

from paceline.backends.options import LoadProgress
from paceline.core.clock import PREPARE_S, Clock, SystemClock
from paceline.core.errors import (
    ConfigError,
    ExecutorUnavailable,
    ModelAway,
    NodeStopping,
    NoRoom,
    OutOfMemory,
    Overloaded,
    UnknownModel,
)
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream
from paceline.core.model import LayerRange
from paceline.machine.models import LOAD_FAILED, Models
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.node.build import BuiltNode, build_node
from paceline.store.catalog import MANIFEST, ModelLocation, resolve
from paceline.store.home import Home, write_cache

pytestmark = pytest.mark.timeout(600)  # the first load on a machine compiles kernels

SETTINGS = NodeSettings(kv_tokens=512, context=256, max_running=4, threads=1, draft="off")
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: write_gguf(folder / f"{name}.gguf", TINY, "Q8_0", seed) for seed, name in enumerate(NAMES)}
    made["damaged"] = folder / "damaged.gguf"
    made["damaged"].write_bytes(made["a"].read_bytes()[:-4096])
    return made


@pytest.fixture
def home(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """With the models registered where they lie."""
    kernels = Home.from_environment().kernels
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels)
    for name, path in files.items():
        write_cache(tmp_path / "models" / name / MANIFEST, f'{{"path": "{path}"}}'.encode())
    return Home.from_environment()


@pytest.fixture(scope="module")
def one_bytes(files: dict[str, Path]) -> int:
    """What one of them takes."""
    node = build_node(replace(SETTINGS, model=str(files["a"])))
    node.close()
    return node.use().memory_bytes


class Builds:
    """Builds models, and can be held up in the middle of a load."""

    def __init__(self) -> None:
        self.count = Counter[str]()
        self.read = 1, 10
        """Bytes, and of how many, that a load says before it is held up."""
        self.held: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}

    def hold(self, name: str) -> None:
        self.held[name], self.begun[name] = threading.Event(), threading.Event()

    def __call__(self, settings: NodeSettings, progress: LoadProgress) -> BuiltNode:
        name = settings.model
        self.count[name] += 1
        if name in self.held:
            progress(*self.read)
            self.begun[name].set()
            assert self.held[name].wait(BOUND_S)
        return build_node(settings, progress)


@asynccontextmanager
async def models_of(home: Home, builds: Builds | None = None, clock: Clock | None = None, **more: Any) -> AsyncGenerator[Models[BuiltNode]]:
    models = Models(builds or Builds(), SETTINGS, home, clock or SystemClock(), **{"on_demand": True, **more})
    try:
        yield models
    finally:
        models.close()


ids = iter(range(1_000_000))


def asked(models: Models[BuiltNode], name: str, max_tokens: int = 8) -> ChunkStream:
    """An answer from a model that a client names."""
    if models.on_demand:
        assert models.open(name) is not None
    return models.generate(
        name, GenerationRequest(RequestId(f"r{next(ids)}"), (5, 6, 7, 8), max_tokens, SamplingParams(temperature=0), ignore_eos=True)
    )


async def tokens(stream: ChunkStream) -> list[int]:
    return [token for chunk in await drain(stream) for token in chunk.token_ids]


def loaded(models: Models[BuiltNode]) -> set[str]:
    return {node.model.name for node in models.nodes}


def test_a_model_is_loaded_once_for_all_that_ask_and_its_bytes_are_those_it_has_alone(home: Home) -> None:
    async def work() -> None:
        builds = Builds()
        async with models_of(home, builds) as models:
            answers = await asyncio.gather(*(tokens(asked(models, name)) for _ in range(3) for name in NAMES))
            assert builds.count == dict.fromkeys(NAMES, 1)
            assert answers[:3] == answers[3:6] == answers[6:]
            assert len({tuple(answer) for answer in answers}) == 3
        for name, answer in zip(NAMES, answers, strict=False):
            async with models_of(home) as alone:
                assert await tokens(asked(alone, name)) == answer

    run(work())


def test_room_for_two_of_three(home: Home, one_bytes: int) -> None:
    """The one that is idle for longest makes way, and comes back with the same bytes; counters only grow."""

    async def work() -> None:
        async with models_of(home, budget_bytes=2 * one_bytes + one_bytes // 2) as models:
            first = await tokens(asked(models, "a"))
            await tokens(asked(models, "b"))
            assert loaded(models) == {"a", "b"}
            await tokens(asked(models, "a"))
            await tokens(asked(models, "c"))
            assert loaded(models) == {"a", "c"}
            before = models.stats()
            assert before.generated_tokens == 4 * 8
            await tokens(asked(models, "b"))
            assert loaded(models) == {"b", "c"}
            assert models.stats().generated_tokens == 5 * 8
            assert await tokens(asked(models, "a")) == first
            assert models.models()[0].name == "a"

    run(work())


def test_a_model_in_the_middle_of_an_answer_stays_and_who_gets_no_room_is_told_so(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        async with models_of(home, budget_bytes=2 * one_bytes + one_bytes // 2) as models:
            whole = [await tokens(asked(models, name, 100)) for name in ("a", "b")]
            long = [asked(models, name, 100) for name in ("a", "b")]
            begun = [[token for chunk in await anext(stream) for token in chunk.token_ids] for stream in long]
            with pytest.raises(NoRoom) as refused:
                await tokens(asked(models, "c"))
            assert set(refused.value.busy) == {"a", "b"}
            rest = [await tokens(stream) for stream in long]
            assert [some + others for some, others in zip(begun, rest, strict=True)] == whole
            await tokens(asked(models, "c"))  # there is room now
            assert len(loaded(models)) == 2

    run(work())


def test_a_crowd_for_three_models_with_room_for_two(home: Home, one_bytes: int) -> None:
    """Whatever order they come in: an answer is whole and as it is alone, or was refused before it began."""

    async def work() -> None:
        async with models_of(home, budget_bytes=2 * one_bytes + one_bytes // 2) as models:
            alone = {name: await tokens(asked(models, name)) for name in NAMES}

            async def client(name: str) -> bool:
                try:
                    assert await tokens(asked(models, name)) == alone[name]
                except NoRoom:
                    return False
                return True

            for order in ("abc", "cab", "bca"):
                answered = await asyncio.gather(*(client(name) for _ in range(6) for name in order))
                assert any(answered)
            assert models.live == 0
            assert all(await asyncio.gather(*map(client, "ab")))

    run(work())


def test_what_never_fits_sends_nobody_away(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        async with models_of(home, budget_bytes=one_bytes + one_bytes // 2) as models:
            await tokens(asked(models, "a"))
            models._settings = NodeSettings(kv_tokens=1 << 20, threads=1)
            with pytest.raises(ExecutorUnavailable, match="--kv-tokens"):
                await tokens(asked(models, "b"))
            assert loaded(models) == {"a"}

    run(work())


def test_a_damaged_file_leaves_the_others_alone(home: Home, files: dict[str, Path]) -> None:
    async def work() -> None:
        builds = Builds()
        async with models_of(home, builds) as models:
            first = await tokens(asked(models, "a"))
            with pytest.raises(ExecutorUnavailable) as refused:
                models.open("damaged")
            assert refused.value.code == LOAD_FAILED
            # One that was whole when a request named it, and is damaged when it is loaded.
            place = files["b"].with_name("later.gguf")
            place.write_bytes(files["b"].read_bytes())
            write_cache(home.models / "later" / MANIFEST, f'{{"path": "{place}"}}'.encode())
            streams = [asked(models, "later"), asked(models, "later"), asked(models, "a")]
            place.write_bytes(files["damaged"].read_bytes())
            one, two, other = await asyncio.gather(*map(tokens, streams), return_exceptions=True)
            for error in (one, two):
                assert isinstance(error, ExecutorUnavailable)
                assert error.code == LOAD_FAILED
            assert other == first
            place.write_bytes(files["b"].read_bytes())  # mended
            assert await tokens(asked(models, "later")) == await tokens(asked(models, "b"))

    run(work())


def test_a_client_that_leaves_while_a_model_loads(home: Home) -> None:
    """The load goes on, for a client that asks again; nobody else is disturbed."""

    async def work() -> None:
        builds = Builds()
        builds.hold("a")
        async with models_of(home, builds) as models:
            leaves, stays = (asyncio.create_task(tokens(asked(models, "a"))) for _ in range(2))
            assert await asyncio.to_thread(builds.begun["a"].wait, BOUND_S)
            assert [(use.name, use.state) for use in models.in_use()] == [("a", "loading")]
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            assert models.live == 1
            builds.held["a"].set()
            assert len(await stays) == 8
            unread = asked(models, "a")
            await unread.aclose()
            assert await drain(unread) == []
            assert builds.count["a"] == 1

    run(work())


def test_a_load_that_shows_no_sign_is_not_waited_for(home: Home) -> None:
    async def work() -> None:
        builds = Builds()
        builds.hold("a")
        async with models_of(home, builds, patience_s=0.01) as models:
            with pytest.raises(ModelAway):
                await tokens(asked(models, "a"))
            builds.held["a"].set()
            await until(lambda: loaded(models) == {"a"})
            assert len(await tokens(asked(models, "a"))) == 8

    run(work())


@pytest.mark.parametrize("read", [(0, 0), (10, 10)])
def test_compiling_for_the_first_time_is_waited_for(home: Home, read: tuple[int, int]) -> None:
    async def work() -> None:
        clock, builds = FakeClock(), Builds()
        builds.hold("a")
        builds.read = read
        async with models_of(home, builds, clock) as models:
            first = asyncio.create_task(tokens(asked(models, "a")))
            await until(builds.begun["a"].is_set)
            clock.advance(PREPARE_S - 1)
            late = asyncio.create_task(tokens(asked(models, "a")))
            await asyncio.sleep(0)
            clock.advance(2)
            with pytest.raises(ModelAway):
                await tokens(asked(models, "a"))
            builds.held["a"].set()
            assert await first == await late

    run(work())


def test_unloading_waits_for_answers_and_is_refused_where_they_do_not_end(home: Home) -> None:
    async def work() -> None:
        async with models_of(home) as models:
            whole = await tokens(asked(models, "a", 200))
            stream = asked(models, "a", 200)
            got = [token for chunk in await anext(stream) for token in chunk.token_ids]
            with pytest.raises(Overloaded, match="middle of 1"):
                await models.unload("a", 0.0)
            assert loaded(models) == {"a"}
            unloading = asyncio.create_task(models.unload("a:latest", BOUND_S))
            await until(lambda: models.in_use()[0].state == "unloading")
            late = [asyncio.create_task(tokens(asked(models, "a", 200))) for _ in range(2)]
            assert got + await tokens(stream) == whole
            await unloading
            assert [await each for each in late] == [whole] * 2
            await models.unload("a", 0.0)
            assert loaded(models) == set()
            assert await tokens(asked(models, "a", 200)) == whole
            with pytest.raises(UnknownModel):
                await models.unload("b", 0.0)

    run(work())


def test_a_request_that_meets_an_unload_is_refused_where_nothing_is_loaded_on_demand(home: Home) -> None:
    async def work() -> None:
        async with models_of(home, on_demand=False) as models:
            await models.load("a")
            stream = asked(models, "a", 200)
            await anext(stream)
            unloading = asyncio.create_task(models.unload("a", BOUND_S))
            await until(lambda: models.in_use()[0].state == "unloading")
            with pytest.raises(ModelAway):
                await tokens(asked(models, "a"))
            await drain(stream)
            await unloading

    run(work())


@pytest.mark.parametrize("on_demand", [True, False])
def test_what_the_owner_loads_again_during_its_unload_is_loaded_behind_it(home: Home, on_demand: bool) -> None:
    async def work() -> None:
        builds = Builds()
        async with models_of(home, builds, on_demand=on_demand) as models:
            await models.load("a")
            stream = asked(models, "a", 200)
            await anext(stream)
            unloading = asyncio.create_task(models.unload("a", BOUND_S))
            await until(lambda: models.in_use()[0].state == "unloading")
            loading = [asyncio.create_task(models.load("a")) for _ in range(2)]
            await until(lambda: models.expects("a") and "a" in models._loading)
            late = asyncio.create_task(tokens(asked(models, "a")))
            await asyncio.sleep(0)
            assert [use.state for use in models.in_use()] == ["unloading"]
            await drain(stream)
            await unloading
            assert [await each for each in loading] == ["a", "a"]
            assert len(await late) == 8
            assert builds.count["a"] == 2

    run(work())


def test_an_owners_load_keeps_what_stays_after_all(home: Home) -> None:
    async def work() -> None:
        builds = Builds()
        async with models_of(home, builds, on_demand=False) as models:
            await models.load("a")
            stream = asked(models, "a", 200)
            await anext(stream)
            unloading = asyncio.create_task(models.unload("a", 0.0))
            await asyncio.sleep(0)
            loading = asyncio.create_task(models.load("a"))
            with pytest.raises(Overloaded):
                await unloading
            assert await loading == "a"
            assert builds.count["a"] == 1
            await drain(stream)

    run(work())


def test_a_request_that_waits_for_an_unload_goes_on_where_the_model_stays(home: Home) -> None:
    async def work() -> None:
        async with models_of(home) as models:
            whole = await tokens(asked(models, "a", 200))
            stream = asked(models, "a", 200)
            first = await anext(stream)
            unloading = asyncio.create_task(models.unload("a", 0.0))
            await asyncio.sleep(0)
            late = asyncio.create_task(tokens(asked(models, "a", 200)))
            with pytest.raises(Overloaded):
                await unloading
            assert await late == whole
            assert [token for token in first for token in token.token_ids] + await tokens(stream) == whole

    run(work())


def test_a_clients_wish_to_unload_takes_nothing_from_others(home: Home) -> None:
    async def work() -> None:
        async with models_of(home) as models:
            whole = await tokens(asked(models, "a", 200))
            stream = asked(models, "a", 200)
            got = [token for chunk in await anext(stream) for token in chunk.token_ids]
            await models.unload_idle("a")
            await models.unload_idle("b")  # which is not loaded
            assert await tokens(asked(models, "a", 200)) == whole  # beside a live one
            assert got + await tokens(stream) == whole
            wishes = [asyncio.create_task(models.unload_idle("a")) for _ in range(3)]
            assert await tokens(asked(models, "a", 200)) == whole
            await asyncio.gather(*wishes)
            await models.unload_idle("a")
            assert loaded(models) == set()
            assert await tokens(asked(models, "a", 200)) == whole

    run(work())


def test_a_stop_ends_a_load_and_those_that_wait_for_it(home: Home) -> None:
    async def work() -> None:
        builds = Builds()
        builds.hold("a")
        async with models_of(home, builds) as models:
            waiting = asyncio.create_task(tokens(asked(models, "a")))
            assert await asyncio.to_thread(builds.begun["a"].wait, BOUND_S)
            models.drain()
            with pytest.raises(NodeStopping):
                await waiting
            loading = models._loading["a"]
            builds.held["a"].set()
            with pytest.raises(NodeStopping):  # at its next sign
                await loading
            assert models.nodes == ()

    run(work())


def test_without_on_demand_only_the_owner_loads_and_nothing_makes_way(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        async with models_of(home, on_demand=False, budget_bytes=one_bytes + one_bytes // 2) as models:
            assert await models.load("a") == "a"
            assert models.open("b") is None
            assert models.loadable() == ()
            with pytest.raises(UnknownModel):
                await tokens(asked(models, "b"))
            with pytest.raises((NoRoom, OutOfMemory)):
                await models.load("b")
            await models.unload("a", 0.0)
            assert models.models() == ()
            await models.load("b")
            assert [model.name for model in models.models()] == ["b"]

    run(work())


def test_names_are_those_on_this_disk_and_no_paths(home: Home, files: dict[str, Path]) -> None:
    async def work() -> None:
        async with models_of(home) as models:
            assert {model.name for model in models.loadable()} >= set(NAMES)
            assert "damaged" not in {model.name for model in models.loadable()}
            for name in (str(files["a"]), f"../models/{files['a'].name}", "./a.gguf", "", "x"):
                assert models.open(name) is None
            found = models.open("A:latest")
            assert found is not None
            assert found.name == "a"
            await tokens(asked(models, "a"))
            with pytest.raises(ConfigError, match="both called"):
                models.add(models.nodes[0])

    run(work())


def test_a_model_is_served_in_another_way_once_it_is_idle_and_requests_wait_for_that(home: Home) -> None:
    async def work() -> None:
        builds = Builds()
        async with models_of(home, builds, on_demand=False) as models:
            await models.load("a")
            before, place = models.nodes[0], resolve("a", home)
            go = asyncio.Event()

            async def another() -> BuiltNode:
                assert not models.nodes, "what served it is gone first: both need memory"
                await go.wait()
                return await asyncio.to_thread(build_node, replace(SETTINGS, model="a"))

            live = asked(models, "a", max_tokens=200)
            first = await anext(live)
            assert not await models.change(place, another), "it is in the middle of an answer"
            rest = await drain(live)
            assert len([token for chunk in [*first, *rest] for token in chunk.token_ids]) == 200
            alone = await tokens(asked(models, "a"))
            changing = asyncio.create_task(models.change(place, another))
            await until(lambda: not models.nodes)
            assert [model.name for model in models.models()] == ["a"]
            assert not await models.change(place, another), "one change at a time"
            waiting = asyncio.create_task(tokens(asked(models, "a")))
            await asyncio.sleep(0)
            go.set()
            assert await changing
            assert await waiting == alone
            assert models.nodes[0] is not before

            async def fails() -> BuiltNode:
                raise OutOfMemory("It does not fit")

            with pytest.raises(OutOfMemory):
                await models.change(place, fails)
            assert models.models() == ()
            assert await models.change(place, another), "what is not loaded may be tried again"
            assert await tokens(asked(models, "a")) == alone

    run(work())


def test_what_is_loaded_by_name_is_built_as_planned(home: Home) -> None:
    async def work() -> None:
        planned = list[str]()

        async def by_plan(place: ModelLocation, settings: NodeSettings, progress: LoadProgress, alone: Any) -> BuiltNode:
            progress(1, 2)
            assert models.in_use()[-1].percent == 50
            planned.append(f"{place.name} {settings.model}")
            return await alone()

        async with models_of(home) as models:
            models.by_plan = by_plan
            await tokens(asked(models, "a"))
            await models.load("b")
            await models.load("b")
            assert planned == ["a a", "b b"]
            assert loaded(models) == {"a", "b"}

    run(work())


def test_what_made_way_is_not_built_again_in_another_way(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        async with models_of(home, budget_bytes=one_bytes + one_bytes // 2) as models:
            await tokens(asked(models, "a"))

            async def another() -> BuiltNode:
                pytest.fail("it is gone")

            async with models._turn:
                other = asyncio.create_task(tokens(asked(models, "b")))
                await until(lambda: "b" in models._loading)
                await asyncio.sleep(0)
                changing = asyncio.create_task(models.change(resolve("a", home), another))
                await asyncio.sleep(0)
            assert not await changing
            await other
            assert loaded(models) == {"b"}

    run(work())


def test_a_model_is_unloaded_while_another_is_planned_and_fetched(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def by_plan(place: ModelLocation, settings: NodeSettings, progress: LoadProgress, alone: Any) -> BuiltNode:
            begun.set()
            await go.wait()
            return await alone()

        async with models_of(home, budget_bytes=one_bytes + one_bytes // 2) as models:
            await models.load("a")
            models.by_plan = by_plan
            other = asyncio.create_task(tokens(asked(models, "b")))
            await begun.wait()
            await models.unload("a", 0.0)
            assert models.nodes == ()
            go.set()
            assert len(await other) == 8

    run(work())


def test_room_is_not_counted_while_a_model_is_taken_out(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        async with models_of(home, budget_bytes=one_bytes + one_bytes // 2) as models:
            await models.load("a")
            release, closing = models.nodes[0].host.close, threading.Event()

            def close() -> bool:
                assert closing.wait(BOUND_S)
                return release()

            models.nodes[0].host.close = close  # type: ignore[method-assign]
            unloading = asyncio.create_task(models.unload("a", 0.0))
            await until(lambda: not models.nodes)
            other = asyncio.create_task(models.room(replace(SETTINGS, model="b")))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not other.done()
            closing.set()
            await unloading
            assert (await other).most_bytes == one_bytes + one_bytes // 2

    run(work())


def test_as_many_make_way_as_a_part_of_a_model_needs(home: Home, one_bytes: int) -> None:
    async def work() -> None:
        settings = replace(SETTINGS, model="b")
        part = set_up(settings).room(LayerRange(0, 1))
        part_bytes = part.weights_bytes + part.working_bytes + part.kv_bytes
        assert part_bytes < one_bytes
        async with models_of(home, budget_bytes=one_bytes + part_bytes) as models:
            await models.load("a")
            assert (await models.room(settings, LayerRange(0, 1))).most_bytes == part_bytes
            assert loaded(models) == {"a"}
            await models.room(settings)
            assert loaded(models) == set()

    run(work())


def test_a_load_says_what_came_of_it_whatever_it_waited_for(home: Home) -> None:
    async def work() -> None:
        async with models_of(home) as models:
            await models.load("a")

            async def another() -> BuiltNode:
                pytest.fail("it was taken away before its turn")

            async with models._turn:
                changing = asyncio.create_task(models.change(resolve("a", home), another))
                await until(lambda: "a" in models._loading)
                await models.unload("a", 0.0)
                loading = asyncio.create_task(models.load("a"))
                await until(lambda: not models.nodes)
            assert not await changing
            assert await loading == "a"
            assert loaded(models) == {"a"}

    run(work())
