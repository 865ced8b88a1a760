"""Engines of other makers as this machine's models: looked at, tested after a failure, never disturbed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.foreign_engine import ScriptedEngine
from tests.fakes.hybrid_model import write_hybrid
from tests.unit.net.member.nodes import in_loop

from paceline.core.errors import EngineGone, ModelAway, NotServed, UnknownModel, WayNotAllowed
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.inference import PassedChats
from paceline.core.model import ModelRef, WeightsFormat, digest_of_name
from paceline.core.via import MOST_NODES, new_mark
from paceline.engines.contract import AnswerPiece, Ask, EngineIdentity, EngineModel, Takes
from paceline.machine.foreign import watched as foreign
from paceline.machine.foreign.engines import ForeignEngines
from paceline.machine.foreign.model import ASSUMED_CONTEXT
from paceline.machine.foreign.watched import Offering
from paceline.store.home import Home

ANSWER = [504, 314, 253, 443]
IDENTITY = EngineIdentity("scripted", "1")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "TEST_S", 0.0)


def request(n: int = 1) -> GenerationRequest:
    return GenerationRequest(RequestId("r"), (1, 2, 3), 20, SamplingParams(temperature=0), n=n)


async def text_of(engines: ForeignEngines, name: str = "tiny") -> str:
    text = ""
    async with aclosing(engines.generate(name, request())) as stream:
        async for chunks in stream:
            text += "".join(chunk.text for chunk in chunks)
    return text


async def until_offered(engines: ForeignEngines) -> None:
    async with asyncio.timeout(30):
        while not engines.offered:  # noqa: ASYNC110 - the test of a model runs meanwhile
            await asyncio.sleep(0)


async def until_seen(engines: ForeignEngines) -> None:
    """Wait until the fleet sees the models: their digests are known."""
    async with asyncio.timeout(30):
        while not engines.offers():  # noqa: ASYNC110 - the digest is computed meanwhile
            await asyncio.sleep(0.01)


@in_loop
async def test_a_model_answers_and_its_rates_are_learned(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3, path=gguf)
    await engines.add(engine, IDENTITY, Offering())
    (model,) = engines.models()
    assert (model.name, model.max_context) == (engines.offered[0].model.name, 4096)
    assert await text_of(engines, model.name)
    await until_seen(engines)
    (offer,) = engines.offers()
    assert offer.engine is not None
    assert (offer.engine.engine, offer.engine.takes, offer.numerics_id, offer.warm) == ("scripted 1", ("ids",), "", True)
    await engines.close()
    assert engine.closed


@in_loop
async def test_a_model_whose_files_are_elsewhere_is_known_by_name_and_quantisation(home: Home) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3)
    engine.told = (EngineModel("Qwen3-8B", frozenset({Takes.IDS, Takes.MESSAGES}), quantisation="Q4_K_M"),)
    await engines.add(engine, IDENTITY, Offering(name="mine"))
    (offer,) = engines.offers()
    assert offer.engine is not None
    assert (offer.model_id, offer.model.has_digest, offer.engine.takes) == ("mine", False, ("messages",))
    assert offer.digest == digest_of_name("mine", "Q4_K_M")
    assert engines.offered[0].model.context == ASSUMED_CONTEXT
    (model,) = engines.models()
    assert model.chats == PassedChats(always=True)
    with pytest.raises(NotServed):
        model.tokenizer.encode("text")
    await engines.close()


@in_loop
async def test_a_path_of_an_engine_on_another_machine_means_nothing_here(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    await engines.add(ScriptedEngine(ANSWER, 3, path=gguf), IDENTITY, Offering(is_here=False))
    assert engines.offered[0].model.tokenizer is None
    await engines.close()


@pytest.mark.parametrize("is_here", [True, False])
@in_loop
async def test_a_relative_path_lies_in_the_engines_own_working_folder(
    home: Home, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "m.gguf").write_bytes(b"another file of that name, in this process's folder")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "m.gguf").symlink_to(gguf)
    monkeypatch.chdir(tmp_path / "own")
    asked: list[int] = []
    monkeypatch.setattr(foreign, "working_folder", lambda port: asked.append(port) or tmp_path / "engines")
    engines = ForeignEngines(home, FakeClock())
    watched = await engines.add(
        ScriptedEngine(ANSWER, 3, path=Path("m.gguf"), url="http://127.0.0.1:4711"), IDENTITY, Offering(is_here=is_here)
    )
    await watched.look()
    (one,) = engines.offered
    assert (one.model.tokenizer is not None) == is_here
    assert asked == ([4711] if is_here else [])
    assert one.model.told.path == (tmp_path / "engines" / "m.gguf" if is_here else None)
    await engines.close()


@in_loop
async def test_a_model_that_failed_is_offered_again_once_it_has_answered_a_test(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    changes: list[int] = []
    engine = ScriptedEngine(ANSWER, 3, path=gguf, breaks=1)
    await engines.add(engine, IDENTITY, Offering())
    await until_seen(engines)
    engines.listen(lambda: changes.append(len(engines.offered)))
    name = engines.models()[0].name
    with pytest.raises(EngineGone):
        await text_of(engines, name)
    assert engines.offered == ()
    with pytest.raises(ModelAway):
        engines.generate(name, request())
    engine.breaks = None
    await until_offered(engines)
    assert changes == [0, 1]
    assert engine.asked[-1].max_tokens == 1
    assert await text_of(engines, name)
    await engines.close()


@in_loop
async def test_a_model_that_its_engine_unloaded_is_never_tested(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3, path=gguf, breaks=1)
    await engines.add(engine, IDENTITY, Offering())
    engine.told = tuple(replace(one, loaded=False) for one in engine.told)
    with pytest.raises(EngineGone):
        await text_of(engines, engines.models()[0].name)
    await until_offered(engines)
    assert len(engine.asked) == 1
    await engines.close()


@in_loop
async def test_looks_alone_never_generate(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3, path=gguf)
    watched = await engines.add(engine, IDENTITY, Offering())
    for _ in range(5):
        await watched.look()
    engine.trouble = EngineGone("it hangs")
    await watched.look()
    assert engines.offered == ()
    engine.trouble = None
    await watched.look()
    assert len(engines.offered) == 1
    assert engine.asked == []
    await engines.close()


class OddEngine(ScriptedEngine):
    """Says things that its adapter does not expect."""

    piece = AnswerPiece(token_ids=(10**9,), n_tokens=1)
    fails = False

    async def models(self) -> tuple[EngineModel, ...]:
        return (*self.told, None) if self.fails else self.told  # type: ignore[return-value]

    async def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
        del ask
        yield self.piece


@pytest.mark.parametrize(
    "piece",
    [
        AnswerPiece(token_ids=(10**9,), n_tokens=1),
        AnswerPiece(token_ids=(-1,), n_tokens=1),
        AnswerPiece(token_ids=("x",), n_tokens=1),  # type: ignore[arg-type]
        AnswerPiece(token_ids=(1 << 80,), n_tokens=1),
        "no piece",
    ],
)
@in_loop
async def test_whatever_an_engine_says_ends_in_an_error_of_ours_and_never_ends_the_looks(home: Home, gguf: Path, piece: Any) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = OddEngine(ANSWER, 3, path=gguf)
    engine.piece = piece
    watched = await engines.add(engine, IDENTITY, Offering())
    with pytest.raises(EngineGone):
        await text_of(engines, engines.models()[0].name)
    engine.fails = True
    await watched.look()
    assert watched.trouble
    engine.fails = False
    await watched.look()
    assert not watched.trouble
    await engines.close()


@in_loop
async def test_an_engine_that_writes_faster_than_a_client_reads_waits_for_it(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    written = 0

    class Fast(ScriptedEngine):
        async def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
            nonlocal written
            while True:
                written += 1
                yield AnswerPiece(token_ids=(504,), n_tokens=1)

    await engines.add(Fast(ANSWER, 3, path=gguf), IDENTITY, Offering())
    async with aclosing(engines.generate(engines.models()[0].name, replace(request(), max_tokens=None))) as stream:
        await anext(stream)
        for _ in range(1000):
            await asyncio.sleep(0)
        before = written
        for _ in range(1000):
            await asyncio.sleep(0)
        assert written == before
    await engines.close()


@in_loop
async def test_a_name_that_means_another_model_now_is_not_answered_with(home: Home, gguf: Path) -> None:
    clock = FakeClock()
    engines = ForeignEngines(home, clock)
    engine = ScriptedEngine(ANSWER, 3, path=gguf)
    await engines.add(engine, IDENTITY, Offering())
    name = engines.models()[0].name
    engine.told = (replace(engine.told[0], path=None, digest="cd" * 32),)
    clock.advance(foreign.FRESH_S + 1)
    with pytest.raises(ModelAway):
        await text_of(engines, name)
    assert engine.asked == []
    await engines.close()


@in_loop
async def test_a_test_of_a_model_that_the_engine_swapped_ends_and_the_new_one_is_offered(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3, path=gguf, breaks=1)
    watched = await engines.add(engine, IDENTITY, Offering())
    name = engines.models()[0].name
    stream = engines.generate(name, request())
    await anext(stream)
    engine.told = (replace(engine.told[0], path=None, quantisation="Q8_0"),)  # it fails, and has another model by the name from then on
    with pytest.raises(EngineGone):
        await anext(stream)
    engine.breaks = None
    async with asyncio.timeout(30):
        while not engines.offered:  # noqa: ASYNC110 - the test of the old model ends meanwhile
            await asyncio.sleep(0)
        await watched.look()
    assert engines.offered[0].model.told.quantisation == "Q8_0"
    await engines.close()


@in_loop
async def test_only_models_that_a_person_named_are_offered(home: Home) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3)
    engine.told = tuple(EngineModel(name, frozenset({Takes.MESSAGES})) for name in ("a", "b", "c"))
    await engines.add(engine, IDENTITY, Offering(models=("b",)))
    assert [offer.model_id for offer in engines.offers()] == ["b"]
    await engines.remove(engine.door.url)
    assert engines.offers() == ()
    with pytest.raises(UnknownModel):
        engines.generate("b", request())
    await engines.close()


@in_loop
async def test_a_model_that_is_reached_through_this_node_is_not_offered(home: Home) -> None:
    engines = ForeignEngines(home, FakeClock())
    engine = ScriptedEngine(ANSWER, 3)
    ways = {"elsewhere": (new_mark(),), "here": (new_mark(), engines.mark), "far": tuple(new_mark() for _ in range(MOST_NODES))}
    engine.told = tuple(EngineModel(name, frozenset({Takes.MESSAGES}), via=via) for name, via in ways.items())
    await engines.add(engine, IDENTITY, Offering())
    assert [model.name for model in engines.models()] == ["elsewhere"]
    with pytest.raises(UnknownModel):
        engines.generate("here", request())
    await engines.close()


@in_loop
async def test_a_closed_answer_leaves_the_engine_idle(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    await engines.add(ScriptedEngine(ANSWER * 50, 3, path=gguf), IDENTITY, Offering())
    stream = engines.generate(engines.models()[0].name, request(n=2))
    assert engines.stats().running == 2
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert engines.stats().running == 0
    await engines.close()


@in_loop
async def test_the_digest_of_weights_that_can_be_read_is_computed_beside_answers(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    known = asyncio.Event()
    await engines.add(ScriptedEngine(ANSWER, 3, path=gguf), IDENTITY, Offering())
    assert engines.offers() == ()  # the fleet sees it once its answers can move to other holders
    engines.listen(lambda: known.set() if engines.offers() else None)
    async with asyncio.timeout(30):
        await known.wait()
    (offer,) = engines.offers()
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()  # noqa: ASYNC240 - nothing else runs
    assert offer.model == ModelRef(sha256, WeightsFormat.STORED, offer.model_id)
    await engines.close()


@in_loop
async def test_no_engine_answers_an_exact_request(home: Home, gguf: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    await engines.add(ScriptedEngine(ANSWER, 3, path=gguf), IDENTITY, Offering())
    with pytest.raises(WayNotAllowed):
        engines.generate(engines.models()[0].name, replace(request(), exact=True))
    await engines.close()


@in_loop
async def test_an_engine_of_this_node_stays_whatever_is_shared_at_its_old_address(home: Home, bundled_gguf: Path) -> None:
    async def revive(_: str) -> None:
        pass

    engines = ForeignEngines(home, FakeClock())
    own, other = (ScriptedEngine(ANSWER, 3, path=bundled_gguf) for _ in range(2))
    assert own.door.url == other.door.url
    await engines.add(own, IDENTITY, Offering(name="own"), revive)
    await engines.add(other, IDENTITY, Offering(name="other"))
    assert {model.name for model in engines.models()} == {"own", "other"}
    assert await engines.remove(own.door.url)
    assert not await engines.remove(own.door.url)
    assert [model.name for model in engines.models()] == ["own"]
    await engines.close()


@pytest.mark.parametrize("outside_first", [True, False])
@in_loop
async def test_an_engine_outside_never_answers_for_one_at_home(home: Home, gguf: Path, outside_first: bool) -> None:
    engines = ForeignEngines(home, FakeClock())
    inside, outside = (ScriptedEngine(ANSWER, 3, path=gguf, url=f"http://127.0.0.1:{port}") for port in (1, 2))
    both = [(inside, Offering(name="m")), (outside, Offering(name="m", leaves_network=True))]
    for engine, sharing in reversed(both) if outside_first else both:
        await engines.add(engine, IDENTITY, sharing)
    assert [one.model.leaves_network for one in engines.offered] == [False]
    inside.trouble = EngineGone("it hangs")
    for watched in engines.engines:
        await watched.look()
    assert engines.offered == ()
    await engines.remove(inside.door.url)
    assert [one.model.leaves_network for one in engines.offered] == [True]
    await engines.close()


@in_loop
async def test_engines_that_differ_in_their_sockets_alone_are_two(home: Home, tmp_path: Path) -> None:
    engines = ForeignEngines(home, FakeClock())
    for name in ("a", "b"):
        engine = ScriptedEngine(ANSWER, 3, url="http://127.0.0.1", socket=tmp_path / f"{name}.sock")
        engine.told = (EngineModel(name, frozenset({Takes.MESSAGES})),)
        await engines.add(engine, IDENTITY, Offering())
    assert [offer.model_id for offer in engines.offers()] == ["a", "b"]
    await engines.close()
