"""Requests that a router outside of the fleet sends to two nodes: the prompt's, here, is matched with the registration of the node that writes the answer;
the answer's, here, has its prompt's KV from the node that the router named.

Law: on the event loop. Prompts are pinned for as long as `legs` says, within a share of the pool, and are ordinary cache after that. What does not come from
there is computed here, counted, and told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Final

from paceline.core.errors import InvalidRequest
from paceline.core.generation import KV_TRANSFER, FinishReason, GenerationChunk, GenerationRequest, KvLeg, Notice
from paceline.core.ids import NodeId
from paceline.core.inference import ChunkStream
from paceline.core.stats import Metrics, Row, counter, gauge
from paceline.engine.kv_source import KvLoan
from paceline.engine.prefix_cache import prompt_keys, root_key, salted_key
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import MayShareKv, Use
from paceline.fleet.machines import live_cards
from paceline.machine.settings import PrefillRole
from paceline.net.member.node import FleetNode
from paceline.net.wire import kv_pb2 as wire
from paceline.ways.kv.fetching import KvPeer, PromptPush
from paceline.ways.kv.lease import KvLease, KvLeases, LeaseEnd
from paceline.ways.kv.legs import AwaitedPrompt, LegEnd, LegTables, RoutedPrompt
from paceline.ways.kv.prefilling import Prefilling, Registration
from paceline.ways.kv.price import UNPRICED
from paceline.ways.kv.pushing import TP_SIZE, PushEnd
from paceline.ways.kv.source import PeerKv
from paceline.ways.kv.staged import BlockSender

logger = logging.getLogger(__name__)

TELL_S: Final = 5.0
"""For how an answer's prompt came to be known, at the answer's end."""
Chunks = Sequence[GenerationChunk]


class EngineLegs:
    """Prompts that routers have computed on one engine, and the nodes that wait for them."""

    def __init__(self, kv: PeerKv, counted: Callable[[LegEnd], None]) -> None:
        self._kv, self._counted = kv, counted
        self.tables = LegTables()
        self._closed = False
        self._pinned: dict[RoutedPrompt, tuple[int, Future[KvLoan] | None]] = {}
        """Of each prompt that did not end, how many blocks are held, and the loan that holds them."""
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request_id: str, keys: Sequence[bytes]) -> RoutedPrompt:
        """A prompt's request came; its blocks are held once they stand."""
        prompt, _ = self.tables.begin(request_id, keys)
        pinned = sum(held for one, (held, _) in self._pinned.items() if one.ended is None)
        room = 0 if self._closed else max(0, self._kv.most_held - pinned)
        # The last of them comes last: the loan is of all that are here by then.
        held = prompt.keys[:room][::-1]
        self._pinned[prompt] = len(held), self._kv.loans.ask(held, when_computed=True) if held else None
        self._change()
        return prompt

    def computed(self, prompt: RoutedPrompt) -> None:
        """All its blocks stand."""
        self.tables.computed(prompt, asyncio.get_running_loop().time())
        self._change()

    def left(self, prompt: RoutedPrompt) -> None:
        """Its request is over."""
        if not prompt.is_computed:
            self.tables.end(prompt, LegEnd.LEFT)
        self._change()

    def register(self, lease: KvLease, request_id: str, keys: Sequence[bytes]) -> AwaitedPrompt:
        """A node waits for a prompt."""
        one = self.tables.register(lease.holder, request_id, keys, asyncio.get_running_loop().time())
        self._change()
        return one

    def leave(self, one: AwaitedPrompt, *, has_all: bool) -> None:
        """It waits no more."""
        self.tables.leave(one, has_all=has_all)
        self._change()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so, by what the tables say."""
        while not condition():
            await self._changed.wait()

    def close(self) -> None:
        """The engine is gone: what is here ends, and what comes later ends at once."""
        self._closed = True
        self._change()

    def _change(self) -> None:
        """Let go of what ended, wake who waits, and look again when the next wait is over."""
        loop = asyncio.get_running_loop()
        self.tables.expire(loop.time())
        if self._closed:
            self.tables.clear()
        for prompt in [prompt for prompt in self._pinned if prompt.ended is not None]:
            _, loan = self._pinned.pop(prompt)
            if loan is not None:
                self._kv.loans.leave(loan)
            assert prompt.ended is not None, "it was looked at"
            self._counted(prompt.ended)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._timer is not None:
            self._timer.cancel()
        next_s = self.tables.next_s()
        self._timer = None if next_s == inf else loop.call_at(next_s, self._change)


class RoutedPrefilling(Prefilling):
    """One prompt, for one caller, that a router's request computes."""

    def __init__(
        self, kv: PeerKv, registration: Registration, lease: KvLease, open_sender: Callable[[], BlockSender], legs: EngineLegs
    ) -> None:
        super().__init__(kv, registration, lease, open_sender)
        self._legs = legs
        self._awaited = legs.register(lease, registration.remote_request_id or registration.request_id, registration.keys)

    async def run(self, requests: AsyncIterator[wire.PrefillRequest], context: Any, threads: Executor, leases: KvLeases) -> None:
        """See `Prefilling.run`."""
        try:
            await super().run(requests, context, threads, leases)
        finally:
            self._legs.leave(self._awaited, has_all=self.lease.ended is LeaseEnd.WHOLE)

    async def _known(self) -> None:
        await self._legs.until(lambda: self._awaited.is_over)
        if self._awaited.prompt is None:
            self.lease.end(LeaseEnd.UNMATCHED)

    async def _compute(self) -> None:
        await self._known()
        if (prompt := self._awaited.prompt) is not None:
            await self._legs.until(lambda: prompt.is_computed or prompt.ended is not None)
            self.is_computed = True
            if not prompt.is_computed:
                self.lease.end(LeaseEnd.NOT_COMPUTED)


class KvLegs:
    """Of one node.

    Args:
        models: what runs here.
        pushes: counts how prompts ended that others were to compute.
        is_resting: whether the node of a card is to be asked for nothing now.
    """

    def __init__(
        self, fleet: FleetNode, models: Callable[[], Sequence[PeerKv]], pushes: Counter[str], is_resting: Callable[[NodeCard], bool]
    ) -> None:
        self._fleet, self._models, self._pushes, self._is_resting = fleet, models, pushes, is_resting
        self._engines: dict[PeerKv, EngineLegs] = {}
        self.ended = Counter[str]()
        """Prompts that routers had computed here, by how they ended."""
        self.metrics = Metrics(LEG_ROWS, lambda: self)

    @property
    def node_id(self) -> NodeId:
        return self._fleet.node_id

    def of(self, kv: PeerKv) -> EngineLegs:
        """Of one engine. Of one that is gone: closed."""
        if kv in self._engines:
            return self._engines[kv]
        made = EngineLegs(kv, lambda why: self.ended.update((why,)))
        if kv in self._models():
            self._engines[kv] = made
        else:
            made.close()
        return made

    def forget(self, kv: PeerKv) -> None:
        """Its engine is gone."""
        if kv in self._engines:
            self._engines.pop(kv).close()

    def waiting(self) -> Mapping[str, int]:
        """Prompts that wait for a node, or are computed, and nodes that wait for a prompt."""
        tables = [legs.tables for legs in self._engines.values()]
        return {"prompts": sum(len(one.prompts) for one in tables), "nodes": sum(len(one.awaited) for one in tables)}

    def stream(self, digest: str, numerics_id: str, request: GenerationRequest) -> ChunkStream:
        """Run a leg.

        Raises:
            InvalidRequest: it can't be run here.
        """
        leg = request.leg
        assert leg is not None, "it is one"
        kv = next((kv for kv in self._models() if (kv.digest, kv.numerics_id) == (digest, numerics_id)), None)
        if kv is None or kv.compute is None:
            raise InvalidRequest(
                "kv_transfer_params: this machine does not run the model alone, or shares no KV of it", field="kv_transfer_params"
            )
        run = partial(kv.compute, replace(request, leg=None))
        if not leg.is_prefill:
            return self._written(kv, request, leg, run)
        if not kv.prefills:
            raise InvalidRequest("kv_transfer_params: this machine computes no prompts for others (its role)", field="kv_transfer_params")
        if request.scores_prompt:
            raise InvalidRequest("kv_transfer_params: a prompt with log probabilities can't be computed for another machine", field="echo")
        return self._computed(kv, request, leg, run)

    async def _computed(self, kv: PeerKv, request: GenerationRequest, leg: KvLeg, run: Callable[[], ChunkStream]) -> AsyncGenerator[Chunks]:
        """A prefill leg."""
        root, whole = (
            salted_key(root_key(kv.numerics_id, kv.digest), "", request.cache_salt),
            (len(request.prompt_ids) - 1) // kv.block_tokens,
        )
        keys = await asyncio.to_thread(prompt_keys, root, request.prompt_ids[: whole * kv.block_tokens], kv.block_tokens)
        legs = self.of(kv)
        prompt, running = legs.begin(leg.request_id, keys), set(request.indices)
        try:
            async with aclosing(run()) as stream:
                async for chunks in stream:
                    running -= _ended(chunks)
                    if not running:
                        legs.computed(prompt)
                    yield chunks if running else _with_transfer(chunks, self._told_of(leg))
        finally:
            legs.left(prompt)

    async def _written(self, kv: PeerKv, request: GenerationRequest, leg: KvLeg, run: Callable[[], ChunkStream]) -> AsyncGenerator[Chunks]:
        """A decode leg."""
        known: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        peer = self._peer(kv, leg)
        if isinstance(peer, PushEnd):
            self._pushes[peer] += 1
            known.set_result((peer, 0))
        else:
            kv.routed[request.request_id] = (
                peer,
                PromptPush(leg.request_id, leg=leg, ended=lambda *end: known.done() or known.set_result(end)),
            )
        told, running = False, set(request.indices)
        try:
            async with aclosing(run()) as stream:
                async for chunks in stream:
                    if kv.routed.pop(request.request_id, None) is not None:
                        self._pushes[PushEnd.UNASKED] += 1
                        known.set_result((PushEnd.UNASKED, 0))
                    running -= _ended(chunks)
                    if not running:
                        await asyncio.wait({known}, timeout=TELL_S)
                    if known.done() and not told:
                        told = True
                        yield [
                            GenerationChunk(request.request_id, 0, (), "", notices=(Notice(KV_TRANSFER, _detail(leg, *known.result())),))
                        ]
                    yield chunks if running or not told else _with_transfer(chunks, _detail(leg, *known.result()))
        finally:
            kv.routed.pop(request.request_id, None)

    def _peer(self, kv: PeerKv, leg: KvLeg) -> KvPeer | PushEnd:
        """The node that a leg names; or why it is not asked."""
        sharers: MayShareKv = self._fleet.eligible(Use.SHARE_KV)
        card = next(
            (card for card in live_cards(sharers.cards).values() if leg.engine_id == card.node_id or leg.address in card.addresses), None
        )
        if kv.role is PrefillRole.PREFILL or (card is not None and card.node_id == sharers.own):
            return PushEnd.UNASKED
        if card is None or self._is_resting(card):
            logger.info("a router's prompt is computed here: %s can't be asked for it", leg.engine_id or leg.address)
            return PushEnd.HANDSHAKE_FAILED
        return KvPeer(card.node_id, card.instance, card.addresses, frozenset(), UNPRICED)

    def _told_of(self, leg: KvLeg) -> Mapping[str, object]:
        """What a router hands to the node that writes the answer, as vLLM calls it."""
        host, _, port = self._fleet.addresses[0].rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._fleet.node_id,
            "remote_host": host,
            "remote_port": int(port),
            "remote_request_id": leg.request_id,
            "tp_size": TP_SIZE,
        }


def _ended(chunks: Chunks) -> set[int]:
    """Sequences whose answers are whole."""
    return {chunk.index for chunk in chunks if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)}


def _with_transfer(chunks: Chunks, transfer: Mapping[str, object]) -> Chunks:
    return [*chunks[:-1], replace(chunks[-1], transfer=transfer)]


def _detail(leg: KvLeg, outcome: str, n_blocks: int) -> dict[str, str | int | float]:
    return {"outcome": str(outcome), "n_blocks": n_blocks, "remote_engine_id": leg.engine_id or leg.address}


# fmt: off
LEG_ROWS: tuple[Row[KvLegs], ...] = (
    counter("paceline_kv_routed_prompts", "Prompts that routers had computed here for other nodes, by how it ended.", lambda legs: dict(legs.ended), "outcome"),
    gauge("paceline_kv_routed_waiting", "Such prompts that are computed, or wait for a node, and nodes that wait for one.", lambda legs: dict(legs.waiting()), "what"),
)
# fmt: on
