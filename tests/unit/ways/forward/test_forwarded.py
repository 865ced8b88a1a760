"""A forwarded stream: it moves on wherever it stands, says every token once, and ends what it opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.machine.echo_engine import EchoEngine
from tests.unit.machine.test_host import host_of
from tests.unit.net.member.nodes import in_loop, until

from paceline.core.errors import (
    FORM_NOT_FOLLOWED,
    ContextOverflow,
    ExecutorUnavailable,
    FleetError,
    InvalidRequest,
    NodeUnreachable,
    Overloaded,
    PacelineError,
    RevokedNode,
    ShardUnavailable,
    UnknownModel,
    WayNotAllowed,
    WeightsMismatch,
)
from paceline.core.following import Following, Holding, may_follow
from paceline.core.generation import NUMERICS_CHANGED, FinishReason, GenerationChunk, GenerationRequest, Notice, TokenLogprob
from paceline.core.ids import NodeId, RequestId
from paceline.core.inference import ChunkStream
from paceline.core.model import ModelRef
from paceline.fleet.card import EngineOffer
from paceline.machine.host import EngineHost
from paceline.ways.forward.forwarded import LOADING_S, LONGEST_PAUSE_S, PATIENCE_S, Forwarded, Leg
from paceline.ways.forward.routes import RouteStop

ID = RequestId("r")
REQUEST = GenerationRequest(ID, (1, 2), 8, n=2, draft="d")


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


class Scripted:
    """`Nodes` called 0, 1, 2, ...: each plays what it has for it, one script a request.

    Args:
        ids: their numerics ids. Default: all have the same.
    """

    def __init__(self, *scripts: Script | Sequence[Script], ids: Sequence[str] = ()) -> None:
        self._ids = ids or ["n"] * len(scripts)
        self._scripts = [[script] if isinstance(script, Script) else list(script) for script in scripts]
        self.asked: list[GenerationRequest] = []
        self.told: list[PacelineError] = []
        self.over: list[NodeId] = []

    def is_coming(self) -> bool:
        return False

    def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
        for place, scripts in enumerate(self._scripts):
            if scripts and NodeId(str(place)) not in left:
                stop = RouteStop(NodeId(str(place)), b"", self._ids[place], (), model=ModelRef("d", "int4"))
                following = may_follow(after, stop.holding, exact=request.exact) if after is not None else Following.SAME
                if following.is_allowed:
                    self.asked.append(request)
                    return Leg(stop, scripts.pop(0), following)
        return None

    def ended(self, leg: Leg, error: PacelineError | None) -> None:
        self.over.append(leg.node_id)
        self.told += [] if error is None else [error]


def forwarded(*scripts: Script | Sequence[Script], nodes: Scripted | None = None, request: GenerationRequest = REQUEST) -> Forwarded:
    clock = FakeClock()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    return Forwarded(request, nodes or Scripted(*scripts), clock, sleep)


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
        WayNotAllowed("served otherwise"),
        RevokedNode("void", who="b"),
    ],
)
def test_what_the_next_node_may_not_share_moves_on(refusal: PacelineError) -> None:
    first, second = Script(refusal), whole()
    nodes = Scripted(first, second)
    chunks = asyncio.run(collect(forwarded(nodes=nodes)))
    assert len(chunks) == 4
    assert nodes.told == [refusal]
    assert nodes.asked == [REQUEST, replace(REQUEST, request_id=RequestId("r.1"))], "an id of its own"
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
    begun = await collect(forwarded(Script([chunk(0)], ended)))
    assert [one.code for one in begun[1:]] == ["pipeline_aborted"] * 2


@in_loop
async def test_an_answer_whose_form_failed_is_not_asked_of_the_next_node() -> None:
    ended = [
        GenerationChunk(ID, index, (), "", finish_reason=FinishReason.ERROR, error="too complex", code=FORM_NOT_FOLLOWED)
        for index in (0, 1)
    ]
    second = whole()
    found = await collect(forwarded(Script([chunk(0)], ended), second))
    assert [one.code for one in found[1:]] == [FORM_NOT_FOLLOWED] * 2


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
    with pytest.raises(NodeUnreachable):
        await collect(forwarded())


@in_loop
async def test_an_answer_that_broke_off_goes_on_elsewhere_from_its_tokens() -> None:
    gone = NodeUnreachable("a is gone")
    first = Script([chunk(0), chunk(1), chunk(0)], gone)
    second = Script([chunk(0, FinishReason.STOP), chunk(1)], gone)
    third = Script([chunk(1, FinishReason.LENGTH)])
    nodes = Scripted(first, second, third)
    chunks = await collect(forwarded(nodes=nodes))
    assert [(one.index, one.finish_reason) for one in chunks] == [
        (0, None),
        (1, None),
        (0, None),
        (0, FinishReason.STOP),
        (1, None),
        (1, FinishReason.LENGTH),
    ]
    assert [request.so_far for request in nodes.asked] == [{}, {0: (7, 7), 1: (7,)}, {1: (7, 7)}]
    assert [request.draft for request in nodes.asked] == ["d", None, None]
    assert nodes.told == [gone, gone]
    assert nodes.over == ["0", "1", "2"]
    assert first.closed == second.closed == third.closed == 1


@in_loop
async def test_an_answer_that_another_arithmetic_continues_says_so_once_before_its_tokens() -> None:
    gone = NodeUnreachable("gone")
    scripts = (
        Script([chunk(0), chunk(1), chunk(0)], gone),
        Script(gone),  # it wrote nothing, so nothing is said of it
        Script([chunk(0)], [chunk(1)], gone),
        Script([chunk(0, FinishReason.STOP)], [chunk(1)], gone),
        Script([chunk(1, FinishReason.STOP)]),
    )
    chunks = await collect(forwarded(nodes=Scripted(*scripts, ids=["n", "other", "o", "o", ""])))
    told = [(place, one.index, notice) for place, one in enumerate(chunks) for notice in one.notices]
    assert {notice.kind for _, _, notice in told} == {NUMERICS_CHANGED}
    assert [(place, index, notice.detail["n_tokens"], notice.detail["to"], notice.detail["node"]) for place, index, notice in told] == [
        (3, 0, 2, "o", "2"),
        (4, 1, 1, "o", "2"),
        (9, 1, 3, "", "4"),
    ]
    assert {(notice.detail["from"], notice.detail["matched_by"]) for _, _, notice in told} == {("n", "digest"), ("o", "digest")}
    assert [(one.index, one.finish_reason) for one in chunks if one.finish_reason] == [(0, FinishReason.STOP), (1, FinishReason.STOP)]


@pytest.mark.parametrize("other", ["o", ""])
@in_loop
async def test_an_exact_answer_waits_for_equal_numerics_and_ends_without_them(other: str) -> None:
    begun = Script([chunk(0), chunk(1)], NodeUnreachable("gone"))
    request = replace(REQUEST, exact=True)
    ended = await collect(forwarded(nodes=Scripted(begun, whole(), ids=["n", other]), request=request))
    assert [one.code for one in ended[2:]] == ["no_machine"] * 2
    begun = Script([chunk(0), chunk(1)], NodeUnreachable("gone"))
    chunks = await collect(forwarded(nodes=Scripted(begun, whole(), whole(), ids=["n", other, "n"]), request=request))
    assert len(chunks) == 2 + 4
    assert not any(one.notices for one in chunks)


def changed(to: str) -> list[GenerationChunk]:
    return [GenerationChunk(ID, 0, (), "", notices=(Notice(NUMERICS_CHANGED, {"from": "n", "to": to}),))]


@in_loop
async def test_a_node_whose_own_numerics_change_is_followed_as_what_it_is_now() -> None:
    scripts = (
        Script([chunk(0), chunk(1)], changed(""), [chunk(0)], NodeUnreachable("gone")),
        Script([chunk(0, FinishReason.STOP), chunk(1, FinishReason.STOP)]),
    )
    chunks = await collect(forwarded(nodes=Scripted(*scripts)))
    assert [(notice.detail["from"], notice.detail["to"]) for one in chunks for notice in one.notices] == [("n", ""), ("", "n"), ("", "n")]


@in_loop
async def test_an_exact_answer_leaves_a_node_whose_numerics_change() -> None:
    nodes = Scripted(Script([chunk(0), chunk(1)], changed(""), [chunk(0), chunk(1)]), whole())
    chunks = await collect(forwarded(nodes=nodes, request=replace(REQUEST, exact=True)))
    assert nodes.asked[1].so_far == {0: (7,), 1: (7,)}
    assert not any(one.notices for one in chunks)


@in_loop
async def test_a_node_that_comes_back_is_asked_again() -> None:
    gone = NodeUnreachable("gone")
    nodes = Scripted([Script([chunk(0), chunk(1)], gone), whole()], Script([chunk(0)], gone))
    assert len(await collect(forwarded(nodes=nodes))) == 3 + 4
    # The only one there is, too: after a pause.
    nodes = Scripted([Script([chunk(0), chunk(1)], gone), Script(gone), Script(Overloaded("busy", retry_after_s=1)), whole()])
    assert len(await collect(forwarded(nodes=nodes))) == 2 + 4


@pytest.mark.parametrize("comes", [False, True])
@in_loop
async def test_a_node_that_runs_anew_is_waited_for_while_it_may_load_but_not_for_ever(comes: bool) -> None:
    class Loading(Scripted):
        """The only node was lost, and takes no request for as long as it loads: longer than there is patience with a node that is gone."""

        def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
            return super().leg(request, left, after) if not self.told or (comes and clock.monotonic() - began > 2 * PATIENCE_S) else None

        def is_coming(self) -> bool:
            return True

    clock = FakeClock()
    began = clock.monotonic()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    nodes = Loading([Script([chunk(0), chunk(1)], NodeUnreachable("gone")), whole()])
    chunks = await collect(Forwarded(REQUEST, nodes, clock, sleep))
    assert [one.code for one in chunks[2:]] == ([None] * 4 if comes else ["no_machine"] * 2)
    assert comes or LOADING_S <= clock.monotonic() - began <= LOADING_S + LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NodeUnreachable("b is gone"), "no_machine"),
        (ShardUnavailable("no layers"), "shard_unavailable"),
        (WeightsMismatch("other weights"), "weights_mismatch"),
        (ExecutorUnavailable("again and again", code="pipeline_aborted"), "pipeline_aborted"),
    ],
)
@in_loop
async def test_an_answer_that_no_node_goes_on_with_ends_with_a_code_for_what_still_ran(error: PacelineError, code: str) -> None:
    chunks = await collect(forwarded(Script([chunk(0, FinishReason.STOP), chunk(1)], error)))
    assert [(one.index, one.finish_reason, one.code) for one in chunks[2:]] == [(1, FinishReason.ERROR, code)]
    assert error.message in (chunks[-1].error or "")


@in_loop
async def test_a_stream_that_just_ends_is_no_short_answer() -> None:
    nodes = Scripted(Script([chunk(0), chunk(1, FinishReason.STOP)]), Script([chunk(0, FinishReason.STOP)]))
    assert [(one.index, one.finish_reason) for one in (await collect(forwarded(nodes=nodes)))[2:]] == [(0, FinishReason.STOP)]
    assert nodes.asked[1].so_far == {0: (7,)}


@in_loop
async def test_what_a_node_says_after_an_end_or_of_no_sequence_is_dropped() -> None:
    script = Script([chunk(0, FinishReason.STOP), chunk(0), chunk(5), chunk(1, FinishReason.STOP), chunk(1)])
    assert [one.index for one in await collect(forwarded(script))] == [0, 1]


@in_loop
async def test_a_sequence_that_can_t_be_drawn_is_no_fault_of_the_node() -> None:
    failed = [GenerationChunk(ID, index, (), "", finish_reason=FinishReason.ERROR, error="no token") for index in (0, 1)]
    nodes = Scripted(Script([chunk(0)], failed), whole())
    assert [one.error for one in (await collect(forwarded(nodes=nodes)))[1:]] == ["no token"] * 2
    assert len(nodes.asked) == 1


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


class NoRoom:
    """An engine's stream, of which one sequence has no room after the first item."""

    def __init__(self, stream: ChunkStream) -> None:
        self._stream, self._begun = stream, False

    def __aiter__(self) -> NoRoom:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        if self._begun:
            return [GenerationChunk(ID, 0, (), "", finish_reason=FinishReason.ERROR, error="no room", code="shard_unavailable")]
        self._begun = True
        return await anext(self._stream)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Same:
    """`Nodes` that are one engine, asked again and again."""

    def __init__(self, host: EngineHost) -> None:
        self._host, self.asked = host, list[GenerationRequest]()

    def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
        self.asked.append(request)
        stream = self._host.generate("echo", request)
        return Leg(RouteStop(NodeId(str(len(self.asked))), b"", "", ()), NoRoom(stream) if len(self.asked) == 1 else stream)

    def is_coming(self) -> bool:
        return False

    def ended(self, leg: Leg, error: PacelineError | None) -> None:
        pass


@in_loop
async def test_what_an_engine_still_says_of_an_answer_that_left_it_is_no_part_of_the_same_answer_s_return() -> None:
    """One of two sequences has no room, so both leave; a step with the other is still under way when the engine is asked again."""
    engine = EchoEngine()
    engine.gate.shut()
    with closing(host_of(engine)) as host:
        nodes = Same(host)
        stream = Forwarded(REQUEST, nodes, FakeClock())
        engine.gate.let(1)
        assert [(one.index, one.token_ids) for one in await anext(stream)] == [(0, (0,)), (1, (0,))]
        coming = asyncio.ensure_future(anext(stream))
        await until(lambda: len(nodes.asked) == 2 and host.live == 1)
        engine.gate.open()
        again = await coming
        assert [(one.request_id, one.index, one.token_ids) for one in again[:2]] == [(ID, 0, (0,)), (ID, 1, (0,))]
        await stream.aclose()


def scores(*tokens: int) -> GenerationChunk:
    return GenerationChunk(ID, 0, (), "", prompt_logprobs=tuple(TokenLogprob(token, -1.0) for token in tokens))


SCORED = GenerationRequest(ID, (1, 2, 3, 4), 0, scores_prompt=True)
END = GenerationChunk(ID, 0, (), "", finish_reason=FinishReason.LENGTH)


@in_loop
async def test_what_a_node_said_of_the_prompt_is_not_said_again_by_the_next() -> None:
    lost = NodeUnreachable("gone")
    said = await collect(forwarded(Script([scores(2, 3)], lost), Script([scores(2)], lost), Script([scores(2, 3, 4), END]), request=SCORED))
    assert [one.token_id for chunk in said for one in chunk.prompt_logprobs] == [2, 3, 4]
    assert said[-1].finish_reason is FinishReason.LENGTH


@in_loop
async def test_a_node_that_knows_nothing_of_the_prompt_s_log_probabilities_is_left() -> None:
    nodes = Scripted(Script([scores(2)], [chunk(0)]), Script([scores(2, 3, 4)], [END]))
    said = await collect(forwarded(nodes=nodes, request=SCORED))
    assert [one.token_id for one_chunk in said for one in one_chunk.prompt_logprobs] == [2, 3, 4]
    assert not any(one.token_ids for one in said)
    assert "log probabilities of the prompt" in str(nodes.told[0])


@pytest.mark.parametrize("plain", [True, False])
@in_loop
async def test_an_answer_that_moves_to_an_unencrypted_engine_says_so(plain: bool) -> None:
    class Shared(Scripted):
        def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
            leg = super().leg(request, left, after)
            return leg and replace(leg, stop=replace(leg.stop, engine=EngineOffer("llama-server", ("ids",), plain_http=plain)))

    first = Script([chunk(0)], NodeUnreachable("gone"))
    nodes = Shared(first, whole(), ids=("", ""))
    found = await collect(forwarded(nodes=nodes))
    (detail,) = [one.detail for chunk in found for one in chunk.notices if one.detail["index"] == 0]
    assert detail.get("plain_http", False) is plain
