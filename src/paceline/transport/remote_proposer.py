"""A proposer on another node, where a proposer is wanted: the same call, the same counts, and `RemoteProposerError` where there is no draft."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LoopTimeoutError

import grpc.aio

from paceline.core.errors import FleetError, RemoteProposerError
from paceline.engine.drafts import BlockProposal
from paceline.engine.proposers.session import common_length
from paceline.engine.proposers.stats import ProposerStats
from paceline.transport.draft_blocks import check_block, new_session
from paceline.transport.draft_line import failed, read_block, write_ask
from paceline.transport.proposer_desk import BlockAsk
from paceline.transport.wire.propose_pb2_grpc import ProposerServiceStub

DEADLINE_S = 5.0
LOOP_S = 1.0
"""How much longer a loop that is stuck is waited for."""


class RemoteProposer:
    """Implements `engine.drafts.Proposer`. Blocks: for any thread but the event loop's.

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
        self._session = new_session()
        self._told: list[int] = []
        """What the other side knows of the session."""
        self.stats = ProposerStats()

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """As `Proposer.propose_block`.

        Raises:
            RemoteProposerError: none was had.
        """
        asked = asyncio.run_coroutine_threadsafe(self._ask(committed, block_size, num_steps), self._loop)
        try:
            block = asked.result(self._deadline_s + LOOP_S)
            if block is None:
                raise RemoteProposerError(f"{self._peer} forgets what it is told", status="ABORTED")
            check_block(block, block_size, self._vocabulary_size, self._peer)
        except LoopTimeoutError:
            asked.cancel()
            self._begin_anew()
            raise RemoteProposerError(f"{self._peer} drafted nothing in {self._deadline_s:g} s", status="DEADLINE_EXCEEDED") from None
        except RemoteProposerError:
            self._begin_anew()
            raise
        self.stats.count(block)
        return block

    def _begin_anew(self) -> None:
        self.stats.failures += 1
        self._session, self._told = new_session(), []

    async def _ask(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal | None:
        """A block; None where the session was lost, and lost again as soon as all of it was said."""
        known = common_length(self._told, committed)
        for first in dict.fromkeys((known, 0)):
            ask = BlockAsk(self._model_id, self._session, first, committed[first:], block_size, num_steps)
            try:
                message = await ProposerServiceStub(self._channel()).ProposeBlock(write_ask(ask), timeout=self._deadline_s)
            except grpc.aio.AioRpcError as error:
                raise failed(error, self._peer) from error
            except grpc.aio.UsageError as error:
                raise RemoteProposerError(f"The connection to {self._peer} was closed", status="CANCELLED") from error
            except FleetError as error:  # the node is not in view, or not trusted any more
                raise RemoteProposerError(error.message, error.hint, status="UNAVAILABLE") from error
            block = read_block(message)
            if block is not None:
                self._told = list(committed)
                return block
        return None
