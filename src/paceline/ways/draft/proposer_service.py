"""ProposerService: drafts for another node. A wrong draft costs that node time and changes no byte, so nothing here need be right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.engine.drafts import BlockProposal
from paceline.net.rpc_faults import abort
from paceline.net.server import KIB, Service
from paceline.net.trust.certificates import Member
from paceline.net.trust.handlers import Limit
from paceline.net.wire import propose_pb2 as wire
from paceline.net.wire.propose_pb2_grpc import ProposerServiceServicer, add_ProposerServiceServicer_to_server
from paceline.ways.draft.desk import MOST_SESSIONS, MOST_WAITING, BlockAsk, ProposerDesk

MOST_ENDED = 16 * MOST_SESSIONS
"""Sessions that one message may end: more than a caller can have. Raising it: what one message makes the event loop do."""

Context = grpc.aio.ServicerContext[Any, Any]


class ProposerServicer(ProposerServiceServicer):
    """Answers members.

    Args:
        who: the caller of a context (`PeerGuard.peer`).
    """

    def __init__(self, desk: ProposerDesk, who: Callable[[Context], Member]) -> None:
        self._desk, self._who = desk, who

    async def ProposeBlock(self, request: wire.ProposeBlockRequest, context: Context) -> wire.ProposeBlockResponse:
        try:
            ask = replace(read_ask(request), session=0)
            return write_block(await self._desk.propose(self._who(context).node_id, ask), 0)
        except PacelineError as error:
            await abort(context, error)

    # Written to the context rather than yielded: a generator that is not asked for more would be closed only when it is collected.
    async def ProposeBlocks(self, requests: AsyncIterator[wire.ProposeBlocksRequest], context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        caller = self._who(context).node_id
        writing = asyncio.Lock()
        # Who does not read answers is not read either.
        unanswered = asyncio.Semaphore(MOST_WAITING)

        async def answer(ask: BlockAsk) -> None:
            try:
                block = write_block(await self._desk.propose(caller, ask), ask.session)
                async with writing:
                    await context.write(wire.ProposeBlocksResponse(block=block))
            finally:
                unanswered.release()

        seen: dict[int, None] = {}
        """Sessions, the one used last at the end: no more than the desk keeps."""
        try:
            async with asyncio.TaskGroup() as answering:
                async for request in requests:
                    if len(request.ended_sessions) > MOST_ENDED:
                        raise InvalidRequest(f"{len(request.ended_sessions)} sessions that ended at once", field="ended_sessions")
                    self._desk.end(caller, request.ended_sessions)
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
                    if self._desk.is_quick(caller, ask):
                        await answer(ask)
                    else:
                        answering.create_task(answer(ask))
                        await asyncio.sleep(0)  # so that it begins before news that its session is over
        except BaseExceptionGroup as errors:
            error = _first(errors)
            if isinstance(error, PacelineError):
                await abort(context, error)
            raise error from None
        finally:
            # Sessions end with the call that spoke of them: a peer that calls again says everything again.
            self._desk.end(caller, tuple(seen))


def read_ask(request: wire.ProposeBlockRequest) -> BlockAsk:
    """What is asked, not checked."""
    tokens = list(request.committed_token_ids)
    return BlockAsk(request.model_id, request.session, request.first_position, tokens, request.block_size, request.num_steps)


def write_block(block: BlockProposal | None, session: int) -> wire.ProposeBlockResponse:
    """A block as it travels; None: the session is lost."""
    if block is None:
        return wire.ProposeBlockResponse(session=session, session_lost=True)
    return wire.ProposeBlockResponse(
        token_ids=block.token_ids,
        diffusion_steps=block.diffusion_steps,
        forward_passes=block.forward_passes,
        peak_activation_bytes=block.peak_activation_bytes,
        session=session,
        branch_offsets=[branch.offset for branch in block.branches],
        branch_lengths=[len(branch.token_ids) for branch in block.branches],
        branch_token_ids=[token for branch in block.branches for token in branch.token_ids],
    )


def proposer_service(desk: ProposerDesk, who: Callable[[Context], Member]) -> Service:
    """What a node's server registers."""
    limits = {
        "ProposerService/ProposeBlock": Limit(2048 * KIB, 64, bulk=wire.ProposeBlockRequest.COMMITTED_TOKEN_IDS_FIELD_NUMBER),
        # All that is inside of a block is numbers.
        "ProposerService/ProposeBlocks": Limit(2048 * KIB, 2 * MOST_SESSIONS, bulk=wire.ProposeBlocksRequest.BLOCK_FIELD_NUMBER),
    }
    return Service(partial(add_ProposerServiceServicer_to_server, ProposerServicer(desk, who)), limits)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
