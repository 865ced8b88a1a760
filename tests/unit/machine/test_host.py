"""The host between an event loop and an engine in a thread: admission, streams, abort, death, rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.machine.echo_engine import EchoEngine

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import EngineGone, InvalidRequest, NodeStopping, Overloaded, PacelineError, UnknownModel, WayNotAllowed
from paceline.core.generation import LOCAL_FALLBACK, FinishReason, GenerationChunk, GenerationRequest, Grammar, GrammarKind, KvLeg, Notice
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream, ServedModel
from paceline.core.text import Tokenizer
from paceline.engine.config import EngineConfig
from paceline.engine.grammar import Grammars
from paceline.machine import engine_thread
from paceline.machine.host import REBUILDS, WITHIN_S, EngineHost

BOUND_S = 100


def host_of(
    engine: EchoEngine,
    capacity: int = 4,
    *others: EchoEngine,
    clock: Clock | None = None,
    grammars: Grammars | None = None,
    way: str = "alone",
) -> EngineHost:
    """A host; where there are `others`, they take its engine's place one after the other."""
    # The host passes the tokenizer on and never asks it anything.
    model = ServedModel("echo", 0, 100, cast("Tokenizer", None), "fp")
    config = EngineConfig(max_context=100, max_running=2, max_waiting=capacity - 2)
    rest = iter(others)
    rebuild = (lambda: next(rest)) if others else None
    return EngineHost(engine, engine.close, model, config, clock or SystemClock(), rebuild, grammars, lambda: frozenset({way}))


def request(name: str = "r", max_tokens: int = 3, n: int = 1) -> GenerationRequest:
    return GenerationRequest(RequestId(name), tuple(range(5)), max_tokens, n=n)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await work

    asyncio.run(bounded())


def back_up(host: EngineHost) -> asyncio.Event:
    """Set once an engine takes requests again."""
    event = asyncio.Event()
    host.listen(lambda: event.set() if host.is_up else None)
    return event


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what the engine's thread does has no event here
        await asyncio.sleep(0)


async def drain(stream: ChunkStream) -> list[GenerationChunk]:
    return [chunk async for item in stream for chunk in item]


def test_the_engines_numbers_are_known_before_its_first_step() -> None:
    engine = EchoEngine()
    with closing(host_of(engine)) as host:
        assert host.stats() == engine.stats()
        assert host.stats().blocks_total == 4


def test_the_model_has_the_context_that_its_engine_has_room_for_now() -> None:
    engine = EchoEngine()
    with closing(host_of(engine)) as host:
        assert host.models()[0].max_context == 100

        async def work() -> None:
            engine.max_context = 40
            await drain(host.generate("echo", request()))
            assert host.models()[0].max_context == 40
            engine.max_context = 70
            await drain(host.generate("echo", request()))

        run(work())
        assert host.models()[0].max_context == 70


def test_every_sequence_gets_its_tokens_in_order_and_the_stream_ends() -> None:
    with closing(host_of(EchoEngine())) as host:

        async def work() -> None:
            streams = [host.generate("echo", request(f"r{i}", max_tokens=50, n=i + 1)) for i in range(2)]
            answers = await asyncio.gather(*map(drain, streams))
            for n, chunks in enumerate(answers, start=1):
                for index in range(n):
                    mine = [chunk for chunk in chunks if chunk.index == index]
                    assert [chunk.token_ids for chunk in mine] == [(token,) for token in range(50)]
                    assert [chunk.finish_reason for chunk in mine] == [None] * 49 + [FinishReason.LENGTH]

        run(work())


def test_a_request_is_served_in_the_ways_that_it_allows_and_in_no_other() -> None:
    with closing(host_of(EchoEngine(), way="pipeline")) as host:

        async def work() -> None:
            for name, ways in (("any", None), ("this", {"pipeline"}), ("both", {"alone", "pipeline"})):
                asked = replace(request(name), ways=None if ways is None else frozenset(ways))
                assert (await drain(host.generate("echo", asked)))[-1].finish_reason is FinishReason.LENGTH
            with pytest.raises(WayNotAllowed, match="served pipeline now, and the request allows alone or draft") as refused:
                await drain(host.generate("echo", replace(request("none"), ways=frozenset({"alone", "draft"}))))
            assert refused.value.field == "ways"
            assert host.live == 0

        run(work())


def test_one_that_may_not_be_run_alone_ends_where_the_others_are_gone() -> None:
    engine = EchoEngine()
    with closing(host_of(engine, way="pipeline")) as host:

        async def ended(ways: set[str]) -> GenerationChunk:
            engine.notices = (Notice(LOCAL_FALLBACK, {"reason": "lost"}),)
            return (await drain(host.generate("echo", replace(request(f"of {len(ways)}"), ways=frozenset(ways)))))[-1]

        async def work() -> None:
            end = await ended({"pipeline"})
            assert (end.finish_reason, end.code) == (FinishReason.ERROR, "shard_unavailable")
            assert (await ended({"alone", "pipeline"})).finish_reason is FinishReason.LENGTH
            await until(lambda: not host.live and not engine.has_work)

        run(work())


def test_tokens_that_queued_up_come_as_one_item() -> None:
    engine = EchoEngine()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            stream = host.generate("echo", request(max_tokens=20))
            got = list(await anext(stream))
            # The loop is held here, on purpose, until the engine has done everything.
            assert engine.rested.wait(BOUND_S)
            rest = [item async for item in stream]
            assert [chunk.token_ids[0] for item in [got, *rest] for chunk in item] == list(range(20))
            assert len(rest) <= 2

        run(work())


def test_one_that_drains_takes_no_more_and_lets_live_ones_end() -> None:
    engine = EchoEngine()
    engine.gate.shut()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            changed = list[bool]()
            host.listen(lambda: changed.append(host.is_up))
            live = asyncio.create_task(drain(host.generate("echo", request("live"))))
            await until(lambda: host.live > 0)
            host.drain()
            assert changed == [False]
            with pytest.raises(NodeStopping):
                await anext(host.generate("echo", request("late")))
            engine.gate.open()
            assert len(await live) == 3
            assert host.live == 0

        run(work())


def test_a_sign_of_life_is_a_report_or_a_part_of_a_step() -> None:
    engine, clock = EchoEngine(), FakeClock()
    engine.gate.shut()
    with closing(host_of(engine, clock=clock)) as host:

        async def work() -> None:
            stream = asyncio.create_task(drain(host.generate("echo", request(max_tokens=2))))
            await until(lambda: engine.has_work and not host.progress().seconds_since_sign)
            clock.advance(5)
            assert host.progress().seconds_since_sign == 5
            engine.parts += 1
            assert host.progress().seconds_since_sign == 0
            clock.advance(5)
            engine.gate.let(1)
            await until(lambda: not host.progress().seconds_since_sign)
            engine.gate.open()
            await stream

        run(work())


def test_refusals_come_before_the_first_item() -> None:
    engine = EchoEngine()
    engine.gate.shut()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            with pytest.raises(UnknownModel, match="Served here: echo"):
                await anext(host.generate("other", request()))
            first = host.generate("echo", request("first", n=3))
            waiting = asyncio.create_task(drain(first))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="shares no KV"):
                await anext(host.generate("echo", replace(request("leg"), leg=KvLeg("leg", is_prefill=True))))
            with pytest.raises(InvalidRequest, match="in use"):
                await anext(host.generate("echo", request("first")))
            # The engine hangs in a step: the counter alone decides.
            with pytest.raises(Overloaded) as refused:
                await anext(host.generate("echo", request("second", n=2)))
            assert refused.value.retry_after_s >= 1
            engine.gate.open()
            assert len(await waiting) == 9
            assert len(await drain(host.generate("echo", request("third", n=4)))) == 12

        run(work())


def test_what_the_engine_refuses_is_raised_to_the_reader() -> None:
    with closing(host_of(EchoEngine(refuse="can never fit"))) as host:

        async def work() -> None:
            for _ in range(10):  # more than the capacity: a refused request gives its place back
                with pytest.raises(InvalidRequest, match="can never fit"):
                    await anext(host.generate("echo", request()))

        run(work())


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_leaving_aborts_at_once_and_gives_the_place_back(how: str) -> None:
    engine = EchoEngine()
    engine.gate.shut()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            for number in range(10):
                stream = host.generate("echo", request(f"r{number}", max_tokens=90, n=4))
                engine.gate.let(1)
                await anext(stream)
                if how == "close":
                    await stream.aclose()
                else:
                    reader = asyncio.create_task(drain(stream))
                    await asyncio.sleep(0)
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                engine.gate.let(1)
                assert await asyncio.to_thread(engine.rested.wait, BOUND_S)

        run(work())
        assert engine.aborted == [f"r{number}" for number in range(10)]
        engine.gate.open()


def test_a_stream_closed_before_it_began_never_reaches_the_engine() -> None:
    engine = EchoEngine()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            stream = host.generate("echo", request())
            await stream.aclose()
            assert await drain(stream) == []

        run(work())
    assert engine.aborted == []
    assert engine.stats().steps == 0


def test_when_the_engine_dies_every_stream_says_so_and_so_does_health() -> None:
    engine = EchoEngine(crash_at=3)
    engine.gate.shut()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            streams = [asyncio.create_task(drain(host.generate("echo", request(f"r{i}", 50, n=2)))) for i in range(2)]
            await asyncio.sleep(0)
            assert host.progress().busy
            engine.gate.open()
            for chunks in await asyncio.gather(*streams):
                last = chunks[-2:]
                assert [chunk.finish_reason for chunk in last] == [FinishReason.ERROR] * 2
                assert all("the kernels burn" in (chunk.error or "") for chunk in last)
            assert "the kernels burn" in (host.progress().error or "")
            with pytest.raises(PacelineError, match="the kernels burn"):
                await anext(host.generate("echo", request("late")))

        run(work())
    assert engine.closed.is_set()


class Panic(BaseException):
    """As what a library in Rust raises where it panics."""


@pytest.mark.parametrize("crash", [RuntimeError, Panic])
def test_an_engine_that_failed_is_replaced_and_its_answers_end_saying_so(crash: type[BaseException]) -> None:
    first, second = EchoEngine(crash_at=3, crash=crash), EchoEngine()
    first.gate.shut()
    with closing(host_of(first, 4, second)) as host:

        async def work() -> None:
            ups: list[bool] = []
            host.listen(lambda: ups.append(host.is_up))
            again = back_up(host)
            streams = [asyncio.create_task(drain(host.generate("echo", request(f"r{i}", 50, n=2)))) for i in range(2)]
            await asyncio.sleep(0)
            first.gate.open()
            for chunks in await asyncio.gather(*streams):
                last = chunks[-2:]
                assert [(chunk.finish_reason, chunk.code) for chunk in last] == [(FinishReason.ERROR, "engine_gone")] * 2
                assert all("the kernels burn" in (chunk.error or "") for chunk in last)
            await again.wait()
            assert ups == [False, True]
            assert host.progress().error is None
            assert [chunk.token_ids for chunk in await drain(host.generate("echo", request("r0")))] == [(0,), (1,), (2,)]

        run(work())
        assert not first.closed.is_set()
    assert first.closed.is_set()


def test_what_was_sent_to_an_engine_that_failed_does_not_run_in_the_next() -> None:
    first, second = EchoEngine(crash_at=1), EchoEngine()
    first.gate.shut()
    second.gate.shut()
    with closing(host_of(first, 8, second)) as host:

        async def work() -> None:
            begun = asyncio.create_task(drain(host.generate("echo", request("begun", 50))))
            await asyncio.sleep(0)
            late = asyncio.create_task(drain(host.generate("echo", request("late", 50))))
            await asyncio.sleep(0)
            first.gate.open()
            for chunks in await asyncio.gather(begun, late):
                assert [chunk.code for chunk in chunks] == ["engine_gone"]
            second.gate.open()
            assert await asyncio.to_thread(second.rested.wait, BOUND_S)
            assert second.stats().steps == 0 or "late" in second.aborted

        run(work())


def test_an_engine_that_fails_too_often_stays_down_until_long_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "AGAIN_S", 0.001)
    clock = FakeClock()
    engines = [EchoEngine(crash_at=1) for _ in range(REBUILDS + 1)]
    with closing(host_of(engines[0], 4, *engines[1:], EchoEngine(), clock=clock)) as host:

        async def work() -> None:
            for number in range(REBUILDS + 1):
                again = back_up(host)
                chunks = await drain(host.generate("echo", request(f"r{number}")))
                assert [chunk.code for chunk in chunks] == ["engine_gone"]
                last = number == REBUILDS
                assert ("stays down" in (chunks[0].error or "")) == last
                if not last:
                    await again.wait()
            assert "the kernels burn" in (host.progress().error or "")
            with pytest.raises(EngineGone, match="the kernels burn"):
                await anext(host.generate("echo", request("late")))
            again = back_up(host)
            clock.advance(WITHIN_S)
            await again.wait()
            assert len(await drain(host.generate("echo", request("after")))) == 3

        run(work())


def test_failures_far_apart_are_all_mended() -> None:
    clock = FakeClock()
    engines = [EchoEngine(crash_at=1) for _ in range(3 * REBUILDS)]
    with closing(host_of(engines[0], 4, *engines[1:], EchoEngine(), clock=clock)) as host:

        async def work() -> None:
            for number in range(3 * REBUILDS):
                again = back_up(host)
                await drain(host.generate("echo", request(f"r{number}")))
                await again.wait()
                clock.advance(WITHIN_S / REBUILDS + 1)
            assert len(await drain(host.generate("echo", request("after")))) == 3

        run(work())


def test_progress_is_steps_and_parts_of_steps_and_nothing_else() -> None:
    engine, clock = EchoEngine(), FakeClock()
    engine.gate.shut()
    with closing(host_of(engine, clock=clock)) as host:

        async def work() -> None:
            stream = host.generate("echo", request("r", 50))
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            clock.advance(40)
            engine.idles = 5  # it reports, and does nothing
            engine.gate.let(5)
            assert await asyncio.to_thread(engine.idled.wait, BOUND_S)
            await asyncio.sleep(0)
            assert host.progress().seconds_since_step == 40
            engine.parts += 1
            assert host.progress().seconds_since_step == 0
            clock.advance(7)
            assert host.progress().seconds_since_step == 7
            engine.gate.let(1)
            assert await first
            assert host.progress().seconds_since_step == 0
            engine.gate.open()
            await drain(stream)

        run(work())


def test_at_rest_nothing_is_live_and_the_engine_has_checked_itself() -> None:
    engine = EchoEngine()
    with closing(host_of(engine)) as host:

        async def work() -> None:
            await drain(host.generate("echo", request()))
            assert await asyncio.to_thread(engine.rested.wait, BOUND_S)
            assert not host.progress().busy
            assert host.progress().seconds_since_step == 0
            assert host.stats().running == 0
            assert host.stats().steps == 3

        run(work())


def test_one_host_serves_one_loop_after_another() -> None:
    with closing(host_of(EchoEngine())) as host:
        for number in range(3):

            async def work(number: int = number) -> None:
                assert len(await drain(host.generate("echo", request(f"r{number}")))) == 3

            run(work())


def test_close_ends_streams_joins_the_thread_and_frees_the_executor() -> None:
    engine = EchoEngine()
    host = host_of(engine)

    async def work() -> None:
        stream = host.generate("echo", request(max_tokens=90))
        chunks = list(await anext(stream))
        assert host.close()
        chunks += await drain(stream)
        assert chunks[-1].finish_reason in {FinishReason.ERROR, FinishReason.LENGTH}

    run(work())
    assert engine.closed.is_set()
    assert host.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-engine"]


class SlowGrammars(Grammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(cast("Tokenizer", None))
        self.asked, self.goes_on = list[str](), threading.Semaphore(0)

    def prepare(self, grammar: Grammar) -> None:
        self.asked.append(grammar.text)
        assert self.goes_on.acquire(timeout=BOUND_S)
        if grammar.text == "none":
            raise InvalidRequest("no grammar", field="grammar")


def formed(name: str, caller: str) -> GenerationRequest:
    return replace(request(name, 1), caller=caller, grammar=Grammar(GrammarKind.REGEX, name))


def test_a_node_that_floods_with_grammars_holds_up_neither_other_work_nor_others_grammars() -> None:
    engine, slow = EchoEngine(), SlowGrammars()
    with closing(host_of(engine, 60, grammars=slow)) as host:

        async def work() -> None:
            flood = [asyncio.create_task(drain(host.generate("echo", formed(f"b{number}", "b")))) for number in range(60)]
            await until(lambda: slow.asked == ["b0"])
            assert await asyncio.to_thread(lambda: 7) == 7, "threads are left"
            assert host.live == 20, "it has its share of places, and the rest are refused before anything is compiled"
            refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            assert all(isinstance(task.exception(), Overloaded) for task in refused)
            own = [asyncio.create_task(drain(host.generate("echo", formed(f"own{number}", "")))) for number in range(3)]
            await until(lambda: host.live == 23 and len(slow.asked) == 3)
            assert slow.asked == ["b0", "own0", "own1"], "two of this machine's clients beside one of each other's"
            slow.goes_on.release(100)
            await asyncio.gather(*own)
            await asyncio.gather(*flood, return_exceptions=True)
            assert len(slow.asked) == 23
            assert host.live == 0

        run(work())


def test_a_form_that_is_none_and_an_engine_that_fails_meanwhile_give_the_place_back() -> None:
    engine, slow = EchoEngine(crash_at=1), SlowGrammars()
    with closing(host_of(engine, 4, EchoEngine(), grammars=slow)) as host:

        async def work() -> None:
            slow.goes_on.release()
            with pytest.raises(InvalidRequest, match="no grammar"):
                await drain(host.generate("echo", formed("none", "")))
            assert host.live == 0
            waits = asyncio.create_task(drain(host.generate("echo", formed("w", ""))))
            await until(lambda: slow.asked == ["none", "w"])
            up = back_up(host)
            await drain(host.generate("echo", request("r")))
            await up.wait()
            slow.goes_on.release()
            assert [chunk.finish_reason for chunk in await waits] == [FinishReason.ERROR]
            assert host.live == 0
            assert (await drain(host.generate("echo", request("s", 1))))[-1].finish_reason is FinishReason.LENGTH

        run(work())
