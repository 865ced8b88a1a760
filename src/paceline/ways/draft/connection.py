"""One call to another node's proposer, over which blocks are asked for and come, many at a time. Lives on one event loop.

Law: it ends once, with the reason, and says nothing after; a block that breaks the contract ends it too.

What is true of blocks however they travel: who is told of them, which sessions they belong to, whether they are drafts at all.

A proposer on another node, where a proposer is wanted: the same call, the same counts, and `RemoteProposerError` where there is no draft.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LoopTimeoutError

import grpc.aio

from paceline.core.background import end_tasks
from paceline.core.errors import FleetError, NodeUnreachable, RemoteProposerError
from paceline.core.text import common_length
from paceline.engine.drafts import BlockProposal, ProposerStats
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.wire import propose_pb2 as wire
from paceline.net.wire.propose_pb2_grpc import ProposerServiceStub
from paceline.ways.draft.pool import BLOCK, BlockAsk, write_ask

OnBlock = Callable[[int, BlockProposal | None], None]
"""Told of a session's block; None: the session is lost, and all of it must be said again."""


def new_session() -> int:
    """An id that no other session of this node has."""
    return int.from_bytes(os.urandom(8), "little") | 1


def check_block(block: BlockProposal, asked: int, vocabulary_size: int, peer: str) -> None:
    """Whether it is a draft at all; whether it is a good one, the model says.

    Raises:
        RemoteProposerError: it is longer than was asked for, or has tokens that don't exist.
    """
    if len(block.token_ids) > asked:
        raise RemoteProposerError(f"{peer} drafted {len(block.token_ids)} tokens, and {asked} were asked for", status="DATA_LOSS")
    unknown = next((token for token in block.token_ids if not 0 <= token < vocabulary_size), None)
    if unknown is not None:
        raise RemoteProposerError(f"{peer} drafted token {unknown} of a vocabulary of {vocabulary_size}", status="DATA_LOSS")


class RemoteConnection:
    """The call.

    Args:
        on_end: told why there will be no more, unless it was closed from here.
    """

    def __init__(self, channel: grpc.aio.Channel, peer: str, on_block: OnBlock, on_end: Callable[[RemoteProposerError], None]) -> None:
        self._peer, self._on_block, self._on_end = peer, on_block, on_end
        self._call = ProposerServiceStub(channel).ProposeBlocks()
        self._outgoing: deque[wire.ProposeBlocksRequest] = deque()
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"drafts from {peer}")

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        """Ask for a block, or tell of sessions that are over, or both. Never waits."""
        block = None if ask is None else write_ask(ask)
        self._outgoing.append(wire.ProposeBlocksRequest(block=block, ended_sessions=ended))
        self._more.set()

    async def close(self) -> None:
        """End it. Idempotent."""
        await end_tasks(self._task)
        self._call.cancel()

    async def _run(self) -> None:
        writing = asyncio.create_task(self._write())
        try:
            with unless_closed(self._peer):
                while isinstance(message := await self._call.read(), wire.ProposeBlocksResponse):
                    self._on_block(message.block.session, read_block(message.block))
            reason = RemoteProposerError(f"{self._peer} drafts no more", status="UNAVAILABLE")
        except NodeUnreachable as error:
            reason = RemoteProposerError(error.message, status="CANCELLED")
        except grpc.aio.AioRpcError as error:
            reason = failed(error, self._peer)
        finally:
            await end_tasks(writing)
            self._call.cancel()
        self._on_end(reason)

    async def _write(self) -> None:
        """Whatever ends this ends the reading too, which says why."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._outgoing:
                await self._call.write(self._outgoing.popleft())


def read_block(message: wire.ProposeBlockResponse) -> BlockProposal | None:
    """A block, not checked; None where its session is lost."""
    return None if message.session_lost else BLOCK.read(message)


def failed(error: grpc.aio.AioRpcError, peer: str) -> RemoteProposerError:
    """What a failed call means for the caller that wanted drafts."""
    said = error_of(error, peer)
    return RemoteProposerError(said.message, said.hint, status=error.code().name)


DEADLINE_S = 5.0
LOOP_S = 1.0
"""How much longer a loop that is stuck is waited for."""


class RemoteProposer:
    """Implements `engine.drafts.Proposer`, over a call that lasts until it is closed or fails; with it ends what the other side remembers. Blocks:
    for one thread, which is not the event loop's.

    Args:
        loop: runs, and has the channel.
        deadline_s: for one block. Raising it: a proposer that hangs holds its caller for longer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: Callable[[], grpc.aio.Channel],
        peer: str,
        model_id: str,
        vocabulary_size: int,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._loop, self._channel, self._peer, self._model_id = loop, channel, peer, model_id
        self._vocabulary_size, self._deadline_s = vocabulary_size, deadline_s
        self._session = 0
        """Of this call."""
        self._told: list[int] = []
        """What the other side knows of it."""
        self._connection: RemoteConnection | None = None
        self._answer: asyncio.Future[BlockProposal | None] | None = None
        self.stats = ProposerStats()

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """As `Proposer.propose_block`.

        Raises:
            RemoteProposerError: none was had.
        """
        asked = asyncio.run_coroutine_threadsafe(self._propose(committed, block_size, num_steps), self._loop)
        try:
            block = asked.result(self._deadline_s + LOOP_S)
        except LoopTimeoutError:
            asked.cancel()
            self.stats.failures += 1
            raise RemoteProposerError(f"{self._peer} drafted nothing in {self._deadline_s:g} s", status="DEADLINE_EXCEEDED") from None
        except RemoteProposerError:
            self.stats.failures += 1
            raise
        self.stats.count(block)
        return block

    def close(self) -> None:
        """End the call. It begins again with the next block. Idempotent."""
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(LOOP_S)

    async def _propose(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        known = common_length(self._told, committed)
        try:
            async with asyncio.timeout(self._deadline_s):
                block = await self._ask(committed, known, block_size, num_steps)
                if block is None and known:
                    block = await self._ask(committed, 0, block_size, num_steps)
            if block is None:
                raise RemoteProposerError(f"{self._peer} does not remember the tokens sent to it", status="ABORTED")
            check_block(block, block_size, self._vocabulary_size, self._peer)
        except BaseException as error:
            await self._hang_up()
            if isinstance(error, FleetError) and not isinstance(error, RemoteProposerError):  # it is not in view, or not trusted any more
                raise RemoteProposerError(error.message, error.hint, status="UNAVAILABLE") from error
            raise
        self._told = list(committed)
        return block

    async def _ask(self, committed: Sequence[int], first: int, block_size: int, num_steps: int) -> BlockProposal | None:
        """A block; None where the session was lost."""
        self._answer = answer = self._loop.create_future()
        if self._connection is None:
            self._session = new_session()
            self._connection = RemoteConnection(self._channel(), self._peer, self._on_block, self._on_end)
        self._connection.send(BlockAsk(self._model_id, self._session, first, committed[first:], block_size, num_steps))
        return await answer

    async def _hang_up(self) -> None:
        connection, self._connection, self._told = self._connection, None, []
        if connection is not None:
            await connection.close()

    def _on_block(self, session: int, block: BlockProposal | None) -> None:
        del session  # there is one
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(block)

    def _on_end(self, error: RemoteProposerError) -> None:
        self._connection, self._told = None, []
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
