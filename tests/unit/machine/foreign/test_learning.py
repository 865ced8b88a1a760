"""What a node learns from the answers of an engine: its speed, loads, and how long the engine may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.foreign_engine import ScriptedEngine
from tests.fakes.scripted_http import Asked, Hang, Said, events, said, served
from tests.unit.net.member.nodes import in_loop

from paceline.core.clock import SystemClock
from paceline.core.errors import EngineGone
from paceline.core.generation import GenerationChunk, GenerationRequest, ModelLoading, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.inference import default_model
from paceline.engines.contract import AnswerPiece, Ask, Busy, Door, EngineIdentity, EngineModel, Takes
from paceline.engines.openai import OpenAi
from paceline.fleet.engines import loading
from paceline.machine.foreign import answer, rates, silence
from paceline.machine.foreign.engines import ForeignEngines
from paceline.machine.foreign.watched import Offering
from paceline.store.home import Home

MODEL = EngineModel("tiny", frozenset({Takes.MESSAGES}), quantisation="Q4_1", context=4096, size_bytes=2_000_000_000)


class SwappingEngine(ScriptedEngine):
    """Takes whole chats. Loads its model for a request, in 40 s, and reads prompts of 100 tokens in 1 s. Hangs if told to."""

    def __init__(self, clock: FakeClock, *, loaded: bool = True, says_busy: int | None = None) -> None:
        super().__init__((), 0)
        self.told = (replace(MODEL, loaded=loaded),)
        self.hangs, self.says_busy = False, says_busy
        self.step = asyncio.Event()
        self.step.set()
        self._clock = clock

    async def busy(self) -> Busy:
        return Busy(running=self.says_busy)

    async def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
        self.asked.append(ask)
        if self.hangs:
            await asyncio.Event().wait()
        if not self.told[0].loaded:
            await self.step.wait()
            self._clock.advance(40.0)
            self.told = (replace(self.told[0], loaded=True),)
        self._clock.advance(1.0)
        for _ in range(20):
            yield AnswerPiece("a", n_tokens=1, delta={"content": "a"})
            self._clock.advance(0.05)
        yield AnswerPiece(prompt_tokens=100, finish=answer.FinishReason.STOP)


def request(text: str = "Hi") -> GenerationRequest:
    chat = f'{{"model":"tiny","messages":[{{"role":"user","content":"{text}"}}]}}'
    return GenerationRequest(RequestId("r"), (), 20, SamplingParams(temperature=0), chat=chat)


async def answered(engines: ForeignEngines, asked: GenerationRequest | None = None) -> list[GenerationChunk]:
    async with aclosing(engines.generate("tiny", asked or request())) as stream:
        return [chunk async for item in stream for chunk in item]


async def shared(home: Path, engine: SwappingEngine, clock: FakeClock) -> ForeignEngines:
    engines = ForeignEngines(Home(home), clock)
    await engines.add(engine, EngineIdentity("scripted", "1"), Offering())
    return engines


def seconds_of(engines: ForeignEngines) -> tuple[float, bool]:
    load = loading(engines.offers()[0])
    return load.seconds, load.measured


@in_loop
async def test_a_load_costs_an_estimate_until_one_was_measured(tmp_path: Path) -> None:
    clock = FakeClock()
    engine = SwappingEngine(clock, loaded=False)
    engines = await shared(tmp_path, engine, clock)
    assert seconds_of(engines) == (4.0, False)
    assert engine.asked == []  # only a request makes it load
    assert default_model(engines.models()) is None
    await answered(engines)
    await engines.engines[0].look()
    assert seconds_of(engines) == (0.0, True)
    assert default_model(engines.models()) is not None
    await answered(engines)
    (offer,) = engines.offers()
    assert (offer.prefill_tokens_per_second, offer.tokens_per_second) == (pytest.approx(100), pytest.approx(19))
    engine.told = (replace(MODEL, loaded=False),)
    await engines.engines[0].look()
    assert seconds_of(engines) == (pytest.approx(41.0), True)
    await asyncio.gather(answered(engines), answered(engines))  # now the time of the prompt is known; the second one waits for less
    engine.told = (replace(MODEL, loaded=False),)
    await engines.engines[0].look()
    assert seconds_of(engines) == (pytest.approx(40.0), True)
    await engines.close()


@in_loop
async def test_figures_outlive_a_load_that_tells_more_of_the_model(tmp_path: Path) -> None:
    clock = FakeClock()
    engine = SwappingEngine(clock)
    engines = await shared(tmp_path, engine, clock)
    await answered(engines)
    engine.told = (replace(MODEL, loaded=False, quantisation="", size_bytes=0),)
    await engines.engines[0].look()
    (offer,) = engines.offers()
    assert (offer.tokens_per_second, offer.engine and offer.engine.load_s) == (pytest.approx(19), 0.0)
    engine.told = (replace(MODEL, quantisation="Q8_0"),)
    await engines.engines[0].look()
    engine.told = (replace(MODEL, quantisation="Q4_1"),)  # another model
    await engines.engines[0].look()
    assert engines.offers()[0].tokens_per_second == 0
    await engines.close()


@in_loop
async def test_a_client_hears_of_a_load_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "LOADING_S", 0.0)
    clock = FakeClock()
    engine = SwappingEngine(clock, loaded=False)
    engine.step.clear()
    engines = await shared(tmp_path, engine, clock)
    told: list[ModelLoading | None] = []
    async with aclosing(engines.generate("tiny", request())) as stream:
        async for item in stream:
            told += [ModelLoading.of_notice(notice) for chunk in item for notice in chunk.notices]
            if len(told) == 1:
                clock.advance(3.0)
            if len(told) > 2:
                engine.step.set()
    assert told[0] == ModelLoading(0, 4)
    assert told[-1] == ModelLoading(3, 4)
    assert not any(chunk.notices for chunk in await answered(engines))
    await engines.close()


@pytest.mark.parametrize(
    ("before", "asked", "says_busy", "found"),
    [
        (1, request(), None, True),
        (1, request("x" * 150), None, True),
        (0, request(), None, False),
        (1, request("x" * 5000), None, False),
        (1, request(), 1, False),
        (1, request(), 0, True),
    ],
    ids=["alike", "longer", "no answer yet", "much longer", "other programs ask", "nothing else asks"],
)
@in_loop
async def test_an_engine_that_hangs_is_found_where_its_prompts_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, asked: GenerationRequest, says_busy: int | None, found: bool
) -> None:
    monkeypatch.setattr(rates, "FLOOR_S", 0.0)
    monkeypatch.setattr(rates, "TIMES", 0.002)
    clock = FakeClock()
    engine = SwappingEngine(clock, says_busy=says_busy)
    engines = await shared(tmp_path, engine, clock)
    for _ in range(before):
        await answered(engines)
    engine.hangs = True
    answering = asyncio.create_task(answered(engines, asked))
    await asyncio.wait((answering,), timeout=10 if found else 0.1)
    assert answering.done() == found
    if found:
        with pytest.raises(EngineGone):
            answering.result()
        assert engines.offers() == ()
    answering.cancel()
    await engines.close()


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen before", "unloaded a moment ago"])
@in_loop
async def test_a_model_that_has_to_be_loaded_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool) -> None:
    monkeypatch.setattr(rates, "FLOOR_S", 0.0)
    monkeypatch.setattr(rates, "TIMES", 0.002)
    clock = FakeClock()
    engine = SwappingEngine(clock)
    engines = await shared(tmp_path, engine, clock)
    await answered(engines)
    engine.hangs = True
    if is_seen:
        engine.told = (replace(MODEL, loaded=False),)
        await engines.engines[0].look()
    answering = asyncio.create_task(answered(engines))
    await asyncio.sleep(0)
    engine.told = (replace(MODEL, loaded=False),)
    clock.advance(3.0)
    await asyncio.wait((answering,), timeout=0.1)
    assert not answering.done()
    answering.cancel()
    await engines.close()


@in_loop
async def test_rates_of_a_real_server_follow_its_speed_within_twenty_requests(tmp_path: Path) -> None:
    speed = 1.0

    def script(asked: Asked) -> Said:
        if asked.path == "/v1/models":
            return said({"object": "list", "data": [{"id": "tiny"}]})
        if asked.path != "/v1/chat/completions":
            return said({}, 404)
        word = {"model": "tiny", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        last = {"model": "tiny", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"model": "tiny", "choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 8}}
        written = [part for _ in range(8) for part in (*events(word, done=False), Hang(0.01 / speed))]
        return Said((Hang(0.04 / speed), *written, *events(last, usage)), kind="text/event-stream")

    async def client(answers: int) -> None:
        for _ in range(answers):
            await answered(engines)

    def figures() -> tuple[float, float]:
        (offer,) = engines.offers()
        return offer.tokens_per_second, offer.prefill_tokens_per_second

    with served(script) as server:
        engines = ForeignEngines(Home(tmp_path), SystemClock())
        await engines.add(OpenAi(Door(server.url)), EngineIdentity("openai"), Offering())
        await asyncio.gather(*(client(3) for _ in range(4)))
        before = figures()
        speed = 0.5
        await asyncio.gather(*(client(5) for _ in range(4)))
        for was, now in zip(before, figures(), strict=True):
            assert 1.4 < was / now < 2.8
        await engines.close()


async def pieces(*pauses_s: float | None) -> AsyncGenerator[AnswerPiece, None]:
    """Yield a piece after each pause: reports of progress, then a token. None: never."""
    for place, pause_s in enumerate(pauses_s):
        await (asyncio.Event().wait() if pause_s is None else asyncio.sleep(pause_s))
        yield AnswerPiece(tokens_read=place) if place < len(pauses_s) - 1 else AnswerPiece("a", n_tokens=1)


async def outcome(watched: AsyncGenerator[AnswerPiece, None]) -> bool:
    """Return whether an answer came."""
    try:
        async with aclosing(watched):
            async for piece in watched:
                if piece.text:
                    return True
    except EngineGone:
        return False
    raise AssertionError("an answer had no end")


@in_loop
async def test_silence_ends_an_answer_only_after_all_that_wait_were_allowed_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "MOST_LOOK_S", 0.01)
    assert await outcome(silence.Silence().watched(pieces(0.02, 0.02, 0.02), 10.0))
    assert await outcome(silence.Silence().watched(pieces(0.05), None))
    both = silence.Silence()
    first = asyncio.create_task(outcome(both.watched(pieces(0.05), 10.0)))
    second = asyncio.create_task(outcome(both.watched(pieces(None), 0.01)))
    assert await first
    assert not await second
    assert await outcome(both.watched(pieces(0.15), 0.1))  # more patient from now on


@in_loop
async def test_a_token_for_any_request_shows_that_the_engine_works() -> None:
    async def writes() -> AsyncGenerator[AnswerPiece, None]:
        for _ in range(20):
            yield AnswerPiece("a", n_tokens=1)
            await asyncio.sleep(0.01)

    async def drained() -> None:
        async with aclosing(both.watched(writes(), None)) as stream:
            async for _ in stream:
                pass

    both = silence.Silence()
    writing = asyncio.create_task(drained())
    await asyncio.sleep(0)
    assert await outcome(both.watched(pieces(0.15), 0.1))  # of silence since the last token of the other one
    await writing
