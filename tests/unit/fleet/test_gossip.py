"""What a node does of itself, on requests, replies and silence."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.unit.fleet.cards import card, passed, revocation, sealed

from paceline.core.ids import NodeId
from paceline.fleet.gossip import Gossip
from paceline.fleet.messages import (
    Appeared,
    Changed,
    Digest,
    Effect,
    ExchangeRequest,
    Expired,
    GossipCall,
    Left,
    PassedCard,
    Renew,
    Reply,
    Reseal,
    Restarted,
    Revoked,
    node_key,
)
from paceline.fleet.presets import Bounds, Preset, desk, lan, simulation
from paceline.fleet.registry import CLOCKS_APART_S, next_version

OWN, PEER = NodeId("own"), NodeId("peer")


def gossip(preset: Preset | None = None, seeds: tuple[str, ...] = (), version: int = 10) -> Gossip:
    node = Gossip(OWN, preset or lan(), random.Random(0), seeds)
    node.announce(sealed(card("own", version)), 0.0)
    return node


def told(node: Gossip, *cards: PassedCard, at: float = 0.0) -> tuple[Effect, ...]:
    return node.on_request(ExchangeRequest(cards=cards), PEER, at).effects


def ticked(node: Gossip, now: float) -> tuple[Effect, ...]:
    """Tick, and sign the node's card again where that is asked for."""
    effects = node.tick(now)
    own = node.own_card
    if Renew() not in effects or own is None:
        return effects
    node.announce(sealed(own.card, beat=own.beat + 1), now)
    return (*effects, *node.tick(now))


def calls(effects: tuple[Effect, ...]) -> list[GossipCall]:
    return [effect for effect in effects if isinstance(effect, GossipCall)]


def test_nothing_is_called_before_there_is_a_card_to_show() -> None:
    node = Gossip(OWN, lan(), random.Random(0), ["seed:1"])
    assert node.next_tick is None
    assert ticked(node, 0.0) == ()


def test_a_node_calls_its_seed_at_once() -> None:
    node = gossip(seeds=("seed:1",))
    assert node.next_tick == 0.0
    (call,) = calls(ticked(node, 0.0))
    assert (call.addresses, call.node_id, call.timeout_s) == (("seed:1",), None, 5.0)
    assert call.request.digests == {Digest(node_key(OWN), 10, 0)}


def test_a_seed_that_is_a_member_is_no_longer_called_besides() -> None:
    node = gossip(seeds=("peer-0:7000",))
    told(node, passed(card("peer", 1)))
    (call,) = calls(ticked(node, 0.0))
    assert call.node_id == PEER


def test_a_seed_that_turns_out_to_be_this_node_is_called_once() -> None:
    node = gossip(seeds=("127.0.0.1:1",))
    (call,) = calls(ticked(node, 0.0))
    assert node.on_reply(call.id, Reply(), OWN, 0.0) == ()
    assert calls(ticked(node, node.next_tick or 0.0)) == []


def test_a_new_seed_brings_the_next_round_forward() -> None:
    node = gossip()
    ticked(node, 0.0)
    assert (node.next_tick or 0) > 20
    node.add_seed("new:1", 1.0)
    assert node.next_tick == pytest.approx(3.0)
    assert [call.addresses for call in calls(ticked(node, 3.0))] == [("new:1",)]


def test_what_anybody_can_announce_takes_neither_the_place_nor_the_turn_of_what_was_given() -> None:
    given = ("given:1", "given:2")
    node = gossip(seeds=given)
    called: list[str] = []
    for number in range(1000):
        node.add_seed(f"flood:{number + 1}", 0.0)
    now = 0.0
    for _ in range(8):
        now = node.next_tick or now
        called += [call.addresses[0] for call in calls(ticked(node, now))]
    assert called[:4:2] == list(given)
    assert 2 * sum(address in given for address in called) >= len(called)


def test_what_is_remembered_takes_not_the_place_of_what_a_person_gave() -> None:
    node = gossip(seeds=("given:1", *(f"remembered:{number + 1}" for number in range(100))))
    assert "given:1" in [call.addresses[0] for call in calls(ticked(node, 0.0))]


def test_what_the_peer_wants_follows_in_a_second_call_and_no_third() -> None:
    node = gossip(seeds=("seed:1",))
    (call,) = calls(ticked(node, 0.0))
    (second,) = calls(node.on_reply(call.id, Reply(wanted=(Digest(node_key(OWN), 0),)), PEER, 0.0))
    assert second.request.digests is None
    assert [one.sealed.card.node_id for one in second.request.cards] == [OWN]
    assert node.on_reply(second.id, Reply(), PEER, 0.0) == ()


def test_a_reply_to_a_call_that_was_given_up_changes_nothing() -> None:
    node = gossip(seeds=("seed:1",))
    (call,) = calls(ticked(node, 0.0))
    node.on_failure(call.id)
    assert node.on_reply(call.id, Reply(cards=(passed(card("peer", 1)),)), PEER, 0.0) == ()
    assert node.view(0.0).ids == (OWN,)


def test_a_certificate_goes_only_to_those_who_hold_no_card_that_was_signed_by_it() -> None:
    renewed_at = 2_000_000
    clear = (renewed_at + CLOCKS_APART_S) * 1_000_000
    node = Gossip(OWN, lan(), random.Random(0))
    node.announce(sealed(card("own", clear + 9), renewed_at), 0.0)
    for version, with_certificate in ((0, True), (renewed_at, True), (clear - 1, True), (clear, False)):
        theirs = frozenset([Digest(node_key(OWN), version)]) if version else frozenset[Digest]()
        (handed,) = node.on_request(ExchangeRequest(digests=theirs), PEER, 0.0).reply.cards
        assert handed.with_certificate is with_certificate


def test_whose_card_could_not_be_checked_is_left_out_of_digests_until_it_comes_whole() -> None:
    node = gossip()
    told(node, passed(card("peer", 1)))
    node.lacks_certificate(PEER)
    (call,) = calls(ticked(node, 0.0))
    assert call.request.digests == {Digest(node_key(OWN), 10, 0)}
    told(node, passed(card("peer", 2)))
    (call,) = calls(ticked(node, node.next_tick or 0.0))
    assert Digest(node_key(PEER), 2, 0) in (call.request.digests or ())


def test_more_cards_than_a_message_carries_follow_in_further_calls() -> None:
    bounds = Bounds(max_nodes=100, max_cards=10)
    full, newcomer = gossip(replace(lan(), bounds=bounds)), Gossip(PEER, replace(lan(), bounds=bounds), random.Random(1), ["own:1"])
    told(full, *(passed(card(f"n{number:02}", 1)) for number in range(35)))
    newcomer.announce(sealed(card("peer", 1)), 0.0)
    waiting, made = calls(ticked(newcomer, 0.0)), 0
    while waiting:
        made += 1
        call = waiting.pop()
        reply = full.on_request(call.request, PEER, 0.0).reply
        assert len(reply.cards) <= 10
        waiting += calls(newcomer.on_reply(call.id, reply, OWN, 0.0))
    assert made == 4
    assert len(newcomer.view(0.0).ids) == 37
    assert PEER in full.members


def test_an_exchange_ends_after_so_many_calls_whatever_the_peer_says() -> None:
    node = gossip(seeds=("seed:1",))
    waiting, made = calls(ticked(node, 0.0)), 0
    while waiting:
        made += 1
        waiting += calls(node.on_reply(waiting.pop().id, Reply(more=True), PEER, 0.0))
    assert made == lan().max_calls


def test_events_of_a_life() -> None:
    node = gossip()
    first = card("peer", 1)
    assert told(node, passed(first)) == (Appeared(first),)
    assert told(node, passed(first)) == ()
    assert told(node, passed(first, beat=2)) == ()
    changed = card("peer", 2)
    assert told(node, passed(changed)) == (Changed(changed),)
    again = card("peer", 3, instance=1)
    assert told(node, passed(again)) == (Restarted(again),)
    assert told(node, passed(card("peer", 4, instance=1, leaving=True))) == (Left(PEER),)
    assert told(node, passed(again)) == ()
    back = card("peer", 5, instance=2)
    assert told(node, passed(back)) == (Appeared(back),)
    assert Expired(PEER) not in ticked(node, 119.9)
    assert node.next_tick == 120.0
    assert ticked(node, 120.0)[0] == Expired(PEER)


def test_a_card_signed_again_stays_alive_and_its_age_counts() -> None:
    node, first = gossip(), card("peer", 1)
    told(node, passed(first, age_s=100.0))
    assert told(node, passed(first, beat=1, age_s=30.0), at=10.0) == ()
    held = node.view(99.0).get(PEER)
    assert held is not None
    assert (held.age_s, held.beat) == (119.0, 1)
    assert node.view(100.0).get(PEER) is None


def test_a_peer_that_holds_the_card_gets_only_the_newer_signature() -> None:
    node = gossip()
    told(node, passed(card("peer", 1), beat=5))
    for theirs, with_card in ((Digest(node_key(PEER), 1, 4), False), (Digest(node_key(PEER), 0), True)):
        (handed,) = node.on_request(ExchangeRequest(digests=frozenset([theirs, Digest(node_key(OWN), 10)])), PEER, 0.0).reply.cards
        assert (handed.sealed.beat, handed.with_card) == (5, with_card)


def test_an_own_card_that_others_hold_in_a_higher_version_is_risen_above_once_a_round() -> None:
    node = gossip(version=10)
    ahead = passed(card("own", 50, instance=7))
    (reseal,) = told(node, ahead)
    assert isinstance(reseal, Reseal)
    assert next_version(10, 0.0, reseal.above) == 51
    assert told(node, ahead) == ()
    assert node.view(0.0).cards[0].version == 10
    node.announce(sealed(card("own", 51)), 1.0)
    assert told(node, ahead, at=40.0) == ()


def test_a_claim_of_a_higher_own_version_is_believed_only_with_the_card() -> None:
    node = gossip(version=10)
    answered = node.on_request(ExchangeRequest(digests=frozenset([Digest(node_key(OWN), 2**63)])), PEER, 0.0)
    assert answered.effects == ()
    assert answered.reply.wanted == (Digest(node_key(OWN), 10),)


@pytest.mark.parametrize("restamp_s", [30.0, 120.0])
def test_a_node_signs_its_unchanged_card_again_and_the_same_round_tells_it(restamp_s: float) -> None:
    preset = replace(lan(), ttl_s=600, restamp_s=restamp_s)
    node, now = gossip(preset), 0.0
    told(node, passed(card("peer", 1, ttl_s=10**6)))
    asked: list[float] = []
    for _ in range(40):
        now = node.next_tick or now
        effects = ticked(node, now)
        asked += [now] * (Renew() in effects)
        (call, *_) = calls(effects)
        assert Digest(node_key(OWN), 10, len(asked)) in (call.request.digests or ())
    assert all(restamp_s - lan().exchange_s <= later - earlier <= restamp_s + lan().exchange_s for earlier, later in pairwise(asked))
    assert len(asked) >= 40 * lan().exchange_s // restamp_s - 1


def test_revocations_go_out_ahead_and_a_revoked_card_is_dropped() -> None:
    node = gossip(seeds=("seed:1",))
    told(node, passed(card("peer", 1)), passed(card("friend", 1)))
    ticked(node, 0.0)
    word = revocation("peer", 2000)
    assert node.learn([word], 5.0) == (Revoked(PEER, 2000),)
    assert node.view(5.0).ids == ("friend", "own")
    assert node.voids(PEER, 2000)
    assert not node.voids(PEER, 2001)
    assert node.next_tick == 5.0
    assert all(call.request.revocations == (word,) for call in calls(ticked(node, 5.0)))
    assert all(call.request.revocations == () for call in calls(ticked(node, node.next_tick or 0.0)))


def test_a_leaving_node_says_so_to_everybody_in_one_call_each() -> None:
    node = gossip()
    told(node, *(passed(card(f"n{number}", 1)) for number in range(10)))
    ticked(node, 0.0)
    goodbye = sealed(card("own", 11, leaving=True))
    node.announce(goodbye, 1.0)
    made = calls(ticked(node, 1.0))
    assert len(made) == 10
    assert all(call.request.digests is None and call.request.cards[0].sealed == goodbye for call in made)


def test_a_lost_node_is_called_again_one_a_round() -> None:
    node = gossip()
    told(node, passed(card("peer", 1)))
    now = 0.0
    while node.members:
        now = node.next_tick or now
        ticked(node, now)
    now = node.next_tick or now
    (call,) = calls(ticked(node, now))
    assert (call.node_id, call.addresses) == (PEER, ("peer-0:7000",))


def test_only_this_node_s_own_card_of_a_higher_version_is_announced() -> None:
    node = gossip(version=10)
    with pytest.raises(ValueError, match="announces a card of peer"):
        node.announce(sealed(card("peer", 11)), 0.0)
    with pytest.raises(ValueError, match="not above"):
        node.announce(sealed(card("own", 10)), 0.0)
    node.announce(sealed(card("own", 10), beat=3), 0.0)
    with pytest.raises(ValueError, match="not above"):
        node.announce(sealed(card("own", 10), beat=3), 0.0)


def test_versions_rise_whatever_the_clock_says() -> None:
    assert next_version(0, 1_750_000_000.5) == 1_750_000_000_500_000
    assert next_version(5_000_000, 1.0) == 5_000_001
    assert next_version(5_000_000, 1.0, above=9_000_000) == 9_000_001


@pytest.mark.parametrize("preset", [desk(), lan(), simulation()])
def test_a_preset_forgives_lost_rounds(preset: Preset) -> None:
    assert preset.ttl_s >= 3 * preset.exchange_s
    assert preset.ttl_s >= 2 * preset.restamp_s + preset.exchange_s
    assert preset.rpc_timeout_s < preset.exchange_s
    assert preset.fanout <= preset.fanout_news
