"""A proposer on another node, where a proposer is wanted: the same call, the same counts, and `RemoteProposerError` where there is no draft."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LoopTimeoutError

import grpc.aio

from paceline.core.errors import FleetError, RemoteProposerError
from paceline.engine.drafts import BlockProposal, ProposerStats
from paceline.engine.proposers.session import common_length
from paceline.ways.draft.blocks import check_block, new_session
from paceline.ways.draft.desk import BlockAsk
from paceline.ways.draft.line import RemoteLine

DEADLINE_S = 5.0
LOOP_S = 1.0
"""How much longer a loop that is stuck is waited for."""


class RemoteProposer:
    """Implements `engine.drafts.Proposer`, over a call that lasts until it is closed or fails; with it ends what the other side remembers. Blocks:
    for one thread, which is not the event loop's.

    Args:
        loop: runs, and has the channel.
        channel: to the node, as it is now.
        peer: its name, for messages.
        model_id: of the proposer there.
        vocabulary_size: of the model drafted for.
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
        self._line: RemoteLine | None = None
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
                raise RemoteProposerError(f"{self._peer} forgets what it is told", status="ABORTED")
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
        if self._line is None:
            self._session = new_session()
            self._line = RemoteLine(self._channel(), self._peer, self._on_block, self._on_end)
        self._line.send(BlockAsk(self._model_id, self._session, first, committed[first:], block_size, num_steps))
        return await answer

    async def _hang_up(self) -> None:
        line, self._line, self._told = self._line, None, []
        if line is not None:
            await line.close()

    def _on_block(self, session: int, block: BlockProposal | None) -> None:
        del session  # there is one
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(block)

    def _on_end(self, error: RemoteProposerError) -> None:
        self._line, self._told = None, []
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
