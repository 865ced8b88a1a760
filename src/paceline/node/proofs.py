"""What this node has seen of the nodes that answer for it: how fast they are, and whether their answers are the model's.

Law: what another node claims counts as far as this one has seen it. Where this node has the model itself, one that is not proved counts as no faster
than this one; where both must give the same bytes, some of its answers are computed again here, and one that differs gets no more requests.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.background import in_background
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import MayAnswer
from paceline.node.fleet_routes import WORTH_A_HOP, Stop, Weights
from paceline.server.inference import ChunkStream

logger = logging.getLogger(__name__)

CHECK_EVERY = 16
"""One answer of so many is computed again. Raising it: a node that lies is found later; lowering it: this machine works more."""
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

Who = tuple[NodeId, bytes, str, str]
"""A process, and the model that it runs: node, instance, digest, format."""


@dataclass(slots=True)
class Seen:
    """Speeds of one node with one model, tokens/s."""

    decode: deque[float] = field(default_factory=lambda: deque(maxlen=BEST_OF))
    prefill: deque[float] = field(default_factory=lambda: deque(maxlen=BEST_OF))


class Proofs:
    """One node's.

    Args:
        changed: told when what was seen changes routes.
        draw: numbers in [0, 1), for which answers are checked.
    """

    def __init__(self, clock: Clock, changed: Callable[[], None], draw: Callable[[], float] = random.random) -> None:
        self._clock, self._changed, self._draw = clock, changed, draw
        self._seen: dict[Who, Seen] = {}
        self._tried: dict[Who, float] = {}
        """When each answered, or was asked for a proof, last."""
        self._liars: set[Who] = set()
        self._under_way: Counter[Who] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def as_seen(self, answerers: MayAnswer) -> MayAnswer:
        """The cards, with claims as far as this node has seen them, and without nodes whose answers were wrong."""
        own = _own_offers(answerers)
        there = {who for card in answerers.cards for offer in card.models if (who := _who(card, offer)) is not None}
        for known in (self._seen, self._tried):
            for gone in known.keys() - there:
                del known[gone]
        self._liars &= there

        def offers(card: NodeCard) -> tuple[ModelOffer, ...]:
            sound = (offer for offer in card.models if _who(card, offer) not in self._liars)
            return tuple(self._believed(card, offer, own.get((offer.digest, offer.weights))) for offer in sound)

        return replace(
            answerers,
            cards=tuple(card if card.node_id == answerers.own else replace(card, models=offers(card)) for card in answerers.cards),
        )

    def to_prove(self, answerers: MayAnswer) -> list[tuple[Stop, ModelOffer]]:
        """Nodes that claim to be worth a hop from this one, which has their model, and have not proved it lately."""
        own, now = _own_offers(answerers), self._clock.monotonic()
        found: list[tuple[Stop, ModelOffer]] = []
        for card in answerers.cards:
            for offer in card.models:
                who, mine = _who(card, offer), own.get((offer.digest, offer.weights))
                if card.node_id == answerers.own or who is None or mine is None or who in self._liars:
                    continue
                believed = self._believed(card, offer, mine)
                if offer.tokens_per_second <= max(WORTH_A_HOP * mine.tokens_per_second, believed.tokens_per_second):
                    continue
                if who not in self._tried or now - self._tried[who] > AGAIN_S:
                    self._tried[who] = now
                    found.append((Stop(card.node_id, card.instance, offer.numerics_id, card.addresses), offer))
        return found

    def watched(self, stop: Stop, weights: Weights, stream: ChunkStream, request: GenerationRequest, again: Again | None) -> Watched:
        """A stream of another node, measured as it goes on.

        Args:
            again: computes the same request here; None: this node can't.
        """
        return Watched(self, (stop.node_id, stop.instance, weights.digest, weights.format), stream, request, again)

    async def _prove(self, stop: Stop, offer: ModelOffer, stream: ChunkStream, request: GenerationRequest, again: Again | None) -> None:
        watched = self.watched(stop, Weights(offer.digest, offer.weights), stream, request, again)
        try:
            async with aclosing(watched):
                async for _ in watched:
                    pass
            await watched.check()
        except PacelineError as error:
            logger.info("%s did not show how fast it runs %s: %s", stop.node_id, offer.model_id, error)

    def now(self) -> float:
        return self._clock.monotonic()

    def began(self, who: Who) -> bool:
        """A stream begins; whether it is the only one from here."""
        self._under_way[who] += 1
        return self._under_way[who] == 1

    def ended(self, who: Who) -> None:
        """It is over."""
        self._under_way[who] -= 1
        if self._under_way[who] <= 0:
            del self._under_way[who]

    def alone(self, who: Who) -> bool:
        """Whether a stream is still the only one."""
        return self._under_way[who] <= 1

    def note(self, who: Who, decode: float, prefill: float | None) -> None:
        """Note the speeds of an answer, tokens/s."""
        seen = self._seen.setdefault(who, Seen())
        before = max(seen.decode, default=0.0)
        seen.decode.append(decode)
        if prefill is not None:
            seen.prefill.append(prefill)
        self._tried[who] = self._clock.monotonic()
        if abs(max(seen.decode) - before) > NOISE * before:
            self._changed()

    def due(self) -> bool:
        """Whether the answer that just ended is to be computed again."""
        return self._draw() * CHECK_EVERY < 1

    def check_later(self, watched: Watched) -> None:
        """Compute an answer again beside requests."""

        async def check() -> None:
            try:
                await watched.check()
            except PacelineError as error:
                logger.debug("an answer is not compared: %s", error)

        self._spawn(check())

    def prove_later(self, stop: Stop, offer: ModelOffer, stream: ChunkStream, request: GenerationRequest, again: Again | None) -> None:
        """See how fast a node answers, and whether rightly, beside requests."""
        self._spawn(self._prove(stop, offer, stream, request, again))

    async def close(self) -> None:
        """End what runs beside requests. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = in_background(work, "answer-proof")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lied(self, who: Who) -> None:
        """An answer was not the model's."""
        logger.error(
            "%s gave other tokens for a request than this machine computes, with the same model and numerics: it gets no more requests until it"
            " is started again",
            who[0],
        )
        self._liars.add(who)
        self._changed()

    def _believed(self, card: NodeCard, offer: ModelOffer, own: ModelOffer | None) -> ModelOffer:
        who = _who(card, offer)
        if who is None:
            return offer
        seen = self._seen.get(who)
        if seen is None and own is None:
            return offer
        if seen is not None:
            decode = max(seen.decode)
        else:
            assert own is not None, "one of both is known"
            decode = own.tokens_per_second
        decode = min(offer.tokens_per_second or decode, decode)
        if seen is not None and seen.prefill:
            prefill = max(seen.prefill)
        elif own is not None:
            prefill = own.prefill_tokens_per_second * max(1.0, decode / max(own.tokens_per_second, 1e-9))
        else:
            prefill = offer.prefill_tokens_per_second * decode / max(offer.tokens_per_second, decode)
        prefill = min(offer.prefill_tokens_per_second or prefill, prefill)
        return replace(offer, tokens_per_second=decode, prefill_tokens_per_second=prefill)


Again = Callable[[GenerationRequest], ChunkStream]


class Watched:
    """A `ChunkStream` that passes on another's, and takes note of it."""

    def __init__(self, proofs: Proofs, who: Who, stream: ChunkStream, request: GenerationRequest, again: Again | None) -> None:
        self._proofs, self._who, self._stream, self._request, self._again = proofs, who, stream, request, again
        self._tokens: dict[int, list[int]] = {index: [] for index in request.indices}
        self._unended = set(request.indices)
        self._began_s: float | None = None
        self._first_s = self._last_s = 0.0
        self._first = self._later = 0
        """Tokens of the first item, and of those behind it."""
        self._alone = True
        self._over = False

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        """As the stream's own."""
        proofs = self._proofs
        if self._began_s is None:
            self._began_s, self._alone = proofs.now(), proofs.began(self._who)
        item = await anext(self._stream)
        gained = sum(len(chunk.token_ids) for chunk in item)
        if gained:
            self._last_s = proofs.now()
            self._alone = self._alone and proofs.alone(self._who)
            if self._first:
                self._later += gained
            else:
                self._first, self._first_s = gained, self._last_s
        for chunk in item:
            if chunk.index in self._tokens:
                self._tokens[chunk.index] += chunk.token_ids
            if chunk.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                self._unended.discard(chunk.index)
        return item

    async def aclose(self) -> None:
        """End it there too. Idempotent."""
        if self._began_s is not None and not self._over:
            self._over = True
            self._proofs.ended(self._who)
            took_s, sequences = self._last_s - self._first_s, len(self._tokens)
            if self._alone and took_s > 0 and self._later >= LEAST_TOKENS * sequences:
                ids = len(self._request.prompt_ids)
                first_s = self._first_s - self._began_s
                prefill = ids / first_s if ids >= LONG_PROMPT and first_s > 0 and not self._request.so_far else None
                self._proofs.note(self._who, self._later / sequences / took_s, prefill)
            if self._again is not None and not self._unended and self._proofs.due():
                self._proofs.check_later(self)
        await self._stream.aclose()

    async def check(self) -> None:
        """Compute it again here, and compare.

        Raises:
            PacelineError: this machine can't now.
        """
        if self._again is None or self._unended:
            return
        tokens: dict[int, list[int]] = {index: [] for index in self._tokens}
        async with aclosing(self._again(replace(self._request, request_id=RequestId(f"{self._request.request_id}-again")))) as stream:
            async for item in stream:
                for chunk in item:
                    if chunk.finish_reason is FinishReason.ERROR:
                        return
                    tokens[chunk.index] += chunk.token_ids
        if tokens != self._tokens:
            self._proofs.lied(self._who)


def probe(prompt_ids: Sequence[int]) -> GenerationRequest:
    """A short request whose answer proves a node's speed, and whose right answer this node can compute."""
    sampling = SamplingParams(temperature=0.0, seed=0)
    return GenerationRequest(RequestId("proof"), tuple(prompt_ids), PROBE_TOKENS, sampling=sampling, ignore_eos=True)


def _own_offers(answerers: MayAnswer) -> dict[tuple[str, str], ModelOffer]:
    own = (card for card in answerers.cards if card.node_id == answerers.own)
    return {(offer.digest, offer.weights): offer for card in own for offer in card.models if _who(card, offer) is not None}


def _who(card: NodeCard, offer: ModelOffer) -> Who | None:
    whole = offer.role is Role.VERIFIER and offer.warm and offer.digest
    return (card.node_id, card.instance, offer.digest, offer.weights) if whole else None
