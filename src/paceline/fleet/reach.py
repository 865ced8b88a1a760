"""Whom a node should measure its links to, and at which addresses."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from paceline.core.ids import NodeId
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.fleet.machines import FREE_SHARE

MOST_ADDRESSES = 8
"""Of one node, measured at most."""
_LAYERED = frozenset({Role.VERIFIER, Role.SHARD})


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

    Unspecified and link-local IPv6 addresses lead nowhere by themselves, and loopback leads to another machine's node only if
    there is nothing else: then both are on one machine, as they are where they share another address.
    """
    hosts = {address: _host(address) for address in dict.fromkeys(card.addresses)}
    usable = {address: host for address, host in hosts.items() if host is not None and not _leads_nowhere(host)}
    mine = {host for address in own.addresses if (host := _host(address)) is not None and not _is_loopback(host)}
    apart = [address for address, host in usable.items() if not _is_loopback(host)]
    if apart and not mine & set(usable.values()):
        return tuple(apart[:MOST_ADDRESSES])
    return tuple(usable)[:MOST_ADDRESSES]


def _are_stages(mine: ModelOffer, yours: ModelOffer) -> bool:
    same = mine.digest != "" and (mine.digest, mine.weights) == (yours.digest, yours.weights)
    return same and mine.role in _LAYERED and yours.role in _LAYERED


def _drafts(proposer: ModelOffer, verifier: ModelOffer) -> bool:
    if proposer.role is not Role.PROPOSER or verifier.role is not Role.VERIFIER:
        return False
    return proposer.weights == "" or (proposer.vocabulary != "" and proposer.vocabulary == verifier.vocabulary)


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
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host.lower()


def _is_loopback(host: IPv4Address | IPv6Address | str) -> bool:
    return host == "localhost" if isinstance(host, str) else host.is_loopback


def _leads_nowhere(host: IPv4Address | IPv6Address | str) -> bool:
    if isinstance(host, str):
        return False
    return host.is_unspecified or host.is_multicast or (isinstance(host, IPv6Address) and host.is_link_local)
