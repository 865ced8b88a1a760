"""Measurement of links to other nodes: which addresses to measure, when, and which is the best. A machine often has Wi-Fi as well as a cable.

Law: only nodes that may share a plan measure each other, one measurement at a time. A way (an address of a peer) is measured in full when it is new,
when it degrades, and from time to time. It degrades if, twice in a row, its round trip is double or its bandwidth half of the smoothed figure.
Between full measurements the way in use is pinged. The best way has the highest bandwidth, then the shortest round trip; another must be clearly
better to replace it. Figures on a card have two digits and change only when a value is clearly nearer to another figure (`fleet.card`).

The last functions choose the nodes to measure, and their addresses.
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
    """Intervals in seconds, sizes in bytes."""

    ping_s: float = 10.0
    """Seconds between two pings of the way in use. Raising it: a degraded link is noticed later; lowering it: more traffic."""
    full_s: float = 600.0
    """Seconds between two full measurements of a way. Raising it: a cable that is plugged in again is used later; lowering it: more traffic."""
    retry_s: float = 5.0
    """Seconds until a failed way is tried again; doubled with each failure in a row. Raising it: a way is used later after a short outage; lowering it:
    more traffic to dead addresses."""
    most_retry_s: float = 300.0
    """Longest interval between two attempts at a failed way. Raising it: a way that comes back is noticed later."""
    timeout_s: float = 5.0
    """Seconds for one measurement. Raising it: a dead way delays the others longer; lowering it: slow links count as dead."""
    payload_bytes: int = 1 << 20
    """Bytes of a full measurement. Raising it: steadier figures for fast links, and more seconds for slow ones."""
    spread_s: float = 1.0
    """Seconds over which first measurements are spread, so that nodes that start together don't disturb each other's figures."""
    most_peers: int = 64
    """Largest number of nodes that are measured. Raising it: more traffic in a large fleet."""


SMOOTHING = 0.25
"""Weight of a new figure in the smoothed one. Raising it: figures follow faster, and fluctuate more."""
DEGRADED = 2.0
"""Factor by which a figure must be worse to count as degraded. Raising it: a slow link is noticed later; lowering it: noise causes full measurements."""
IN_A_ROW = 2
"""Bad figures, or failures, in a row that count: a single one is a hiccup."""
BETTER_BANDWIDTH, BETTER_RTT = 1.25, 0.8
"""Factors for another way to replace the present one: its bandwidth in relation to the present one, or, at no less bandwidth, its round trip."""
LEAST_RISE_S = 0.5e-3
"""Rise of a round trip (seconds) that never counts as degraded, since a busy scheduler causes as much."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A measurement to make. Report the result with `LinkWatch.measured(id, ...)` or `LinkWatch.failed(id, ...)`."""

    id: int
    node_id: NodeId
    """Node that must answer."""
    address: str
    payload_bytes: int
    """Bytes to send and to ask for, to measure bandwidth; 0: only a ping."""
    timeout_s: float


@dataclass(slots=True)
class _Way:
    """One address of a peer, with its figures."""

    address: str
    due_s: float
    """Monotonic seconds of its next full measurement."""
    rtt_s: float = 0.0
    bytes_per_s: float = 0.0
    """Smoothed bandwidth; 0: never measured."""
    network_s: float | None = None
    worse: int = 0
    """Bad figures in a row."""
    failures: int = 0
    """Failed measurements in a row."""

    @property
    def is_known(self) -> bool:
        return self.bytes_per_s > 0 and self.failures < IN_A_ROW

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key, best last."""
        return (two_digits(self.bytes_per_s), -self.rtt_s, self.address)


@dataclass(slots=True)
class _Peer:
    ways: dict[str, _Way] = field(default_factory=dict[str, _Way])
    best: str = ""
    ping_due_s: float = 0.0
    shown: Link | None = None


class LinkWatch:
    """Measured links of one node. Randomness comes from `rng`, and time from the callers."""

    def __init__(self, rng: random.Random, times: LinkTimes | None = None) -> None:
        self._rng, self._times = rng, times or LinkTimes()
        self._peers: dict[NodeId, _Peer] = {}
        self._asked: Measure | None = None
        self._asked_s = 0.0
        self._ids = 0

    @property
    def links(self) -> tuple[Link, ...]:
        """Best way to each peer that was measured, for the card."""
        return tuple(peer.shown for _, peer in sorted(self._peers.items()) if peer.shown is not None)

    def set_peers(self, peers: Mapping[NodeId, Sequence[str]], now: float) -> None:
        """Set the nodes to measure, with their addresses (see `peers_to_measure`). Known ones keep their figures."""
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
        """Return the measurement that is due: one at most, and none while one is running."""
        if self._asked is not None:
            if now < self._asked_s + 2 * self._times.timeout_s:
                return []
            self.failed(self._asked.id, now)  # no result came: the code that asked for it is gone
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
        """Return the monotonic seconds of the next `tick`; None: no node is watched."""
        if self._asked is not None:
            return self._asked_s + 2 * self._times.timeout_s
        dues = [way.due_s for peer in self._peers.values() for way in peer.ways.values()]
        dues += [peer.ping_due_s for peer in self._peers.values() if peer.best]
        return min(dues, default=None)

    def measured(self, measure_id: int, now: float, rtt_s: float, bytes_per_s: float | None = None, network_s: float | None = None) -> bool:
        """Take the result of a measurement. Returns: whether the links on the card have changed.

        Args:
            measure_id: from `Measure`.
            now: monotonic seconds.
            rtt_s: the shortest round trip seen.
            bytes_per_s: None: it was a ping.
            network_s: the network's part of the round trip; None: not known.
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
        """Record that a measurement failed. Returns: whether the links on the card have changed."""
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
        """Take figures that other traffic on a way gave, at no extra cost. Returns: whether the links on the card have changed."""
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
            # Traffic that did not fill the way only shows a lower bound of its bandwidth.
            way.bytes_per_s = max(way.bytes_per_s, _smooth(way.bytes_per_s, bytes_per_s))
        return self._choose(node_id, peer)

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _find(self, node_id: NodeId, address: str) -> tuple[_Peer | None, _Way | None]:
        peer = self._peers.get(node_id)
        return peer, None if peer is None else peer.ways.get(address)

    def _end(self, measure_id: int) -> tuple[Measure | None, _Peer | None, _Way | None]:
        """End the running measurement. Returns: the measurement, its peer and its way; None for one that ended before or was removed."""
        asked = self._asked
        if asked is None or asked.id != measure_id:
            return None, None, None
        self._asked = None
        return asked, *self._find(asked.node_id, asked.address)

    def _measure_anew(self, peer: _Peer, now: float, but: str = "") -> None:
        """Make all ways to a peer due now: the one in use degraded, so another may be best."""
        for way in peer.ways.values():
            if way.address != but and way.failures < IN_A_ROW:
                way.due_s = min(way.due_s, now)

    def _apart(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.9, 1.1)

    def _choose(self, node_id: NodeId, peer: _Peer) -> bool:
        """Keep the present way unless another is clearly better, and show the best. Returns: whether the shown link has changed."""
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
    """Return whether a way is better by a margin. Each change raises (bandwidth, -rtt), so no three ways can alternate."""
    if other.bytes_per_s >= BETTER_BANDWIDTH * present.bytes_per_s:
        return True
    return other.bytes_per_s >= present.bytes_per_s and other.rtt_s <= BETTER_RTT * present.rtt_s


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)


def _smooth_known(old: float | None, new: float | None) -> float | None:
    """Smooth a figure that may be unknown."""
    return new if old is None else old if new is None else _smooth(old, new)


LEAST_TRANSFER = 0.1
"""Smallest part of a long call that counts as transfer and not as round trip. On a busy machine an empty call may take as long as a full one."""


def figures(pings_s: Iterable[float], transfer_bytes: int, transfer_s: float) -> tuple[float, float]:
    """Compute (round trip in seconds, bytes per second).

    Args:
        pings_s: round trips of empty calls, in seconds.
        transfer_bytes: bytes of one more call, in both directions together.
        transfer_s: the round trip of that call, in seconds.
    """
    rtt_s = min(pings_s)
    return rtt_s, transfer_bytes / max(transfer_s - rtt_s, LEAST_TRANSFER * transfer_s)


MOST_ADDRESSES = 8
"""Largest number of addresses of one node that are measured."""
_LAYERED = frozenset({Role.VERIFIER, Role.SHARD, Role.PREFILL})


def peers_to_measure(own: NodeCard, cards: Iterable[NodeCard]) -> dict[NodeId, tuple[str, ...]]:
    """Return the nodes that may share a plan with this one, each with the addresses to measure."""
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
    """Return whether placement could ever put both nodes into one plan: for equal weights, a draft, weights too big for their holder, or shards."""
    return any(
        _are_stages(mine, yours) or _drafts(mine, yours) or _drafts(yours, mine) for mine in one.models for yours in other.models
    ) or any(
        (_outgrows(holder, offer) and helper.backend) or (helper.serves_shards and offer.role in _LAYERED and offer.digest)
        for holder, helper in ((one, other), (other, one))
        for offer in holder.models
    )


def addresses_to_measure(own: NodeCard, card: NodeCard) -> tuple[str, ...]:
    """Return the addresses of another node that may lead to it from here, in the order it gave.

    Loopback and this machine's own addresses lead only to other nodes of this machine, or to other programs that listen here. A node dials them only
    if it announces loopback itself, and the other node has nothing else or is on this machine too. Bridges of containers have the same address on
    many machines.
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
    """Return the host of host:port; None if the text has another form."""
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
