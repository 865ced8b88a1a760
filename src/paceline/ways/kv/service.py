"""A node's KV and that of its peers, put together: who tells what, what it is worth, how blocks are asked for, and what came of it.

Law: all of it happens on the event loop, but for the threads that move blocks. What a peer told is forgotten with the call that told it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

import grpc.aio

from paceline.core.backoff import Backoff, LeftOut
from paceline.core.clock import Clock
from paceline.core.errors import FleetError, NixlFailed, PacelineError, StreamCorrupt
from paceline.core.generation import GenerationRequest
from paceline.core.ids import NodeId
from paceline.core.inference import ChunkStream
from paceline.core.stats import Metrics
from paceline.engine.prefix_cache import prompt_keys, root_key, salted_key
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import MayShareKv, Use
from paceline.fleet.machines import Links, live_cards
from paceline.fleet.messages import Effect
from paceline.machine.settings import PrefillRole
from paceline.net.member.node import FleetNode
from paceline.net.rpc_faults import error_of
from paceline.net.server import Service
from paceline.net.tensor.dialling import dial
from paceline.net.trust.certificates import Member
from paceline.net.trust.guard import PeerGuard
from paceline.net.wire import kv_pb2 as wire
from paceline.net.wire.kv_pb2_grpc import KvServiceStub
from paceline.ways.kv.fetching import OPEN_S, KvPeer, PeerFetch, PushedParts, Receiving, fetch_request, watched
from paceline.ways.kv.giving import KvServicer, kv_service
from paceline.ways.kv.lease import LeaseEnd
from paceline.ways.kv.meter import KV_ROWS, KvMeter
from paceline.ways.kv.moving import StageMoves
from paceline.ways.kv.price import KvPrice, PrefillPrice, answers, marked, offer_at, parted_price, prefill_price, price, run_of
from paceline.ways.kv.pushing import REST_S, WRONG_REST_S, Push, PushEnd, PushInParts, push_rest_s
from paceline.ways.kv.routed import KvLegs
from paceline.ways.kv.source import MOST_FETCHES, MOST_ROUTED_PUSHES, PeerKv
from paceline.ways.kv.staged import BlockSender, NixlOffered, NixlUse, block_sender
from paceline.ways.kv.told import ToldPrefixes, read_told

logger = logging.getLogger(__name__)

MOST_LOOKED_AT: Final = 1 << 14
"""Tokens of a prompt that is to be sent where it lies. Raising it: more of the event loop's time for long prompts."""
MOST_MODELS: Final = 16
"""Of one node, that are watched."""
RETRY_S: Final = 5.0
MOST_RETRY_S: Final = 120.0
"""After a peer told nothing, or no more, it is asked again, each time later."""
LEARNS_FROM: Final = 8
"""Blocks of the shortest fetch that says how fast blocks come."""
SEEN_S: Final = 300.0
"""For which that stands in place of the link's measure. Raising it: a link that was slow for a moment is left aside for longer."""
DIAL_S: Final = 5.0

_Told = tuple[NodeId, str, str]
"""A node, a model's digest, its numerics id."""


class KvSharing:
    """Of one node in a fleet. Made on the event loop."""

    def __init__(self, fleet: FleetNode, clock: Clock) -> None:
        self._fleet, self._clock = fleet, clock
        self._epoch = int(clock.wall() * 1e6)
        """Of the last push. Begins behind those of an earlier start."""
        self._loop = asyncio.get_running_loop()
        self._used: dict[PeerKv, asyncio.Event] = {}
        """Set, and another put in its place, when a model's prefixes change."""
        self._told: dict[_Told, ToldPrefixes] = {}
        self._watches: dict[_Told, asyncio.Task[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(2 * MOST_FETCHES + MOST_ROUTED_PUSHES, "paceline-kv-fetch")
        self._resting: LeftOut[tuple[NodeId, bytes | None], None] = LeftOut()
        """Processes of peers, or with None all of a peer's, that are asked for nothing."""
        self.nixl = NixlUse()
        self._through: dict[NodeId, str] = {}
        """What blocks of each node came through last."""
        self._seen: dict[NodeId, tuple[float, float]] = {}
        """Bytes a second of the last fetch, and when that was."""
        self._said: dict[tuple[NodeId, str, type], bool] = {}
        """Of each peer, model and kind of price, whether it was logged last that it pays."""
        self._prices: dict[_Told, KvPrice] = {}
        self.meter = KvMeter(lambda: self._servicer.n_leases)
        self.metrics = Metrics(KV_ROWS, lambda: self.meter)
        self.legs = KvLegs(fleet, self._whole, self.meter.pushes, lambda card: self._is_resting(card.node_id, card.instance))
        self._servicer = KvServicer(self, self.legs)
        self.moves = StageMoves(fleet, self._threads, partial(self._begin, None), self._is_resting, self.dial, self.given)
        self._guard: PeerGuard | None = None
        self._stale = self._stopped = False
        fleet.listen(self._on_news)

    def service(self, guard: PeerGuard) -> Service:
        """For `FleetNode.start`."""
        self._guard = guard
        return kv_service(self._servicer)

    def attach(self, kv: PeerKv, compute: Callable[[GenerationRequest], ChunkStream] | None = None) -> None:
        """Share the KV of an engine of this node.

        Args:
            compute: runs prompts of others there; None: none are run.
        """
        if kv not in self._used:
            kv.compute = compute
            if kv.nixl:
                self.nixl.start()
            self._used[kv] = asyncio.Event()
            kv.on_checked = lambda liars: self._on_loop(partial(self._checked, kv, liars))
            kv.loans.on_used = partial(self._on_loop, partial(self._changed, kv))
            self._look_soon()

    def keep(self, living: Collection[PeerKv]) -> None:
        """End with the engines that are gone."""
        for kv in [one for one in self._used if one not in living]:
            self._used.pop(kv).set()
            self.legs.forget(kv)

    async def stop(self) -> None:
        """End. Bounded; idempotent."""
        self._stopped = True
        self.keep(())
        tasks = (*self._watches.values(), *self._asking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.nixl.stop()
        self._servicer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def shares(self, digest: str, numerics_id: str, ids: Sequence[int], salt: str) -> Mapping[NodeId, float]:
        """What part of a prompt each node has, as it told. Of this node: what it would save to fetch it."""
        told = {key[0]: said for key, said in self._told.items() if key[1:] == (digest, numerics_id) and said.marks}
        found, own = dict[NodeId, float](), 0.0
        keys: dict[int, list[bytes]] = {}
        for node_id, said in told.items():
            if said.block_tokens not in keys:
                root = salted_key(root_key(numerics_id, digest), "", salt)
                keys[said.block_tokens] = prompt_keys(root, ids[:MOST_LOOKED_AT], said.block_tokens)
            if run := run_of(said.marks, marked(said.marks, keys[said.block_tokens])):
                found[node_id] = run * said.block_tokens / len(ids)
                cost = self._prices.get((node_id, digest, numerics_id))
                if cost is not None:
                    own = max(own, found[node_id] * cost.saved_s(run) / (run * cost.computed_s))
        return {**found, self._fleet.node_id: own} if own else found

    # ------------------------------------------------------------------------------------------------------------ for the servicer

    def admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> Member:
        """See `KvOwner`."""
        assert self._guard is not None, "the service was made"
        member = self._guard.peer(context)
        self._fleet.trust.check(member, Use.SHARE_KV, self._guard.voids)
        return member

    def models(self) -> Sequence[PeerKv]:
        """See `KvOwner`."""
        return tuple(self._used)

    def _whole(self) -> Sequence[PeerKv]:
        """Those of models whose layers are all here."""
        return [kv for kv in self._used if kv.spread is None]

    async def used(self, kv: PeerKv, version: int) -> None:
        """See `KvOwner`."""
        while kv in self._used and kv.loans.prefixes.version == version:
            await self._used[kv].wait()

    def dial(self, to: Member, port: int, ticket: bytes, offer: wire.NixlOffer | None, block_bytes: int) -> Callable[[], BlockSender]:
        """See `KvOwner`."""
        addresses = self._fleet.tensor_addresses_of(to.node_id, port)
        identity, voids = self._fleet.identity, self._fleet.gossip.voids
        agent = self.nixl.agent
        own = self._fleet.node_id
        return lambda: block_sender(dial(addresses, to, ticket, identity, voids, _soon(DIAL_S)), own, ticket, offer, agent, block_bytes)

    def prefilled(self, why: LeaseEnd) -> None:
        """See `KvOwner`."""
        self.meter.prefills[why] += 1

    def given(self, n_blocks: int, n_bytes: int, transport: str) -> None:
        """See `KvOwner`."""
        self._on_loop(partial(self._count, "given", n_blocks, n_bytes, transport))

    def _count(self, what: str, n_blocks: int, n_bytes: int, transport: str) -> None:
        if n_blocks:
            self.meter.blocks[what] += n_blocks
            self.meter.bytes[what] += n_bytes
            self.meter.moved["given" if what == "given" else "taken", transport] += n_bytes

    def _came(self, what: str, peer: KvPeer, receiving: Receiving, n_blocks: int, n_bytes: int) -> None:
        """Count what came, and say what through, where that has changed."""
        self._count(what, n_blocks, n_bytes, receiving.transport)
        if receiving.nixl_failed:
            self.meter.nixl_failures += 1
            self.nixl.failed(peer.node_id, peer.instance, self._clock.monotonic())
        if n_blocks and self._through.get(peer.node_id) != receiving.transport:
            self._through[peer.node_id] = receiving.transport
            logger.info("KV of %s comes %s", peer.node_id, "by NIXL, out of its memory" if receiving.transport == "nixl" else "through TLS")

    # -------------------------------------------------------------------------------------------------------- what peers tell

    def _changed(self, kv: PeerKv) -> None:
        event = self._used.get(kv)
        if event is not None:
            self._used[kv] = asyncio.Event()
            event.set()

    def _on_news(self, effect: Effect) -> None:
        del effect
        self._look_soon()

    def _on_loop(self, call: Callable[[], None]) -> bool:
        """From any thread. False: the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    def _look_soon(self) -> None:
        """Soon, so that all that one message brought is looked at once."""
        if not self._stale and not self._stopped:
            self._stale = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Watch those that may share KV, and price what they told."""
        self._stale = False
        if self._stopped:
            return
        sharers: MayShareKv = self._fleet.eligible(Use.SHARE_KV)
        cards = live_cards(sharers.cards)
        wanted = {
            (card.node_id, offer.digest, offer.numerics_id)
            for card in cards.values()
            if card.node_id != sharers.own and card.addresses
            for offer in [offer for offer in card.models if answers(offer)][:MOST_MODELS]
        }
        for key in self._watches.keys() - wanted:
            self._watches.pop(key).cancel()
        for key in wanted - self._watches.keys():
            self._watches[key] = asyncio.create_task(self._watch(key), name=f"prefixes of {key[0]}")
        self._price(sharers.own, cards)

    async def _watch(self, key: _Told) -> None:
        node_id, digest, numerics_id = key
        backoff = Backoff(RETRY_S, MOST_RETRY_S)
        while True:
            try:
                live = self._fleet.view().get(node_id)
                if live is not None:
                    channel = self._fleet.channel(node_id, live.card.addresses, Use.SHARE_KV)
                    async for said in KvServiceStub(channel).WatchPrefixes(
                        wire.WatchPrefixesRequest(digest=digest, numerics_id=numerics_id)
                    ):
                        if said.block_tokens:
                            self._told[key] = read_told(said)
                        backoff.reset()
                        self._look_soon()
            except grpc.aio.AioRpcError as failed:
                logger.debug("no prefixes of %s: %s", node_id, error_of(failed, node_id))
            except PacelineError as error:
                logger.debug("no prefixes of %s: %s", node_id, error)
            finally:
                self._told.pop(key, None)
                self._look_soon()
            await asyncio.sleep(backoff.fail(self._clock.monotonic()))

    def _price(self, own: NodeId, cards: Mapping[NodeId, NodeCard]) -> None:
        links, now = Links(cards), self._clock.monotonic()
        self._prices = {}
        # Who computes a prompt sees it.
        shown = {card.node_id for card in self._fleet.eligible(Use.ANSWER).cards}
        pushed, beside = dict[NodeId, int](), dict[NodeId, int]()
        for kv in self._used:
            offer, held = offer_at(cards.get(own), kv.digest, kv.numerics_id), kv.spans(own)
            if offer is not None and (rate := kv.prompts_per_s()) > 0:
                offer = replace(offer, prefill_tokens_per_second=rate)
            peers: list[KvPeer] = []
            for (node_id, *model), told in self._told.items():
                if tuple(model) != (kv.digest, kv.numerics_id) or told.layout != kv.layout or node_id not in cards:
                    continue
                rate, at_s = self._seen.get(node_id, (0.0, 0.0))
                seen = rate if now - at_s < SEEN_S else None
                if told.spans or held:
                    if (told.spans and told.spans[-1].layers.stop != kv.whole.layers.stop) or not kv.shares:
                        continue
                    cost = parted_price(kv.whole, kv.block_tokens, offer, told.spans or node_id, held or own, links)
                else:
                    cost = price(kv.block_bytes, kv.block_tokens, offer, links.between(node_id, own), seen)
                if cost is None:
                    continue
                self._prices[node_id, kv.digest, kv.numerics_id] = cost
                self._say(node_id, kv, cost)
                prefill = None
                prefills = told.prefills_in_parts if told.spans or held else told.prefills
                if prefills and node_id in shown and kv.role is not PrefillRole.PREFILL:
                    there = offer_at(cards[node_id], kv.digest, kv.numerics_id)
                    if there is not None and told.prompts_per_s:
                        there = replace(there, prefill_tokens_per_second=told.prompts_per_s)
                    prefill = prefill_price(cost, kv.block_tokens, there)
                if prefill is not None:
                    self._say(node_id, kv, prefill)
                    for least, said in ((prefill.least_blocks, pushed), (prefill.least_beside, beside)):
                        if least is not None:
                            said[node_id] = least * kv.block_tokens
                card = cards[node_id]
                if (cost.least_blocks is not None or prefill is not None) and not self._is_resting(node_id, card.instance):
                    peers.append(KvPeer(node_id, card.instance, card.addresses, told.marks, cost, prefill, told.spans))
            kv.show(peers, partial(self._begin_soon, kv))
        self.meter.least_pushed, self.meter.least_beside = pushed, beside
        self.meter.marks = sum(len(told.marks) for told in self._told.values())
        tokens = {kv.digest: kv.block_tokens for kv in self._used}
        self.meter.least_tokens = {
            key[0]: cost.least_blocks * tokens[key[1]] for key, cost in self._prices.items() if cost.least_blocks is not None
        }

    def _say(self, node_id: NodeId, kv: PeerKv, cost: KvPrice | PrefillPrice) -> None:
        """Into the log, where whether it comes from there has changed."""
        what, least = (node_id, kv.digest, type(cost)), cost.least_blocks if isinstance(cost, KvPrice) else cost.least_beside
        pays = least is not None
        if self._said.get(what) is not pays:
            self._said[what] = pays
            logger.info("%s: %s", node_id, cost.words(kv.block_tokens))

    # --------------------------------------------------------------------------------------------------------- asking for blocks

    def _begin_soon(self, kv: PeerKv, fetch: PeerFetch | PushedParts) -> None:
        if not self._on_loop(partial(self._begin, kv, fetch)):
            fetch.cancel()

    def _begin(self, kv: PeerKv | None, fetch: PeerFetch | PushedParts) -> None:
        if self._stopped:
            fetch.cancel()
            return
        if kv is not None and fetch.push is not None:
            work = self._push(kv, fetch)
        else:
            assert isinstance(fetch, PeerFetch), "parts are pushed"
            work = self._fetch(fetch)
        task = asyncio.create_task(work, name=f"KV from {fetch.peer.node_id}")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _fetch(self, fetch: PeerFetch) -> None:
        peer, began_s = fetch.peer, self._clock.monotonic()
        outcome = "lost"
        try:
            with watched(fetch, self._loop):
                try:
                    outcome = await self._blocks_of(fetch, self.nixl.offer(peer.node_id, peer.instance, began_s))
                except NixlFailed as error:
                    logger.warning("the rest of a prefix comes from %s through TLS: %s", peer.node_id, error)
                    outcome = await self._blocks_of(fetch, None)
        except (FleetError, grpc.aio.AioRpcError) as error:
            outcome = "wrong" if isinstance(error, StreamCorrupt) else "left" if fetch.is_over else "lost"
            if outcome == "wrong" or (outcome == "lost" and fetch.filled < fetch.expected):
                told = error_of(error, peer.node_id) if isinstance(error, grpc.aio.AioRpcError) else error
                logger.warning("KV does not come from %s, and is computed: %s", peer.node_id, told)
        finally:
            fetch.cancel()
            if outcome != "wrong":
                outcome = "whole" if fetch.filled >= fetch.expected else "late" if fetch.is_late else outcome
            self._ended(fetch, outcome, self._clock.monotonic() - began_s)

    async def _blocks_of(self, fetch: PeerFetch, offered: NixlOffered | None) -> str:
        """Ask for those of a fetch's blocks that lack, and take them; again, where they come in turns. Returns how it ended."""
        while (end := await self._turn_of(fetch, offered)) == "again":
            pass
        return end

    async def _turn_of(self, fetch: PeerFetch, offered: NixlOffered | None) -> str:
        receiving, before = Receiving(self._fleet.tensors.expect(), offered), fetch.filled
        call: grpc.aio.UnaryUnaryCall[wire.FetchBlocksRequest, wire.FetchBlocksResponse] | None = None

        def hang_up() -> None:
            receiving.close()
            if call is not None:
                call.cancel()

        fetch.hang_up = partial(self._on_loop, hang_up)
        try:
            channel = self._fleet.channel(fetch.peer.node_id, fetch.peer.addresses, Use.SHARE_KV)
            request = fetch_request(fetch, self._fleet.tensors.port, receiving)
            call = KvServiceStub(channel).FetchBlocks(request, timeout=OPEN_S)
            if fetch.is_over:
                call.cancel()
            try:
                answer = await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return "left"
            if not answer.n_blocks:
                return "again" if answer.in_turns and fetch.prefill and not fetch.is_over else "none"
            most = answer.n_blocks if answer.in_turns else None
            work = partial(receiving.run, fetch, answer.from_node_id, most)
            await self._loop.run_in_executor(self._threads, work)
            if most is not None and fetch.filled == before + most and not fetch.is_over:
                return "again"
            return "left"  # or all that was wanted came, which is counted as whole
        finally:
            receiving.close()
            n_blocks = fetch.filled - before
            self._came("pushed" if fetch.prefill else "fetched", fetch.peer, receiving, n_blocks, n_blocks * fetch.part.block_bytes)

    def _ended(self, fetch: PeerFetch, outcome: str, seconds: float) -> None:
        node_id, n_bytes = fetch.peer.node_id, fetch.filled * fetch.part.block_bytes
        fetch.is_wrong = outcome == "wrong"
        self.meter.fetches[outcome] += 1
        self.meter.blocks["missed"] += max(0, fetch.expected - fetch.filled)
        now = self._clock.monotonic()
        if not fetch.prefill and fetch.filled >= LEARNS_FROM and seconds > 0:  # one under way is as fast as its prompt is computed
            self._seen[node_id] = n_bytes / seconds, now
        rest_s = {"wrong": WRONG_REST_S, "late": REST_S, "lost": REST_S}.get(outcome)
        self._rest(node_id, None if outcome == "wrong" else fetch.peer.instance, rest_s)

    def _checked(self, kv: PeerKv, liars: frozenset[NodeId]) -> None:
        """A block that a peer gave was computed again; those that gave what it stands on are asked for nothing for a time, where it was wrong."""
        self.meter.checks["wrong" if liars else "right"] += 1
        for node_id in liars:
            self.meter.lies[node_id] += 1
            for each in self._used:
                each.leave_out(node_id)
            self._fleet.found_wrong(node_id, f"{node_id} gave KV of {kv.digest[:12]} that is not what the model computes")
        for other in self._used if liars else ():
            if other is not kv:
                other.loans.distrust(liars)
        kv.forgive(liars)

    def _is_resting(self, node_id: NodeId, instance: bytes) -> bool:
        return not self._resting.now(self._clock.monotonic()).keys().isdisjoint({(node_id, instance), (node_id, None)})

    def _rest(self, node_id: NodeId, instance: bytes | None, rest_s: float | None) -> None:
        """Ask a peer's process for nothing for so long; None: it may be asked.

        Args:
            instance: None where what it sent was wrong: that may be its memory's fault, or meant, and another start mends neither.
        """
        if rest_s is not None:
            self._resting.add((node_id, instance), self._clock.monotonic() + rest_s, None)
            for kv in self._used:
                kv.leave_out(node_id)
            self._loop.call_later(rest_s + 0.1, self._look_soon)
        self._look_soon()

    async def _push(self, kv: PeerKv, fetch: PeerFetch | PushedParts) -> None:
        """Have a prompt computed, and count how it ended."""
        self._epoch = max(self._epoch + 1, int(self._clock.wall() * 1e6))
        end, peer, asked = PushEnd.LEFT, fetch.peer, self._clock.monotonic()
        opened = partial(self._fleet.channel, peer.node_id, peer.addresses, Use.SHARE_KV)
        receiving: Receiving | None = None
        try:
            if isinstance(fetch, PushedParts):
                end = await PushInParts(kv, fetch, self._epoch, partial(self._begin, None), opened).run()
            else:
                offered = self.nixl.offer(peer.node_id, peer.instance, self._clock.monotonic())
                receiving = Receiving(self._fleet.tensors.expect(), offered)
                end = await Push(kv, fetch, self._epoch, receiving, self._fleet.tensors.port, opened, self._threads).run()
        finally:
            fetch.cancel()
            self.meter.pushes[end] += 1
            self.meter.push_s[end] += self._clock.monotonic() - asked
            if receiving is not None:
                self._came("pushed", peer, receiving, fetch.filled, fetch.filled * kv.block_bytes)
            self._rest(peer.node_id, None if end is PushEnd.DAMAGED else peer.instance, push_rest_s(end))
            if fetch.push is not None:
                fetch.push.ended(end, fetch.filled)


def _soon(seconds: float) -> float:
    return time.perf_counter() + seconds
