"""One call to another node's proposer, over which blocks are asked for and come, many at a time. Lives on one event loop.

Law: it ends once, with the reason, and says nothing after; a block that breaks the contract ends it too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, islice, pairwise

import grpc.aio

from paceline.core.errors import NodeUnreachable, RemoteProposerError
from paceline.engine.drafts import BlockProposal, Branch
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.wire import propose_pb2 as wire
from paceline.net.wire.propose_pb2_grpc import ProposerServiceStub
from paceline.ways.draft.blocks import MOST_BRANCHES, OnBlock
from paceline.ways.draft.desk import BlockAsk


class RemoteLine:
    """The call.

    Args:
        peer: its name, for messages.
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
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
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
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self._call.cancel()
        self._on_end(reason)

    async def _write(self) -> None:
        """Whatever ends this ends the reading too, which says why."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._outgoing:
                await self._call.write(self._outgoing.popleft())


def write_ask(ask: BlockAsk) -> wire.ProposeBlockRequest:
    """An ask as it travels."""
    return wire.ProposeBlockRequest(
        committed_token_ids=ask.token_ids,
        block_size=ask.block_size,
        num_steps=ask.num_steps,
        model_id=ask.model_id,
        session=ask.session,
        first_position=ask.first_position,
    )


def read_block(message: wire.ProposeBlockResponse) -> BlockProposal | None:
    """A block, not checked; None where its session is lost."""
    if message.session_lost:
        return None
    return BlockProposal(
        tuple(message.token_ids), message.diffusion_steps, message.forward_passes, message.peak_activation_bytes, _read_branches(message)
    )


def _read_branches(message: wire.ProposeBlockResponse) -> tuple[Branch, ...]:
    """What is missing of them is cut off, and so is what is too many; whether the rest are branches, `check_block` says."""
    tokens, ends = tuple(message.branch_token_ids), accumulate(message.branch_lengths, initial=0)
    places = islice(zip(message.branch_offsets, pairwise(ends), strict=False), MOST_BRANCHES + 1)
    return tuple(Branch(offset, tokens[start:end]) for offset, (start, end) in places)


def failed(error: grpc.aio.AioRpcError, peer: str) -> RemoteProposerError:
    """What a failed call means for the caller that wanted drafts."""
    said = error_of(error, peer)
    return RemoteProposerError(said.message, said.hint, status=error.code().name)
