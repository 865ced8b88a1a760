"""A request's stream on whichever node runs it: where one can't go on with it, another one does, from the tokens so far.

Law: the client gets every token once, whichever node drew it. Every node is asked for the same prompt ids and seed. With equal numerics, what follows is what
would have followed; otherwise a notice comes before it. An answer that no node has begun is refused at once where none takes it; one that has begun waits for a node to come back, for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Protocol

from paceline.core.clock import Clock
from paceline.core.errors import (
    FORM_NOT_FOLLOWED,
    NO_MACHINE,
    ExecutorUnavailable,
    FleetError,
    NodeUnreachable,
    PacelineError,
    goes_elsewhere,
)
from paceline.core.following import Following, Holding
from paceline.core.generation import NUMERICS_CHANGED, FinishReason, GenerationChunk, GenerationRequest, Notice
from paceline.core.ids import NodeId, RequestId
from paceline.core.inference import ChunkStream
from paceline.ways.forward.routes import RouteStop

PATIENCE_S = 30.0
"""How long an answer that has begun waits for a node that goes on with it. Raising it: one whose last node is gone for good ends later."""
LOADING_S = 300.0
"""And how long where one that it lost runs anew and has the model, which takes as long to load as it is large. Raising it: an answer whose node came
back without the model ends later."""
_FINAL: Final = frozenset({None, FORM_NOT_FOLLOWED})
"""Codes of endings that would be the same at every node."""
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""Before all nodes are asked again; doubled each time."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of an answer's way: one node runs it. Its stream is not opened yet."""

    stop: RouteStop
    stream: ChunkStream
    following: Following = Following.SAME
    """How it follows the node that wrote the answer so far."""

    @property
    def node_id(self) -> NodeId:
        return self.stop.node_id


class Nodes(Protocol):
    """Which nodes may run a request, and how to reach them."""

    def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
        """Return a leg at the best node now that is not among those left; None if there is none.

        Args:
            after: the holder that wrote the answer so far; None: it has not begun.
        """
        ...

    def is_coming(self) -> bool:
        """Whether a node that the request left runs anew, and has the model and has not loaded it."""
        ...

    def ended(self, leg: Leg, error: PacelineError | None) -> None:
        """Hear that a request is over at a node, and why it left before its end."""
        ...


class Forwarded:
    """A `ChunkStream` over as many as it takes. Nothing is opened before the first item is asked for."""

    def __init__(
        self,
        request: GenerationRequest,
        nodes: Nodes,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare.

        Args:
            request: with its seed.
            clock: for how long an answer has waited for a node.
        """
        self._request, self._nodes, self._clock, self._sleep = request, nodes, clock, sleep
        self._leg: Leg | None = None
        self._n_legs = 0
        self._so_far: dict[int, list[int]] = {index: [] for index in request.indices}
        """Tokens of the sequences that have not ended."""
        self._scores = dict.fromkeys(request.indices, 0)
        """Log probabilities of the prompt's tokens that the client has, and..."""
        self._heard = dict.fromkeys(request.indices, 0)
        """...that the node which is asked has said: each begins with the first."""
        self._begun = False
        self._after: Holding | None = None
        """The holder that wrote the last tokens."""
        self._holding: Holding | None = None
        """The holder that the leg is at, with the numerics that it has now."""
        self._announces = False
        """The leg's first tokens follow a notice."""
        self._over = False
        self._left: set[NodeId] = set()
        """Nodes that failed since the answer last advanced, or since all were asked."""
        self._trouble: PacelineError | None = None
        """Why it left the last of them."""
        self._refusal: PacelineError | None = None
        """Why it can't begin, as the best of them said."""
        self._until_s = inf
        """When it gives up."""
        self._pause_s = PAUSE_S

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        """What was gained since the last item.

        Raises:
            UnknownModel, ContextOverflow, Overloaded, InvalidRequest: no node takes the request; as the best of them said.
            FleetError: none could be reached, or there is none.
        """
        try:
            while self._so_far and not self._over:
                if self._leg is None and not await self._found_leg():
                    return self._ended()
                if item := await self._gained():
                    return item
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End it on the node that runs it. Idempotent."""
        self._over = True
        await self._hang_up()

    async def _found_leg(self) -> bool:
        """Find a node. False where an answer that has begun waited for one in vain."""
        if self._begun and self._request.chat:  # its engine alone knows the prompt
            return False
        while True:
            request = self._request
            if self._begun:
                so_far = {index: tuple(tokens) for index, tokens in self._so_far.items()}
                request = replace(request, so_far=so_far, draft=None)  # another node may not draft with the same
            if self._n_legs:
                # An engine may be asked again that has not ended the leg before: what it still says of that one is none of this one's.
                request = replace(request, request_id=RequestId(f"{request.request_id}.{self._n_legs}"))
            self._leg = self._nodes.leg(request, self._left, self._after)
            if self._leg is not None:
                self._n_legs += 1
                self._holding = self._leg.stop.holding
                self._announces = self._begun and self._leg.following.is_announced
                self._heard = dict.fromkeys(self._heard, 0)
                return True
            if not self._begun:
                raise self._refusal or NodeUnreachable(
                    "No machine of the fleet has this model loaded any more", "Try again in a few seconds."
                )
            late_s = self._clock.monotonic() - self._until_s
            if late_s >= 0 and not (late_s < LOADING_S - PATIENCE_S and self._nodes.is_coming()):
                return False
            self._left.clear()
            await self._sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _gained(self) -> Sequence[GenerationChunk]:
        """The next item of the node that is asked; empty where the answer leaves it, or it had nothing to say but that it works."""
        leg = self._leg
        assert leg is not None, "a node is asked once one was found"
        try:
            item = await anext(leg.stream)
        except StopAsyncIteration:
            await self._leave(leg, NodeUnreachable(f"{leg.node_id} ended the answer before its end"))
            return ()
        except PacelineError as error:
            if not goes_elsewhere(error):
                raise
            await self._leave(leg, error)
            return ()
        if any(self._lacks_scores(chunk, item) for chunk in item):
            await self._leave(leg, FleetError(f"{leg.node_id} did not send the log probabilities of the prompt"))
            return ()
        for changed in (notice for chunk in item for notice in chunk.notices if notice.kind == NUMERICS_CHANGED):
            if self._request.exact:
                await self._leave(leg, FleetError(f"{leg.node_id} computes other bytes now, and the request is exact"))
                return ()
            self._holding = replace(leg.stop.holding, numerics_id=str(changed.detail.get("to", "")))
        lost = next((chunk for chunk in item if chunk.code not in _FINAL), None)
        told = self._numerics_changed(leg, item)
        gained = [self._unsaid(chunk) for chunk in item if chunk.code in _FINAL and self._takes(chunk)]
        if self._n_legs > 1:
            gained = [replace(chunk, request_id=self._request.request_id) for chunk in gained]
        if lost is not None:
            why = ExecutorUnavailable(lost.error or "The machines it takes are not there", code=lost.code or "")
            await self._leave(leg, why)
        return [*told, *gained]

    def _numerics_changed(self, leg: Leg, item: Sequence[GenerationChunk]) -> list[GenerationChunk]:
        """Return the notices that come before an item, if it is the first in which another holder continues the answer."""
        if not any(chunk.code in _FINAL and not chunk.notices and chunk.index in self._so_far for chunk in item):
            return []
        before, after, announces = self._after, self._holding, self._announces
        self._after, self._announces = after, False
        if before is None or after is None or not announces:
            return []
        detail: dict[str, str | int | float] = {"node": leg.node_id, "from": before.numerics_id, "to": after.numerics_id}
        detail["matched_by"] = leg.following.value
        if leg.stop.engine is not None and leg.stop.engine.plain_http:
            detail["plain_http"] = True
        return [
            GenerationChunk(
                *(self._request.request_id, index, (), ""),
                notices=(Notice(NUMERICS_CHANGED, {**detail, "index": index, "n_tokens": len(tokens)}),),
            )
            for index, tokens in self._so_far.items()
        ]

    def _takes(self, chunk: GenerationChunk) -> bool:
        """Take note of a chunk. What comes after a sequence's end is nothing to it."""
        if chunk.notices:
            return True
        if chunk.index not in self._so_far:
            return False
        self._begun = True
        self._left.clear()
        self._until_s, self._pause_s = inf, PAUSE_S
        self._so_far[chunk.index] += chunk.token_ids
        if chunk.finish_reason is not None:
            del self._so_far[chunk.index]
        return True

    def _lacks_scores(self, chunk: GenerationChunk, item: Sequence[GenerationChunk]) -> bool:
        """Whether the answer goes on, or ends, before all was said of its prompt."""
        if not self._request.scores_prompt or chunk.error is not None or not (chunk.token_ids or chunk.finish_reason):
            return False
        now = sum(len(one.prompt_logprobs) for one in item if one.index == chunk.index)
        return self._heard.get(chunk.index, 0) + now < len(self._request.prompt_ids) - 1

    def _unsaid(self, chunk: GenerationChunk) -> GenerationChunk:
        """A chunk without what a node before said of the prompt's tokens."""
        if not chunk.prompt_logprobs:
            return chunk
        known = self._scores[chunk.index] - self._heard[chunk.index]
        self._heard[chunk.index] += len(chunk.prompt_logprobs)
        self._scores[chunk.index] = max(self._scores[chunk.index], self._heard[chunk.index])
        return replace(chunk, prompt_logprobs=chunk.prompt_logprobs[max(known, 0) :])

    async def _leave(self, leg: Leg, error: PacelineError) -> None:
        """Give up on a node."""
        self._left.add(leg.node_id)
        self._trouble = error
        # What the best node says is what the client should hear, unless it said nothing.
        if self._refusal is None or isinstance(self._refusal, FleetError):
            self._refusal = error
        self._until_s = min(self._until_s, self._clock.monotonic() + PATIENCE_S)
        await self._hang_up(error)

    async def _hang_up(self, error: PacelineError | None = None) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            self._nodes.ended(leg, error)
            await leg.stream.aclose()

    def _ended(self) -> Sequence[GenerationChunk]:
        """The end of an answer that can't go on."""
        self._over = True
        code = getattr(self._trouble, "code", NO_MACHINE)
        why = f"No machine goes on with this answer. The last one: {self._trouble}"
        id_, reason = self._request.request_id, FinishReason.ERROR
        return [GenerationChunk(id_, index, (), "", finish_reason=reason, error=why, code=code) for index in self._so_far]
