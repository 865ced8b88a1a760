"""What this node has seen of the nodes that answer for it: how fast they are, and whether their answers are the model's.

Law: what another node claims counts as far as this one has seen it. Where this node has the model itself, one that is not proved counts as no faster
than this one; where both must give the same bytes, some of its answers are computed again here, and a node whose answer differs is left out.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any
from uuid import uuid4

from paceline.core.background import TaskSet, end_tasks, in_background
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.generation import NUMERICS_CHANGED, FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.core.inference import ChunkStream
from paceline.core.model import ModelRef
from paceline.fleet.card import ModelOffer, NodeCard
from paceline.fleet.eligibility import MayAnswer
from paceline.fleet.plan import WORTH_A_HOP
from paceline.ways.forward.routes import RouteStop

logger = logging.getLogger(__name__)

CHECK_EVERY = 16
"""One answer of so many is computed again. Raising it: wrong answers are found later; lowering it: this machine works more."""
LEAST_TOKENS = 8
"""Of an answer whose speed counts, and the first one does not."""
LONG_PROMPT = 256
"""Tokens of a prompt whose speed counts."""
BEST_OF = 8
"""Answers of which the fastest counts: others may have been slowed by load, or by a client."""
NOISE = 0.1
"""By what part a speed must differ for routes to be planned again."""
AGAIN_S = 600.0
"""Until a node that claims more than was seen is tried again. Raising it: a machine that was busy then gets no requests for longer."""
PROBE = "Count from one to one hundred: one, two, three,"
PROBE_TOKENS = 16

Again = Callable[[GenerationRequest], ChunkStream]
"""Computes a request here."""
Process = tuple[NodeId, bytes, ModelRef]
"""A process, and the model that it runs: node, instance, model."""


@dataclass(slots=True, eq=False)
class Record:
    """What was seen of a process with a model."""

    decode: deque[float] = field(default_factory=lambda: deque(maxlen=BEST_OF))
    prefill: deque[float] = field(default_factory=lambda: deque(maxlen=BEST_OF))
    """Tokens/s of its last answers."""
    tried_s: float = -inf
    """When it answered, or was asked for a proof, last."""
    streams: int = 0
    """Under way from here."""


class Proofs:
    """One node's.

    Args:
        changed: told when what was seen changes routes.
        found_wrong: told which node gave an answer that is not the model's, and in words.
        draw: numbers in [0, 1), for which answers are checked.
    """

    def __init__(
        self,
        clock: Clock,
        changed: Callable[[], None],
        found_wrong: Callable[[NodeId, str], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._clock, self._changed, self._found_wrong, self._draw = clock, changed, found_wrong, draw
        self._records: dict[Process, Record] = {}
        self._tasks = TaskSet()

    def as_seen(self, answerers: MayAnswer) -> MayAnswer:
        """Return the cards, with claims as far as this node has seen them."""
        own = _own_offers(answerers)
        there = {process for card in answerers.cards for offer in card.models if (process := _process(card, offer)) is not None}
        self._records = {process: record for process, record in self._records.items() if process in there}

        def seen(card: NodeCard) -> NodeCard:
            if card.node_id == answerers.own:
                return card
            return replace(card, models=tuple(self._believed(card, offer, own) for offer in card.models))

        return replace(answerers, cards=tuple(map(seen, answerers.cards)))

    def to_prove(self, answerers: MayAnswer) -> list[tuple[RouteStop, ModelOffer]]:
        """Nodes that claim to be worth a hop from this one, which has their model, and have not proved it lately."""
        own, now = _own_offers(answerers), self._clock.monotonic()
        found: list[tuple[RouteStop, ModelOffer]] = []
        for card in answerers.cards:
            for offer in card.models if card.node_id != answerers.own else ():
                process, mine, believed = _process(card, offer), own.get(offer.model), self._believed(card, offer, own)
                if process is None or mine is None or offer.engine is not None:
                    continue  # an engine of another maker is not made to work for a measurement: its own requests measure it
                if offer.tokens_per_second <= max(WORTH_A_HOP * mine.tokens_per_second, believed.tokens_per_second):
                    continue
                record = self._records.setdefault(process, Record())
                if now - record.tried_s > AGAIN_S:
                    record.tried_s = now
                    found.append((RouteStop(card.node_id, card.instance, offer.numerics_id, card.addresses, model=offer.model), offer))
        return found

    async def watched(
        self,
        stop: RouteStop,
        model: ModelRef,
        stream: ChunkStream,
        request: GenerationRequest,
        again: Again | None,
        share: float = 1 / CHECK_EVERY,
    ) -> AsyncGenerator[Sequence[GenerationChunk]]:
        """A stream of another node, passed on as it comes and measured; some are then computed again.

        Args:
            again: None: this node can't compute the request, or not with the same bytes.
            share: of answers that are computed again.
        """
        process = (stop.node_id, stop.instance, model)
        record = self._records.setdefault(process, Record())
        record.streams += 1
        alone = record.streams == 1
        tokens: dict[int, list[int]] = {index: [] for index in request.indices}
        ends: dict[int, FinishReason] = {}
        counts: list[int] = []
        began_s, times = self._clock.monotonic(), list[float]()
        try:
            async with aclosing(stream):
                async for item in stream:
                    if gained := sum(len(chunk.token_ids) for chunk in item):
                        counts.append(gained)
                        times.append(self._clock.monotonic())
                        alone = alone and record.streams == 1
                    for chunk in item:
                        if any(notice.kind == NUMERICS_CHANGED for notice in chunk.notices):
                            again = None  # it said itself that its bytes are others from here on
                        if chunk.index in tokens:
                            tokens[chunk.index] += chunk.token_ids
                            if chunk.finish_reason is not None:
                                ends[chunk.index] = chunk.finish_reason
                    yield item
        finally:
            record.streams -= 1
            later = sum(counts[1:]) / len(tokens)
            if alone and later >= LEAST_TOKENS and times[-1] > times[0]:
                ids, first_s = len(request.prompt_ids), times[0] - began_s
                prefill = [ids / first_s] if ids >= LONG_PROMPT and first_s > 0 and not request.so_far else []
                self._note(record, later / (times[-1] - times[0]), prefill)
            is_whole = ends.keys() == tokens.keys() and {FinishReason.STOP, FinishReason.LENGTH}.issuperset(ends.values())
            if again is not None and is_whole and self._draw() < share:
                self._beside(self._compare(stop.node_id, request, tokens, ends, again))

    def prove(self, stop: RouteStop, offer: ModelOffer, stream: ChunkStream, request: GenerationRequest, again: Again | None) -> None:
        """See how fast a node answers, and whether rightly, beside requests."""

        async def run() -> None:
            async with aclosing(self.watched(stop, offer.model, stream, request, again, share=1.0)) as items:
                async for _ in items:
                    pass

        self._beside(run())

    async def close(self) -> None:
        """End what runs beside requests. Idempotent."""
        await end_tasks(*self._tasks)

    def _believed(self, card: NodeCard, offer: ModelOffer, own: Mapping[ModelRef, ModelOffer]) -> ModelOffer:
        """Return what an offer is worth here."""
        process, mine = _process(card, offer), own.get(offer.model)
        if process is None:
            return offer
        seen = self._records.get(process, Record())
        claimed, claimed_prefill = offer.tokens_per_second, offer.prefill_tokens_per_second
        if seen.decode:
            decode = max(seen.decode)
        elif mine is not None:
            decode = mine.tokens_per_second
        else:
            return offer
        decode = min(claimed or decode, decode)
        if seen.prefill:
            prefill = max(seen.prefill)
        elif mine is not None:
            prefill = mine.prefill_tokens_per_second * max(1.0, decode / max(mine.tokens_per_second, 1e-9))
        else:
            prefill = claimed_prefill * decode / max(claimed, decode)
        return replace(offer, tokens_per_second=decode, prefill_tokens_per_second=min(claimed_prefill or prefill, prefill))

    def _note(self, record: Record, decode: float, prefill: Sequence[float]) -> None:
        """Note the speeds of an answer, tokens/s."""
        before = max(record.decode, default=0.0)
        record.decode.append(decode)
        record.prefill.extend(prefill)
        record.tried_s = self._clock.monotonic()
        if abs(max(record.decode) - before) > NOISE * before:
            self._changed()

    async def _compare(
        self,
        node_id: NodeId,
        request: GenerationRequest,
        tokens: Mapping[int, Sequence[int]],
        ends: dict[int, FinishReason],
        again: Again,
    ) -> None:
        """Compute an answer here. A node whose tokens differ is left out; one whose context is of another length may end elsewhere."""
        own: dict[int, list[int]] = {index: [] for index in tokens}
        async with aclosing(again(replace(request, request_id=RequestId(f"{request.request_id}-again")))) as stream:
            async for item in stream:
                for chunk in item:
                    if chunk.finish_reason is FinishReason.ERROR:
                        return
                    own[chunk.index] += chunk.token_ids
                    if chunk.finish_reason is FinishReason.LENGTH:
                        ends[chunk.index] = FinishReason.LENGTH
        both = {index: min(len(own[index]), len(tokens[index])) if ends[index] is FinishReason.LENGTH else None for index in tokens}
        if any(own[index][: both[index]] != tokens[index][: both[index]] for index in tokens):
            why = f"{node_id} gave other tokens for a request than this machine computes, with the same model and numerics"
            self._found_wrong(node_id, why)

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except PacelineError as error:
                logger.info("an answer of another node is not proved: %s", error)

        self._tasks.hold(in_background(run(), "answer-proof"))


def probe(prompt_ids: Sequence[int]) -> GenerationRequest:
    """A short request whose answer proves a node's speed, and whose right answer this node can compute."""
    sampling = SamplingParams(temperature=0.0, seed=0)
    return GenerationRequest(RequestId(f"proof-{uuid4().hex}"), tuple(prompt_ids), PROBE_TOKENS, sampling=sampling, ignore_eos=True)


def _own_offers(answerers: MayAnswer) -> dict[ModelRef, ModelOffer]:
    own = (card for card in answerers.cards if card.node_id == answerers.own)
    return {offer.model: offer for card in own for offer in card.models if _process(card, offer) is not None}


def _process(card: NodeCard, offer: ModelOffer) -> Process | None:
    """None where it does not run whole requests."""
    whole = offer.runs_whole and offer.warm and offer.digest
    return (card.node_id, card.instance, offer.model) if whole else None
