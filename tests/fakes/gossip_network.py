"""A fleet's gossip in one process: the real `Gossip` of every node, over a network and clocks that exist only here.

Events happen in order of time; latency, loss and every node's own randomness come from one seed, so a run repeats exactly. Each node has a
monotonic clock with an origin of its own and a wall clock that may be skewed. Cards are not signed: the network carries what was sent, and
refuses revoked nodes as transport does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, Revocation, SealedCard, SealedRevocation
from paceline.fleet.gossip import Gossip
from paceline.fleet.messages import Effect, ExchangeRequest, GossipCall, PassedCard, Renew, Reply, Reseal, node_key
from paceline.fleet.presets import Preset
from paceline.fleet.registry import next_version

EPOCH = 1_750_000_000.0
"""Wall clock when a network begins."""


@dataclass(slots=True)
class SimulatedNode:
    """A process of a node. `label` names it here: two processes may claim one id."""

    label: str
    node_id: NodeId
    gossip: Gossip
    clock_origin: float
    skew_s: float
    instance: bytes
    issued_at: int
    persisted: int = 0
    alive: bool = True
    tick_at: float = float("inf")
    group: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def address(self) -> str:
        return f"{self.label}:7000"


@dataclass(slots=True)
class SimulatedNetwork:
    """Nodes and what connects them.

    Args:
        latency_s: one way, from least to most.
        loss: share of messages that never arrive; the caller notices at its timeout.
        sealed_bytes: a signed card has so many.
        certificate_bytes: a certificate has so many.
        size: bytes of a message, counted for each node that sends or receives it.
        on_effect: sees everything that happens on a node.
    """

    preset: Preset
    seed: int = 0
    latency_s: tuple[float, float] = (0.001, 0.005)
    loss: float = 0.0
    sealed_bytes: int = 64
    certificate_bytes: int = 16
    size: Callable[[ExchangeRequest | Reply], int] | None = None
    on_effect: Callable[[float, SimulatedNode, Effect], None] | None = None
    now: float = 0.0
    nodes: dict[str, SimulatedNode] = field(default_factory=dict[str, SimulatedNode])
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list[tuple[float, int, Callable[[], None]]])
    _order: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    # ------------------------------------------------------------------------------------------------------------------- nodes

    def start(self, label: str, *, node_id: str = "", seeds: Iterable[str] = (), skew_s: float = 0.0, persisted: int = 0) -> SimulatedNode:
        """Start a process; `seeds` are labels of nodes whose addresses it is given, `persisted` the last version it used."""
        own = NodeId(node_id or label)
        gossip = Gossip(own, self.preset, random.Random(self._rng.getrandbits(64)), [f"{seed}:7000" for seed in seeds])
        node = SimulatedNode(label, own, gossip, self._rng.uniform(0, 1e6), skew_s, self._rng.randbytes(8), int(self.wall(0.0)), persisted)
        self.nodes[label] = node
        self.announce(node)
        return node

    def announce(self, node: SimulatedNode, *, above: int = 0, leaving: bool = False) -> None:
        """Have a node sign and announce a new card."""
        wall = self.wall(node.skew_s)
        node.persisted = next_version(node.persisted, wall, above)
        card = NodeCard(
            node_id=node.node_id,
            version=node.persisted,
            addresses=(node.address,),
            instance=node.instance,
            ttl_s=self.preset.ttl_s,
            announced_at=int(wall),
            leaving=leaving,
        )
        self._sign(node, card, 0)
        self._schedule(node)

    def kill(self, label: str) -> SimulatedNode:
        """SIGKILL: the node says nothing."""
        node = self.nodes.pop(label)
        node.alive = False
        return node

    def leave(self, label: str) -> None:
        """The node says goodbye, and stops once its calls are done."""
        node = self.nodes[label]
        self.announce(node, leaving=True)
        self.at(self.now + self.preset.rpc_timeout_s, lambda: self._stop(node))

    def partition(self, *groups: Iterable[str]) -> None:
        """Only nodes of one group reach one another. Nodes in none are together in one."""
        for node in self.nodes.values():
            node.group = 0
        for number, labels in enumerate(groups, 1):
            for label in labels:
                self.nodes[label].group = number

    def heal(self) -> None:
        """Every node reaches every other."""
        self.partition()

    def revoke(self, node_id: str, on: str) -> None:
        """The CA, on the node `on`, voids what it issued to `node_id` so far."""
        at = int(self.wall(0.0))
        revocation = Revocation(NodeId(node_id), at, at)
        node = self.nodes[on]
        self._act(node, node.gossip.learn([SealedRevocation(revocation, f"{node_id} {at}".encode())], self.clock(node)))

    # -------------------------------------------------------------------------------------------------------------------- time

    def clock(self, node: SimulatedNode) -> float:
        """The node's monotonic clock."""
        return node.clock_origin + self.now

    def wall(self, skew_s: float) -> float:
        """A wall clock that is off by `skew_s`."""
        return EPOCH + self.now + skew_s

    def at(self, time: float, happens: Callable[[], None]) -> None:
        """Let something happen later."""
        self._order += 1
        heapq.heappush(self._events, (time, self._order, happens))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        self.now = until

    # ----------------------------------------------------------------------------------------------------------------- private

    def _sign(self, node: SimulatedNode, card: NodeCard, beat: int) -> None:
        said = (card.version.to_bytes(8, "big") + beat.to_bytes(4, "big") + card.instance).ljust(self.sealed_bytes, b".")
        sealed = SealedCard(card, said, beat, b"." * self.certificate_bytes, node.issued_at)
        node.gossip.announce(sealed, self.clock(node))

    def _opened(self, reader: SimulatedNode, cards: tuple[PassedCard, ...]) -> tuple[PassedCard, ...]:
        """Return the cards that transport would take: a signature without its card fits only the card that it was made for."""
        taken: list[PassedCard] = []
        for passed in cards:
            card = passed.sealed.card
            held = None if passed.with_card else reader.gossip.held(node_key(card.node_id), card.version)
            if passed.with_card or (held is not None and held.card == card):
                taken.append(passed)
            elif held is not None:
                reader.gossip.lacks_certificate(card.node_id)
        return tuple(taken)

    def _stop(self, node: SimulatedNode) -> None:
        if node.alive:
            self.kill(node.label)

    def _act(self, node: SimulatedNode, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if self.on_effect is not None:
                self.on_effect(self.now, node, effect)
            if isinstance(effect, GossipCall):
                self._send(node, effect)
            elif isinstance(effect, Reseal):
                self.announce(node, above=effect.above)
            elif isinstance(effect, Renew) and (own := node.gossip.own_card) is not None:
                self._sign(node, own.card, own.beat + 1)
        self._schedule(node)

    def _schedule(self, node: SimulatedNode) -> None:
        due = node.gossip.next_tick
        if due is None:
            return
        time = max(self.now, due - node.clock_origin)
        if time != node.tick_at:
            node.tick_at = time
            self.at(time, lambda: self._tick(node, time))

    def _tick(self, node: SimulatedNode, time: float) -> None:
        if node.alive and node.tick_at == time:
            node.tick_at = float("inf")
            # Due times were converted from the node's clock and back: never a hair too early.
            self._act(node, node.gossip.tick(max(self.clock(node), node.gossip.next_tick or 0.0)))

    def _send(self, caller: SimulatedNode, call: GossipCall) -> None:
        callee = next((self.nodes[a.partition(":")[0]] for a in call.addresses if a.partition(":")[0] in self.nodes), None)
        sent = 0 if self.size is None else self.size(call.request)
        caller.bytes_sent += sent
        reached = callee is not None and callee.group == caller.group and call.node_id in (None, callee.node_id)
        if callee is None or not reached or self._rng.random() < self.loss:
            self.at(self.now + call.timeout_s, lambda: self._fail(caller, call))
        else:
            self.at(self.now + self._rng.uniform(*self.latency_s), lambda: self._arrive(caller, callee, call, sent))

    def _arrive(self, caller: SimulatedNode, callee: SimulatedNode, call: GossipCall, sent: int) -> None:
        if not callee.alive or callee.gossip.voids(caller.node_id, caller.issued_at):
            self._fail(caller, call)
            return
        callee.bytes_received += sent
        request = replace(call.request, cards=self._opened(callee, call.request.cards))
        answered = callee.gossip.on_request(request, caller.node_id, self.clock(callee))
        size = 0 if self.size is None else self.size(answered.reply)
        callee.bytes_sent += size
        self._act(callee, answered.effects)
        if callee.group != caller.group or self._rng.random() < self.loss:
            self.at(self.now + call.timeout_s, lambda: self._fail(caller, call))
            return
        self.at(self.now + self._rng.uniform(*self.latency_s), lambda: self._return(caller, callee, call, answered.reply, size))

    def _return(self, caller: SimulatedNode, callee: SimulatedNode, call: GossipCall, reply: Reply, size: int) -> None:
        if not caller.alive:
            return
        caller.bytes_received += size
        if caller.gossip.voids(callee.node_id, callee.issued_at):
            self._fail(caller, call)
            return
        reply = replace(reply, cards=self._opened(caller, reply.cards))
        self._act(caller, caller.gossip.on_reply(call.id, reply, callee.node_id, self.clock(caller)))

    def _fail(self, caller: SimulatedNode, call: GossipCall) -> None:
        if caller.alive:
            caller.gossip.on_failure(call.id)
