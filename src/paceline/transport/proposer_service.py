"""ProposerService: drafts for another node. A wrong draft costs that node time and changes no byte, so nothing here need be right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from paceline.core.errors import InvalidRequest, ModelNotFound
from paceline.engine import prompt_lookup
from paceline.transport.rpc_faults import abort
from paceline.transport.wire import propose_pb2 as wire
from paceline.transport.wire.propose_pb2_grpc import ProposerServiceServicer

NGRAM = "ngram"
"""The model id of prompt lookup: every node has it."""
MAX_BLOCK = 256
MAX_COMMITTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft, and what it took."""

    token_ids: tuple[int, ...]
    diffusion_steps: int = 0
    forward_passes: int = 0
    peak_activation_bytes: int = 0


class Proposer(Protocol):
    """Something that drafts."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> Proposal:
        """At most `block_size` tokens that may follow. May block: it is called in a thread."""
        ...


class PromptLookup:
    """`engine.prompt_lookup` as a proposer."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> Proposal:
        """What followed the longest repetition."""
        del num_steps
        return Proposal(prompt_lookup.propose(committed, block_size))


Context = grpc.aio.ServicerContext[Any, Any]


class ProposerServicer(ProposerServiceServicer):
    """Answers members."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = proposers

    async def ProposeBlock(self, request: wire.ProposeBlockRequest, context: Context) -> wire.ProposeBlockResponse:
        proposer = self._proposers.get(request.model_id)
        if proposer is None:
            await abort(context, ModelNotFound(f"{request.model_id[:200]!r} is not loaded here as a proposer"))
        if not 1 <= request.block_size <= MAX_BLOCK or len(request.committed_token_ids) > MAX_COMMITTED:
            await abort(context, InvalidRequest(f"A block of {request.block_size} tokens; 1 to {MAX_BLOCK} are drafted"))
        draft = await asyncio.to_thread(proposer.propose_block, request.committed_token_ids, request.block_size, request.num_steps)
        return wire.ProposeBlockResponse(
            token_ids=draft.token_ids,
            diffusion_steps=draft.diffusion_steps,
            forward_passes=draft.forward_passes,
            peak_activation_bytes=draft.peak_activation_bytes,
        )
