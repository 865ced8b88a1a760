"""Which ways to other nodes to measure, when, and which is best: a machine often has Wi-Fi beside a cable.

Law: only nodes that may share a plan measure each other, one measurement at a time. A way is measured in full when it is new, again when it
degrades (its round trip doubles, or its bandwidth halves, twice in a row against the smoothed figure), and now and then. Between these, the
way in use is pinged. The best is the one with the highest (bandwidth, then shortest round trip); another must be clearly better to take
its place. What a card shows has two digits and keeps them (`fleet.card`).

Whom a node should measure its links to, and at which addresses.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address

from paceline.core.ids import NodeId
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role, settled, two_digits
from paceline.fleet.machines import FREE_SHARE


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Times in seconds, sizes in bytes."""

    ping_s: float = 10.0
    """The way in use is pinged this often. Raising it: a link that degraded is noticed later."""
    full_s: float = 600.0
    """Every way is measured in full this often. Raising it: a cable plugged in again is used later; lowering it: more traffic."""
    retry_s: float = 5.0
    """A way that failed is tried again after this, then after twice that, and so on."""
    most_retry_s: float = 300.0
    """But at least this often. Raising it: a way that comes back is noticed later."""
    timeout_s: float = 5.0
    """One measurement may take so long. Raising it: a dead way holds up the others for longer."""
    payload_bytes: int = 1 << 20
    """Of a full measurement. Raising it: steadier figures for fast links, and more seconds for slow ones."""
    spread_s: float = 1.0
    """First measurements are spread over so long, so that nodes that start together don't measure each other's measuring."""
    most_peers: int = 64
    """Nodes that are measured at most. Raising it: more traffic in a large fleet."""


SMOOTHING = 0.25
"""Weight of a new figure in the smoothed one. Raising it: figures follow faster, and tremble more."""
DEGRADED = 2.0
"""By this factor a figure must be worse to count as degraded."""
IN_A_ROW = 2
"""Bad figures, or failures, that count: one alone is a hiccup."""
BETTER_BANDWIDTH, BETTER_RTT = 1.25, 0.8
"""What another way's bandwidth, or at no less bandwidth its round trip, must be of the present one's to take its place."""
LEAST_RISE_S = 0.5e-3
"""A round trip that rose by less has not degraded, whatever the factor: a busy scheduler does that."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure a way, and hand back what came of it: `LinkWatch.measured(id, ...)` or `LinkWatch.failed(id, ...)`."""

    id: int
    node_id: NodeId
    """Who must answer."""
    address: str
    payload_bytes: int
    """To send and to ask for, for bandwidth; 0: a ping will do."""
    timeout_s: float


@dataclass(slots=True)
class _Way:
    """One address of one peer."""

    address: str
    due_s: float
    """When it wants to be measured in full."""
    rtt_s: float = 0.0
    bytes_per_s: float = 0.0
    """Smoothed; 0: never measured."""
    network_s: float | None = None
    worse: int = 0
    """Bad figures in a row."""
    failures: int = 0
    """In a row."""

    @property
    def is_known(self) -> bool:
        return self.bytes_per_s > 0 and self.failures < IN_A_ROW

    @property
    def rank(self) -> tuple[float, float, str]:
        """Best last."""
        return (two_digits(self.bytes_per_s), -self.rtt_s, self.address)


@dataclass(slots=True)
class _Peer:
    ways: dict[str, _Way] = field(default_factory=dict[str, _Way])
    best: str = ""
    ping_due_s: float = 0.0
    shown: Link | None = None


class LinkWatch:
    """The links of one node. All randomness is `rng`'s, all time its callers'."""

    def __init__(self, rng: random.Random, times: LinkTimes | None = None) -> None:
        self._rng, self._times = rng, times or LinkTimes()
        self._peers: dict[NodeId, _Peer] = {}
        self._asked: Measure | None = None
        self._asked_s = 0.0
        self._ids = 0

    @property
    def links(self) -> tuple[Link, ...]:
        """For the card: the best way to each peer that was measured."""
        return tuple(peer.shown for _, peer in sorted(self._peers.items()) if peer.shown is not None)

    def set_peers(self, peers: Mapping[NodeId, Sequence[str]], now: float) -> None:
        """The nodes to measure, and where: `fleet.links` says who and which. Those already known keep their figures."""
        kept = sorted(peers)[: self._times.most_peers]
        for node_id in self._peers.keys() - set(kept):
            del self._peers[node_id]
        for node_id in kept:
            peer = self._peers.setdefault(node_id, _Peer())
            for address in peer.ways.keys() - set(peers[node_id]):
                del peer.ways[address]
            for address in peers[node_id]:
                if address not in peer.ways:
                    peer.ways[address] = _Way(address, now + self._rng.uniform(0.0, self._times.spread_s))
            self._choose(node_id, peer)

    def tick(self, now: float) -> list[Measure]:
        """What is due: at most one measurement, and none while one is under way."""
        if self._asked is not None:
            if now < self._asked_s + 2 * self._times.timeout_s:
                return []
            self.failed(self._asked.id, now)  # it was not answered: its asker is gone
        full = min(((way.due_s, node_id, way.address) for node_id, peer in self._peers.items() for way in peer.ways.values()), default=None)
        ping = min(((peer.ping_due_s, node_id, peer.best) for node_id, peer in self._peers.items() if peer.best), default=None)
        due = full if full is not None and full[0] <= now else ping
        if due is None or due[0] > now:
            return []
        self._ids += 1
        payload = self._times.payload_bytes if due is full else 0
        self._asked = Measure(self._ids, due[1], due[2], payload, self._times.timeout_s)
        self._asked_s = now
        return [self._asked]

    def next_due_s(self) -> float | None:
        """When to tick next; None: nothing is watched."""
        if self._asked is not None:
            return self._asked_s + 2 * self._times.timeout_s
        dues = [way.due_s for peer in self._peers.values() for way in peer.ways.values()]
        dues += [peer.ping_due_s for peer in self._peers.values() if peer.best]
        return min(dues, default=None)

    def measured(self, measure_id: int, now: float, rtt_s: float, bytes_per_s: float | None = None, network_s: float | None = None) -> bool:
        """A measurement came out. True where the links that a card shows have changed.

        Args:
            rtt_s: the shortest round trip seen.
            bytes_per_s: None: it was a ping.
            network_s: of the round trip, what the network takes; None: not known.
        """
        if not 0 <= rtt_s < 1e6 or not 0 < (1 if bytes_per_s is None else bytes_per_s) < 1e15:
            return self.failed(measure_id, now)  # no measurement has such figures
        asked, peer, way = self._end(measure_id)
        if asked is None or peer is None or way is None:
            return False
        peer.ping_due_s = now + self._apart(self._times.ping_s)
        if bytes_per_s is None:
            way.failures = 0
            return self.observed(asked.node_id, asked.address, now, rtt_s=rtt_s, network_s=network_s)
        fresh = way.worse >= IN_A_ROW or not way.is_known
        way.rtt_s = rtt_s if fresh else _smooth(way.rtt_s, rtt_s)
        way.bytes_per_s = bytes_per_s if fresh else _smooth(way.bytes_per_s, bytes_per_s)
        way.network_s = network_s if fresh else _smooth_known(way.network_s, network_s)
        way.worse = way.failures = 0
        way.due_s = now + self._apart(self._times.full_s)
        return self._choose(asked.node_id, peer)

    def failed(self, measure_id: int, now: float) -> bool:
        """A measurement came to nothing. True where the links that a card shows have changed."""
        asked, peer, way = self._end(measure_id)
        if asked is None or peer is None or way is None:
            return False
        wait_s = min(self._times.retry_s * 2 ** min(way.failures, 20), self._times.most_retry_s)
        way.failures += 1
        way.due_s = now + self._apart(wait_s)
        peer.ping_due_s = now + self._apart(self._times.ping_s)
        if way.failures >= IN_A_ROW:
            self._measure_anew(peer, now, but=way.address)
        return self._choose(asked.node_id, peer)

    def observed(
        self,
        node_id: NodeId,
        address: str,
        now: float,
        *,
        rtt_s: float | None = None,
        bytes_per_s: float | None = None,
        network_s: float | None = None,
    ) -> bool:
        """What other traffic took on a way, for nothing. True where the links that a card shows have changed."""
        peer, way = self._find(node_id, address)
        if peer is None or way is None or not way.is_known:
            return False
        slower = rtt_s is not None and rtt_s > max(DEGRADED * way.rtt_s, way.rtt_s + LEAST_RISE_S)
        thinner = bytes_per_s is not None and bytes_per_s < way.bytes_per_s / DEGRADED
        if slower or thinner:
            way.worse += 1
            if way.worse == IN_A_ROW:
                self._measure_anew(peer, now)
            return False
        way.worse = 0
        if rtt_s is not None and rtt_s >= 0:
            way.rtt_s = _smooth(way.rtt_s, rtt_s)
        way.network_s = _smooth_known(way.network_s, network_s)
        if bytes_per_s is not None and bytes_per_s > 0:
            # Traffic that did not fill the way says how much it carries at least.
            way.bytes_per_s = max(way.bytes_per_s, _smooth(way.bytes_per_s, bytes_per_s))
        return self._choose(node_id, peer)

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _find(self, node_id: NodeId, address: str) -> tuple[_Peer | None, _Way | None]:
        peer = self._peers.get(node_id)
        return peer, None if peer is None else peer.ways.get(address)

    def _end(self, measure_id: int) -> tuple[Measure | None, _Peer | None, _Way | None]:
        """The measurement under way, which ends, and where it was. None for one that ended before."""
        asked = self._asked
        if asked is None or asked.id != measure_id:
            return None, None, None
        self._asked = None
        return asked, *self._find(asked.node_id, asked.address)

    def _measure_anew(self, peer: _Peer, now: float, but: str = "") -> None:
        """All ways to a peer: the one in use degraded, so another may be best."""
        for way in peer.ways.values():
            if way.address != but and way.failures < IN_A_ROW:
                way.due_s = min(way.due_s, now)

    def _apart(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.9, 1.1)

    def _choose(self, node_id: NodeId, peer: _Peer) -> bool:
        """Keep the present way unless another is clearly better, and show the best. True where that changed."""
        best = peer.ways.get(peer.best)
        if best is None or not best.is_known:
            best = None
        top = max((way for way in peer.ways.values() if way.is_known), key=lambda way: way.rank, default=None)
        if top is not None and (best is None or _is_clearly_better(top, best)):
            best = top
        before = peer.shown
        if best is None:
            peer.best, peer.shown = "", None
            return before is not None
        peer.best = best.address
        old = before if before is not None and before.address == best.address else Link(node_id, best.address, 0.0, 0.0)
        peer.shown = Link(
            node_id,
            best.address,
            settled(best.rtt_s, old.rtt_s),
            settled(best.bytes_per_s, old.bytes_per_s),
            None if best.network_s is None else settled(best.network_s, old.network_s or 0.0),
        )
        return peer.shown != before


def _is_clearly_better(other: _Way, present: _Way) -> bool:
    """Each step raises (bandwidth, -rtt), so that no three ways can take turns."""
    if other.bytes_per_s >= BETTER_BANDWIDTH * present.bytes_per_s:
        return True
    return other.bytes_per_s >= present.bytes_per_s and other.rtt_s <= BETTER_RTT * present.rtt_s


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)


def _smooth_known(old: float | None, new: float | None) -> float | None:
    """Likewise, of figures that may not be known."""
    return new if old is None else old if new is None else _smooth(old, new)


LEAST_TRANSFER = 0.1
"""Of a call with many bytes, what is not the round trip, at least: on a busy machine a call without any may take as long."""


def figures(pings_s: Iterable[float], transfer_bytes: int, transfer_s: float) -> tuple[float, float]:
    """(round trip in seconds, bytes a second) from the round trips of some empty calls and that of one with so many bytes in all."""
    rtt_s = min(pings_s)
    return rtt_s, transfer_bytes / max(transfer_s - rtt_s, LEAST_TRANSFER * transfer_s)


MOST_ADDRESSES = 8
"""Of one node, measured at most."""
_LAYERED = frozenset({Role.VERIFIER, Role.SHARD, Role.PREFILL})


def peers_to_measure(own: NodeCard, cards: Iterable[NodeCard]) -> dict[NodeId, tuple[str, ...]]:
    """The nodes that may share a plan with this one, and where to reach each."""
    found = {
        card.node_id: addresses
        for card in cards
        if card.node_id != own.node_id
        and not card.leaving
        and may_share_a_plan(own, card)
        and (addresses := addresses_to_measure(own, card))
    }
    return dict(sorted(found.items()))


def may_share_a_plan(one: NodeCard, other: NodeCard) -> bool:
    """Whether placement could ever put both into one plan: the same weights, a draft, weights too big for who has them, or shards."""
    return any(
        _are_stages(mine, yours) or _drafts(mine, yours) or _drafts(yours, mine) for mine in one.models for yours in other.models
    ) or any(
        (_outgrows(holder, offer) and helper.backend) or (helper.serves_shards and offer.role in _LAYERED and offer.digest)
        for holder, helper in ((one, other), (other, one))
        for offer in holder.models
    )


def addresses_to_measure(own: NodeCard, card: NodeCard) -> tuple[str, ...]:
    """Addresses of another node that may lead to it from here, in the order it gave.

    Loopback and this machine's own addresses lead to other nodes of this machine only, or to whatever else listens here. A node dials them only if it
    announces loopback itself, and the other node has nothing else or is on this machine too. Bridges of containers have the same address on many machines.
    """
    hosts = {address: _host(address) for address in dict.fromkeys(card.addresses)}
    mine = {host for address in own.addresses if (host := _host(address)) is not None}
    outside = {host for host in mine if not _is_loopback(host)}
    usable = {address: host for address, host in hosts.items() if host is not None and may_be_reached(host, outside)}
    apart = [address for address, host in usable.items() if not _is_loopback(host) and host not in outside]
    if outside != mine and (not apart or outside & set(usable.values())):
        return tuple(usable)[:MOST_ADDRESSES]
    return tuple(apart[:MOST_ADDRESSES])


def may_be_dialled(own: Iterable[str], addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses of another node without those of loopback, unless this node announces loopback itself.

    Services on loopback trust this machine: no other machine may make a node dial them.
    """
    if any(map(leads_here, own)):
        return tuple(addresses)
    return tuple(address for address in addresses if not leads_here(address))


def leads_here(address: str) -> bool:
    """Return whether host:port is loopback, or the unspecified address, which leads there too."""
    host = _host(address)
    return host is not None and (_is_loopback(host) or (not isinstance(host, str) and host.is_unspecified))


def _are_stages(mine: ModelOffer, yours: ModelOffer) -> bool:
    return mine.model.is_same(yours.model) and mine.role in _LAYERED and yours.role in _LAYERED


def _drafts(proposer: ModelOffer, verifier: ModelOffer) -> bool:
    if proposer.role is not Role.PROPOSER or verifier.role is not Role.VERIFIER:
        return False
    return proposer.vocabulary != "" and proposer.vocabulary == verifier.vocabulary


def _outgrows(card: NodeCard, offer: ModelOffer) -> bool:
    shape = offer.shape
    if shape is None or offer.role not in _LAYERED or not offer.digest:
        return False
    return shape.n_layers * shape.layer_bytes + shape.edge_bytes > FREE_SHARE * card.running(offer.weights).memory_total_bytes


def _host(address: str) -> IPv4Address | IPv6Address | str | None:
    """The host of host:port; None where it is no such thing."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return None
    try:
        found = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host.lower()
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def _is_loopback(host: IPv4Address | IPv6Address | str) -> bool:
    return host == "localhost" if isinstance(host, str) else host.is_loopback


def may_be_reached(host: IPv4Address | IPv6Address | str, own: Iterable[IPv4Address | IPv6Address | str]) -> bool:
    """Return whether a machine with the addresses `own` may reach a host by this address alone.

    Link-local IPv6 also needs the name of an interface. Link-local IPv4 (169.254.0.0/16) needs a link-local address at both ends.
    """
    if isinstance(host, str):
        return True
    if host.is_unspecified or host.is_multicast or (isinstance(host, IPv6Address) and host.is_link_local):
        return False
    return not host.is_link_local or any(isinstance(each, IPv4Address) and each.is_link_local for each in own)
