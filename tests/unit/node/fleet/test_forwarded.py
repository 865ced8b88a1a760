"""A forwarded stream: it moves on while nobody has begun, breaks with an error afterwards, and ends what it opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from tests.unit.node.fleet.nodes import in_loop

from paceline.core.errors import (
    ContextOverflow,
    ExecutorUnavailable,
    FleetError,
    InvalidRequest,
    NodeUnreachable,
    Overloaded,
    PacelineError,
    RevokedNode,
    UnknownModel,
)
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, Notice
from paceline.core.ids import RequestId
from paceline.node.forwarded import Forwarded

ID = RequestId("r")
REQUEST = GenerationRequest(ID, (1, 2), 8, n=2)


def chunk(index: int, finish: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk(ID, index, (7,), "x", finish_reason=finish)


class Script:
    """A stream that plays items, an error among them."""

    def __init__(self, *items: Sequence[GenerationChunk] | PacelineError) -> None:
        self._items = list(items)
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        await asyncio.sleep(0)
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, PacelineError):
            raise item
        return item

    async def aclose(self) -> None:
        self.closed += 1


def whole() -> Script:
    return Script([chunk(0), chunk(1)], [chunk(0, FinishReason.LENGTH)], [chunk(1, FinishReason.STOP)])


def forwarded(*scripts: Script, told: list[PacelineError] | None = None) -> Forwarded:
    tries: list[Callable[[], Script]] = [lambda script=script: script for script in scripts]
    return Forwarded(REQUEST, tries, (told if told is not None else []).append)


async def collect(stream: Forwarded) -> list[GenerationChunk]:
    return [one async for item in stream for one in item]


@in_loop
async def test_an_answer_passes_through_whole_and_is_closed() -> None:
    script = whole()
    chunks = await collect(forwarded(script))
    assert [(one.index, one.finish_reason) for one in chunks] == [
        (0, None),
        (1, None),
        (0, FinishReason.LENGTH),
        (1, FinishReason.STOP),
    ]
    assert script.closed == 1


@pytest.mark.parametrize(
    "refusal",
    [
        NodeUnreachable("gone"),
        UnknownModel("unloaded"),
        Overloaded("busy", retry_after_s=1),
        ContextOverflow("small"),
        RevokedNode("void", who="b"),
    ],
)
def test_what_the_next_node_may_not_share_moves_on(refusal: PacelineError) -> None:
    first, second, told = Script(refusal), whole(), list[PacelineError]()
    chunks = asyncio.run(collect(forwarded(first, second, told=told)))
    assert len(chunks) == 4
    assert told == [refusal]
    assert first.closed == second.closed == 1


@in_loop
async def test_a_node_that_lost_its_machines_before_the_first_token_has_not_begun() -> None:
    news = [GenerationChunk(ID, 0, (), "", notices=(Notice("shard_status", {"status": "degraded"}),))]
    ended = [
        GenerationChunk(ID, index, (), "", finish_reason=FinishReason.ERROR, error="b is gone", code="pipeline_aborted") for index in (0, 1)
    ]
    first = Script(news, ended)
    chunks = await collect(forwarded(first, whole()))
    assert [bool(one.notices) for one in chunks] == [True, False, False, False, False]
    assert first.closed == 1
    with pytest.raises(ExecutorUnavailable) as refused:
        await collect(forwarded(Script(ended)))
    assert refused.value.code == "pipeline_aborted"
    begun = await collect(forwarded(Script([chunk(0)], ended), whole()))
    assert [one.code for one in begun[1:]] == ["pipeline_aborted"] * 2


@in_loop
async def test_what_is_wrong_with_the_request_is_wrong_everywhere() -> None:
    second = whole()
    with pytest.raises(InvalidRequest):
        await collect(forwarded(Script(InvalidRequest("bad", field="top_p")), second))
    assert second.closed == 0


@in_loop
async def test_where_nobody_takes_it_the_best_node_s_word_counts_unless_it_said_nothing() -> None:
    with pytest.raises(Overloaded, match="first"):
        await collect(forwarded(Script(Overloaded("first", retry_after_s=1)), Script(UnknownModel("second"))))
    with pytest.raises(Overloaded, match="second"):
        await collect(forwarded(Script(NodeUnreachable("first")), Script(Overloaded("second", retry_after_s=1))))
    with pytest.raises(FleetError, match="last"):
        await collect(forwarded(Script(NodeUnreachable("first")), Script(NodeUnreachable("last"))))
    with pytest.raises(UnknownModel):
        await collect(forwarded())


@in_loop
async def test_an_answer_that_broke_off_ends_with_an_error_for_what_still_ran() -> None:
    second = whole()
    chunks = await collect(forwarded(Script([chunk(0, FinishReason.STOP), chunk(1)], NodeUnreachable("b is gone")), second))
    assert [(one.index, one.finish_reason, one.error) for one in chunks[2:]] == [(1, FinishReason.ERROR, "b is gone")]
    assert second.closed == 0


@in_loop
async def test_a_stream_that_just_ends_is_an_error_and_not_a_short_answer() -> None:
    chunks = await collect(forwarded(Script([chunk(0), chunk(1, FinishReason.STOP)])))
    assert [(one.index, one.finish_reason) for one in chunks[2:]] == [(0, FinishReason.ERROR)]


@in_loop
async def test_closing_or_cancelling_ends_it_over_there() -> None:
    script = whole()
    stream = forwarded(script)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert script.closed == 1
    assert await collect(stream) == []

    class Silent(Script):
        async def __anext__(self) -> Sequence[GenerationChunk]:
            await asyncio.Event().wait()
            return ()

    silent = Silent()
    waiting = asyncio.create_task(collect(forwarded(silent)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert silent.closed == 1
