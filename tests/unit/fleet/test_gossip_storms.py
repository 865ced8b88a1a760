"""A peer that means harm, or has gone mad: what it costs is bounded, and it is told so with a typed error."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
from tests.unit.fleet.cards import card, passed, sealed

from paceline.core.errors import GossipRefused, MessageTooLarge, PeerFloods
from paceline.core.ids import NodeId
from paceline.fleet.gossip import Gossip
from paceline.fleet.intake import Shares
from paceline.fleet.messages import Digest, ExchangeRequest, GossipCall, Ignored
from paceline.fleet.presets import Bounds, Measures, lan

MALLORY = NodeId("mallory")
BOUNDS = Bounds(max_nodes=64, max_cards=16)


def gossip(bounds: Bounds = BOUNDS) -> Gossip:
    node = Gossip(NodeId("own"), replace(lan(), bounds=bounds), random.Random(0))
    node.announce(sealed(card("own", 1)), 0.0)
    return node


def test_a_flooding_peer_is_refused_told_when_to_come_back_and_heard_then() -> None:
    node = gossip()
    for _ in range(BOUNDS.burst):
        node.admit(MALLORY, Measures(), 0.0)
    with pytest.raises(PeerFloods) as refusal:
        node.admit(MALLORY, Measures(), 0.0)
    assert 0 < refusal.value.retry_after_s < 30
    assert "mallory" in refusal.value.message
    with pytest.raises(GossipRefused):
        node.admit(MALLORY, Measures(), refusal.value.retry_after_s / 2)
    node.admit(MALLORY, Measures(), refusal.value.retry_after_s * 1.01)


def test_one_peer_s_flood_takes_nothing_from_another() -> None:
    node = gossip()
    for _ in range(BOUNDS.burst):
        node.admit(MALLORY, Measures(), 0.0)
    for _ in range(1000):
        with pytest.raises(PeerFloods):
            node.admit(MALLORY, Measures(), 0.0)
    node.admit(NodeId("friend"), Measures(), 0.0)


def test_normal_rounds_are_far_below_a_peer_s_share() -> None:
    node = gossip()
    for call in range(1000):
        # Four exchanges of two calls in every round.
        node.admit(MALLORY, Measures(digests=20), call * 30.0 / 8)


def test_buckets_are_kept_of_so_many_peers_only() -> None:
    shares = Shares(burst=2, period_s=30.0, max_peers=10)
    for number in range(5000):
        shares.take(f"peer-{number}", float(number))
    assert len(shares) == 10


@pytest.mark.parametrize(
    "measures",
    [
        Measures(digests=1_000_000),
        Measures(cards=17),
        Measures(cards=1, largest_card_bytes=1_000_000),
        Measures(revocations=1_000_000),
    ],
)
def test_more_than_the_bounds_is_refused_before_it_is_looked_at(measures: Measures) -> None:
    with pytest.raises(MessageTooLarge, match="the bound is"):
        gossip().admit(MALLORY, measures, 0.0)


def test_a_message_at_the_bounds_is_admitted() -> None:
    gossip().admit(
        MALLORY,
        Measures(
            digests=BOUNDS.max_nodes,
            cards=BOUNDS.max_cards,
            largest_card_bytes=BOUNDS.max_card_bytes,
            revocations=BOUNDS.max_revocations,
        ),
        0.0,
    )


def test_thirty_thousand_ids_leave_a_full_registry_and_bounded_memory() -> None:
    node, now = gossip(), 0.0
    friend = card("friend", 1)
    node.on_request(ExchangeRequest(cards=(passed(friend),)), NodeId("friend"), now)
    template = card("x", 1, ttl_s=10)

    def storm(waves: range) -> int:
        ignored = 0
        for wave in waves:
            ids = (NodeId(f"id-{wave}-{number}") for number in range(100))
            cards = tuple(passed(replace(template, node_id=node_id)) for node_id in ids)
            answered = node.on_request(ExchangeRequest(digests=frozenset(), cards=cards), MALLORY, now + wave)
            ignored += sum(effect.count for effect in answered.effects if isinstance(effect, Ignored))
            assert len(answered.reply.cards) <= BOUNDS.max_cards
            node.on_request(ExchangeRequest(cards=(passed(friend, beat=wave // 20 + 1),)), NodeId("friend"), now + wave)
            assert len(node.members) < BOUNDS.max_nodes
        return ignored

    storm(range(50))
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    assert storm(range(50, 300)) > 15_000
    grown = sum(row.size_diff for row in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    # What is kept does not depend on how many there were: a million ids take as much.
    assert grown < 1_000_000
    assert "friend" in node.members


def test_a_refusal_is_one_effect_a_message_whatever_it_holds() -> None:
    node = gossip()
    cards = tuple(passed(card(f"n{number}", 1)) for number in range(200))
    effects = node.on_request(ExchangeRequest(cards=cards), MALLORY, 0.0).effects
    (told,) = [effect for effect in effects if isinstance(effect, Ignored)]
    assert told.peer == MALLORY
    assert told.count == 200 - (BOUNDS.max_nodes - 1)


def test_digests_of_ids_that_do_not_exist_are_asked_for_and_not_remembered() -> None:
    node = gossip()
    made_up = frozenset(Digest(key, 1, 0) for key in range(BOUNDS.max_nodes))
    reply = node.on_request(ExchangeRequest(digests=made_up), MALLORY, 0.0).reply
    assert len(reply.wanted) == BOUNDS.max_nodes
    assert not node.members
    assert node.on_request(ExchangeRequest(digests=frozenset()), NodeId("friend"), 0.0).reply.wanted == ()


def test_certificates_that_are_missing_for_made_up_ids_are_not_remembered() -> None:
    node = gossip()
    for number in range(1000):
        node.lacks_certificate(NodeId(f"made-up-{number}"))
    assert not node._registry._lacking


def test_calls_that_never_come_back_are_forgotten() -> None:
    node = gossip()
    node.on_request(ExchangeRequest(cards=tuple(passed(card(f"n{number}", 1, ttl_s=10**6)) for number in range(20))), MALLORY, 0.0)
    now, calls = 0.0, 0
    for _ in range(300):
        now = node.next_tick or now
        calls += sum(isinstance(effect, GossipCall) for effect in node.tick(now))
    assert calls > 300
    assert len(node._exchanges) <= 2 * (lan().fanout_news + 1)


def test_a_message_is_bounded_in_bytes_too_and_always_carries_something() -> None:
    bounds = Bounds(max_cards=4, max_message_bytes=100)
    assert bounds.fitting([]) == 0
    assert bounds.fitting([10] * 9) == 4
    assert bounds.fitting([40, 40, 40]) == 2
    assert bounds.fitting([1000, 1]) == 1
