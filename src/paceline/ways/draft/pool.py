"""This machine's proposers, for its callers: members over gRPC, or an engine of the same process.

Law: one block of a model at a time, in a thread that the model keeps; asks wait in line, and one whose asker gave up meanwhile is dropped. Sessions
are bounded in number and in tokens: the one used longest ago is forgotten, and its owner says everything again. Lives on one event loop.

ProposerService: drafts for another node. A wrong draft costs that node time and changes no byte, so nothing here need be right.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from paceline.core.errors import InvalidRequest, ModelNotFound, Overloaded
from paceline.core.ids import Trust
from paceline.engine.drafts import BlockProposal, DraftSession, Proposer, ProposerStats, open_session
from paceline.net.mapper import Codec, Mapped, refuse_with
from paceline.net.server import KIB, Service
from paceline.net.trust.certificates import Member
from paceline.net.trust.handlers import Context, Limit
from paceline.net.wire import propose_pb2 as wire
from paceline.net.wire.propose_pb2_grpc import ProposerServiceServicer, add_ProposerServiceServicer_to_server

MAX_BLOCK = 256
MAX_COMMITTED = 1 << 20
"""Tokens of one text."""
MAX_STEPS = 1 << 10
MOST_SESSIONS = 256
MOST_TOKENS = 1 << 20
"""Over all sessions. Raising it: memory."""
MOST_WAITING = 64
"""Asks of one model. Raising it: askers wait for blocks that come too late."""


@dataclass(frozen=True, slots=True)
class BlockAsk:
    """What is to be drafted; fields as on the wire."""

    model_id: str
    session: int
    first_position: int
    token_ids: Sequence[int]
    block_size: int
    num_steps: int = 0


@dataclass(slots=True)
class _Model:
    proposer: Proposer
    thread: ThreadPoolExecutor
    waiting: int = 0


@dataclass(slots=True)
class _Kept:
    session: DraftSession
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Blocks of one session are made in the order of their asks."""
    held: int = 0
    """Tokens, once all asks before are done."""
    asks: int = 0
    busy: int = 0
    """Asks that are not answered yet."""
    gone: bool = False
    """Forgotten; asks that wait their turn come too late."""


Key = tuple[str, str, int]
"""Caller, model, session."""


class ProposerPool:
    """Every proposer of one node.

    Args:
        most_sessions: kept.
        most_tokens: kept, over all sessions.
    """

    def __init__(self, proposers: Mapping[str, Proposer], *, most_sessions: int = MOST_SESSIONS, most_tokens: int = MOST_TOKENS) -> None:
        self._models: dict[str, _Model] = {}
        self._ended: list[ThreadPoolExecutor] = []
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._most_sessions, self._most_tokens = most_sessions, most_tokens
        self.tokens = 0
        """Kept now, over all sessions."""
        self._closed = False
        self._making: set[asyncio.Future[BlockProposal]] = set()
        self.stats: dict[str, ProposerStats] = {}
        """By model."""
        for model_id, proposer in proposers.items():
            self.add(model_id, proposer)

    def add(self, model_id: str, proposer: Proposer) -> None:
        """Serve one more.

        Raises:
            ValueError: there is one of that name.
        """
        if model_id in self._models:
            raise ValueError(f"{model_id} drafts here already")
        self.stats[model_id] = ProposerStats()
        self._models[model_id] = _Model(proposer, ThreadPoolExecutor(1, f"paceline-propose-{model_id}"))

    @property
    def model_ids(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def sessions(self) -> int:
        """Kept now."""
        return len(self._kept)

    async def propose(self, caller: str, ask: BlockAsk) -> BlockProposal | None:
        """A block; None where the caller's session is not held as far as the ask begins, or no longer, or the pool was closed meanwhile.

        Raises:
            ModelNotFound: there is no such proposer here.
            InvalidRequest: it can't be meant.
            Overloaded: too many wait.
        """
        model = self._models.get(ask.model_id)
        if model is None and self._closed:
            raise ModelNotFound("Nothing is drafted here any more: this machine stops")
        if model is None:
            raise ModelNotFound(f"{ask.model_id[:200]!r} is not loaded here as a proposer", f"Here: {', '.join(self._models)}.")
        _check(ask)
        if model.waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} blocks of {ask.model_id} are waited for already", retry_after_s=1)
        key = (caller, ask.model_id, ask.session)
        kept = self._kept.get(key) if ask.session else None
        if kept is None or kept.held < ask.first_position:
            if ask.first_position:
                return None
            kept = _Kept(open_session(model.proposer))
            if ask.session:
                self.end(caller, (ask.session,), ask.model_id)
                self._kept[key] = kept
        model.waiting += 1
        kept.busy += 1
        kept.asks += 1
        number = kept.asks
        self._count(key, kept, ask.first_position + len(ask.token_ids))
        try:
            async with kept.turn:
                if kept.gone:
                    return None
                # A later ask says that this one's block is of no use any more; but its tokens have to be told.
                length = ask.block_size if number == kept.asks else 0
                args = (ask.first_position, ask.token_ids, length, ask.num_steps)
                block = await self._make(model, kept, *args)
                if block is None:
                    return None
        except BaseException:
            # What of it was told is not known.
            self._drop(model, key, kept)
            self.stats[ask.model_id].failures += 1
            raise
        finally:
            model.waiting -= 1
            kept.busy -= 1
            if not ask.session:
                self._drop(model, key, kept)
        self.stats[ask.model_id].count(block)
        return block

    def end(self, caller: str, sessions: Sequence[int], model_id: str | None = None) -> None:
        """Sessions of a caller are over, of one model or of any; unknown ones too."""
        for session in sessions:
            for name, model in self._models.items():
                key = (caller, name, session)
                if model_id in {None, name} and key in self._kept:
                    self._drop(model, key, self._kept[key])

    def close(self) -> None:
        """Begin nothing more, and answer all callers that wait. A block being made is not waited for: no caller will have it. On the event loop; idempotent."""
        self._closed = True
        self._ended += [model.thread for model in self._models.values()]
        for thread in self._ended:
            thread.shutdown(wait=False, cancel_futures=True)
        self._models.clear()
        for kept in self._kept.values():
            kept.gone = True
        self._kept.clear()
        self.tokens = 0
        for making in self._making:
            making.cancel()

    def drained(self, wait_s: float) -> bool:
        """Wait, once it is closed, until nothing is drafted any more. Blocks: for a thread. False where it takes longer."""
        waiting = threading.Thread(target=lambda: [thread.shutdown() for thread in self._ended], daemon=True)
        waiting.start()
        waiting.join(wait_s)
        return not waiting.is_alive()

    async def _make(self, model: _Model, kept: _Kept, *args: Any) -> BlockProposal | None:
        """A block, in the model's thread; None: the pool was closed."""
        making = asyncio.get_running_loop().run_in_executor(model.thread, kept.session.propose, *args)
        self._making.add(making)
        try:
            return await making
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            return None
        finally:
            self._making.discard(making)

    def _count(self, key: Key, kept: _Kept, held: int) -> None:
        if self._kept.get(key) is not kept:
            return
        self.tokens += held - kept.held
        kept.held = held
        self._kept.move_to_end(key)
        while len(self._kept) > self._most_sessions or self.tokens > self._most_tokens:
            # Those with asks under way, of which there are no more than may wait, are in use this moment.
            oldest = next((each for each, one in self._kept.items() if not one.busy), None)
            if oldest is None:
                return
            self._drop(self._models[oldest[1]], oldest, self._kept[oldest])

    def _drop(self, model: _Model, key: Key, kept: _Kept) -> None:
        if self._kept.get(key) is kept:
            del self._kept[key]
            self.tokens -= kept.held
        kept.gone = True
        if key[1] in self._models:  # not closed meanwhile
            model.thread.submit(kept.session.close)  # after what it may be making


def _check(ask: BlockAsk) -> None:
    if not 1 <= ask.block_size <= MAX_BLOCK:
        raise InvalidRequest(f"A block of {ask.block_size} tokens; 1 to {MAX_BLOCK} are drafted", field="block_size")
    if ask.num_steps > MAX_STEPS:
        raise InvalidRequest(f"{ask.num_steps} refinements; {MAX_STEPS} are made at most", field="num_steps")
    if ask.first_position + len(ask.token_ids) > MAX_COMMITTED:
        raise InvalidRequest(f"A text of more than {MAX_COMMITTED} tokens", field="committed_token_ids")
    if ask.first_position and not ask.session:
        raise InvalidRequest("Tokens that begin at a position, and no session that has those before", field="first_position")


MOST_ENDED = 16 * MOST_SESSIONS
"""Sessions that one message may end: more than a caller can have. Raising it: what one message makes the event loop do."""


class ProposerServicer(ProposerServiceServicer):
    def __init__(self, pool: ProposerPool, who: Callable[[Context], Member]) -> None:
        self._pool, self._who = pool, who

    async def ProposeBlock(self, request: wire.ProposeBlockRequest, context: Context) -> wire.ProposeBlockResponse:
        ask = replace(read_ask(request), session=0)
        return write_block(await self._pool.propose(self._who(context).node_id, ask), 0)

    # Written to the context rather than yielded: a generator that is not asked for more would be closed only when it is collected.
    async def ProposeBlocks(self, requests: AsyncIterator[wire.ProposeBlocksRequest], context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        caller = self._who(context).node_id
        writing = asyncio.Lock()
        # Who does not read answers is not read either.
        unanswered = asyncio.Semaphore(MOST_WAITING)

        async def answer(ask: BlockAsk) -> None:
            try:
                block = write_block(await self._pool.propose(caller, ask), ask.session)
                async with writing:
                    await context.write(wire.ProposeBlocksResponse(block=block))
            finally:
                unanswered.release()

        seen: dict[int, None] = {}
        """Sessions, the one used last at the end: no more than the pool keeps."""
        try:
            async with asyncio.TaskGroup() as answering:
                async for request in requests:
                    if len(request.ended_sessions) > MOST_ENDED:
                        raise InvalidRequest(f"{len(request.ended_sessions)} sessions that ended at once", field="ended_sessions")
                    self._pool.end(caller, request.ended_sessions)
                    for session in request.ended_sessions:
                        seen.pop(session, None)
                    if not request.HasField("block"):
                        continue
                    await unanswered.acquire()
                    ask = read_ask(request.block)
                    seen.pop(ask.session, None)
                    seen[ask.session] = None
                    if len(seen) > MOST_SESSIONS:
                        del seen[next(iter(seen))]
                    answering.create_task(answer(ask))
                    await asyncio.sleep(0)  # so that it begins before news that its session is over
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            # Sessions end with the call that spoke of them: a peer that calls again says everything again.
            self._pool.end(caller, tuple(seen))


_ASK: Final = Codec(
    BlockAsk, wire.ProposeBlockRequest, refuse_with(InvalidRequest), {"token_ids": Mapped("committed_token_ids", read=list)}
)
BLOCK: Final = Codec(
    BlockProposal,
    wire.ProposeBlockResponse,
    refuse_with(InvalidRequest),
    beside=["session", "session_lost"],
)
"""Not checked: whether it is a draft at all, `check_block` says."""
write_ask: Final = _ASK.write
read_ask: Final = _ASK.read


def write_block(block: BlockProposal | None, session: int) -> wire.ProposeBlockResponse:
    """A block as it travels; None: the session is lost."""
    return wire.ProposeBlockResponse(session=session, session_lost=True) if block is None else BLOCK.write(block, session=session)


def proposer_service(pool: ProposerPool, who: Callable[[Context], Member]) -> Service:
    limits = {
        "ProposerService/ProposeBlock": Limit(
            2048 * KIB, 64, bulk=wire.ProposeBlockRequest.COMMITTED_TOKEN_IDS_FIELD_NUMBER, least=Trust.GUEST
        ),
        # All that is inside of a block is numbers.
        "ProposerService/ProposeBlocks": Limit(
            2048 * KIB, 2 * MOST_SESSIONS, bulk=wire.ProposeBlocksRequest.BLOCK_FIELD_NUMBER, least=Trust.GUEST
        ),
    }
    return Service(partial(add_ProposerServiceServicer_to_server, ProposerServicer(pool, who)), limits)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
