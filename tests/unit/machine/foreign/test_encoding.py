"""Models of engines that make vectors or rank texts, as this machine's encoders."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.foreign_engine import ScriptedEngine
from tests.fakes.scripted_encoder import ScriptedEncoder
from tests.fakes.seeded_encoders import write_encoder, write_encoder_gguf
from tests.unit.machine.foreign.test_engines import request as chat
from tests.unit.net.member.nodes import in_loop

from paceline.core.encoding import EncodeRequest, Task
from paceline.core.errors import EngineGone, InvalidRequest, ModelAway, RequestLoop, UnknownModel
from paceline.core.via import new_mark
from paceline.engines.contract import Capability, EngineIdentity, EngineModel, Takes
from paceline.fleet.card import Role
from paceline.machine.encoders import ENGINE_TEXTS, LocalEncoders
from paceline.machine.foreign import watched as foreign
from paceline.machine.foreign.engines import ForeignEngines
from paceline.machine.foreign.watched import Offering
from paceline.store.home import Home

IDENTITY = EngineIdentity("scripted", "1")
EMBEDS = frozenset({Capability.EMBEDDINGS})
ENCODER = EngineModel("enc", frozenset(), quantisation="F16", context=64, capabilities=EMBEDS)
RANKER = EngineModel("judge", frozenset(), capabilities=frozenset({Capability.RERANK}))
BOTH = EngineModel("tiny", frozenset({Takes.MESSAGES}), capabilities=EMBEDS)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "TEST_S", 0.0)


def engine_of(*told: EngineModel, port: int = 1) -> ScriptedEngine:
    engine = ScriptedEngine([1], 3, url=f"http://127.0.0.1:{port}")
    engine.told = told
    return engine


@in_loop
async def test_an_encoder_is_offered_as_one_and_is_no_chat_model(tmp_path: Path) -> None:
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    await engines.add(engine_of(ENCODER, RANKER, BOTH), IDENTITY, Offering())
    encoders = LocalEncoders(None, engines)
    assert [model.name for model in engines.models()] == ["tiny"]
    assert {each.name: each.tasks for each in encoders.encoders()} == {"enc": {Task.EMBED}, "judge": {Task.RERANK}, "tiny": {Task.EMBED}}
    async with asyncio.timeout(30):
        while len(engines.offers()) < 3:  # noqa: ASYNC110 - it looks for files meanwhile
            await asyncio.sleep(0)
    roles = {offer.model_id: offer.role for offer in engines.offers()}
    assert roles == {"enc": Role.EMBEDDER, "judge": Role.EMBEDDER, "tiny": Role.VERIFIER}
    with pytest.raises(UnknownModel):
        engines.generate("enc", chat())
    for name, query in (("enc", "a"), ("judge", None), ("none", None)):
        with pytest.raises(UnknownModel):
            await encoders.encode(name, EncodeRequest(["a"], query))
    await engines.close()


@in_loop
async def test_many_texts_go_in_parts_and_stay_in_order(tmp_path: Path) -> None:
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    engine = engine_of(ENCODER, RANKER)
    await engines.add(engine, IDENTITY, Offering())
    encoders, texts = LocalEncoders(None, engines), ["a" * (1 + place % 7) for place in range(2 * ENGINE_TEXTS + 1)]
    made = await encoders.encode("enc", EncodeRequest(texts, via=("0" * 16,)))
    assert made.values[:, 0].tolist() == list(map(len, texts))
    assert made.tokens == sum(map(len, texts))
    assert [len(sent) for _, sent, _ in engine.worked] == [ENGINE_TEXTS, ENGINE_TEXTS, 1]
    assert {via for _, _, via in engine.worked} == {("0" * 16, engines.mark)}
    ranked = await encoders.encode("judge", EncodeRequest(texts, "a"))
    assert ranked.values.tolist() == list(map(len, texts))
    await engines.close()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (EncodeRequest([[1, 2]]), InvalidRequest),
        (EncodeRequest(["a", ""]), InvalidRequest),
    ],
    ids=["token ids", "an empty text"],
)
@in_loop
async def test_what_an_engine_does_not_take_never_reaches_it(tmp_path: Path, given: EncodeRequest, error: type[Exception]) -> None:
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    engine = engine_of(ENCODER)
    await engines.add(engine, IDENTITY, Offering())
    with pytest.raises(error):
        await LocalEncoders(None, engines).encode("enc", given)
    with pytest.raises(RequestLoop):
        await LocalEncoders(None, engines).encode("enc", EncodeRequest(["a"], via=(engines.mark,)))
    assert not engine.worked
    await engines.close()


@pytest.mark.parametrize("bias", [float("nan"), 1e300, None])
@in_loop
async def test_an_encoder_that_failed_is_offered_again_once_it_has_worked_on_a_word(tmp_path: Path, bias: Any) -> None:
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    engine = engine_of(ENCODER)
    await engines.add(engine, IDENTITY, Offering())
    encoders = LocalEncoders(None, engines)
    engine.bias = bias or 0.0
    engine.fails_after = 0 if bias is None else None
    with pytest.raises(EngineGone):
        await encoders.encode("enc", EncodeRequest(["a"]))
    assert not encoders.encoders()
    with pytest.raises(ModelAway):
        await encoders.encode("enc", EncodeRequest(["a"]))
    engine.bias, engine.fails_after = 0.0, None
    async with asyncio.timeout(30):
        while not encoders.encoders():  # noqa: ASYNC110 - the test runs meanwhile
            await asyncio.sleep(0)
    assert engine.worked[-1][1] == ("Hi",)
    assert not engine.asked
    await engines.close()


@in_loop
async def test_an_engine_outside_gets_no_names_and_never_stands_in_for_one_at_home(tmp_path: Path) -> None:
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    inside, outside = engine_of(ENCODER, port=1), engine_of(ENCODER, port=2)
    await engines.add(outside, IDENTITY, Offering(leaves_network=True))
    encoders = LocalEncoders(None, engines)
    await encoders.encode("enc", EncodeRequest(["a"], via=(new_mark("desk"),)))
    assert all("~" not in mark for mark in outside.worked[-1][2])
    await engines.add(inside, IDENTITY, Offering())
    assert [each.facts.leaves_network for each in encoders.encoders()] == [False]
    inside.trouble = EngineGone("it hangs")
    for watched in engines.engines:
        await watched.look()
    with pytest.raises(ModelAway):
        await encoders.encode("enc", EncodeRequest(["a"]))
    await engines.close()


@in_loop
async def test_an_own_encoder_comes_before_an_engine(tmp_path: Path) -> None:
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    engine = engine_of(replace(ENCODER, name=ScriptedEncoder.name))
    await engines.add(engine, IDENTITY, Offering())
    encoders = LocalEncoders(ScriptedEncoder(), engines)
    made = await encoders.encode("counts", EncodeRequest(["\x01\x01"]))
    assert made.values.tolist() == [[0, 2, 0, 0, 0, 0, 0, 0]]
    assert len(encoders.encoders()) == 1
    assert not engine.worked
    encoders.close()
    await engines.close()


@pytest.mark.parametrize("can", [{Capability.EMBEDDINGS}, {Capability.RERANK}])
@in_loop
async def test_a_file_made_for_vectors_is_no_chat_model_whatever_its_engine_takes(tmp_path: Path, can: set[Capability]) -> None:
    """llama-server says of every model that it takes prompts. The digest is learned as for other models."""
    file = write_encoder_gguf(tmp_path / "e.gguf", write_encoder(tmp_path / "small"))
    engines = ForeignEngines(Home(tmp_path), FakeClock())
    takes = frozenset(Takes) if Capability.EMBEDDINGS in can else frozenset[Takes]()
    await engines.add(engine_of(EngineModel(str(file), takes, path=file, capabilities=frozenset(can))), IDENTITY, Offering())
    async with asyncio.timeout(30):
        while not engines.offers():  # noqa: ASYNC110 - the digest is computed meanwhile
            await asyncio.sleep(0.01)
    (offer,) = engines.offers()
    assert (offer.role, offer.model.has_digest, offer.model_id) == (Role.EMBEDDER, True, "e")
    assert not engines.models()
    await engines.close()
