"""Merging is a join: whatever order, repetition or detour facts arrive by, at one moment, the same is held."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.fleet.cards import TTL_S, card, passed, revocation

from paceline.core.ids import NodeId
from paceline.fleet.card import RevocationList, SealedList, SealedRevocation
from paceline.fleet.eligibility import Revocations
from paceline.fleet.messages import PassedCard
from paceline.fleet.presets import Bounds
from paceline.fleet.registry import CardRegistry

NOW = 10_000.0
NODES = ("a", "b", "c", "own")

# A node's versions rise over all its certificates: versions 3 and 4 come with the second.
cards = st.builds(
    lambda node_id, version, instance, leaving, beat, age_s: passed(
        card(node_id, version, instance=instance, leaving=leaving), beat=beat, age_s=age_s, issued_at=1000 if version < 3 else 2000
    ),
    st.sampled_from(NODES),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([0.0, 1.0, 60.0, TTL_S - 1.0, float(TTL_S), TTL_S + 1.0]),
)
revocations = st.builds(revocation, st.sampled_from(NODES), st.sampled_from([500, 1000, 2000]))
facts = st.lists(st.one_of(cards, revocations), max_size=12)
Fact = PassedCard | SealedRevocation


class Holder:
    """A registry and its revocations, taking one fact at a time."""

    def __init__(self, own: str = "own") -> None:
        self.revocations = Revocations()
        self.registry = CardRegistry(NodeId(own), self.revocations)

    def take(self, facts: list[Fact], now: float = NOW) -> Holder:
        for fact in facts:
            if isinstance(fact, SealedRevocation):
                self.revocations.merge([fact])
                self.registry.drop_revoked()
            else:
                self.registry.merge(fact, now)
        return self

    def all(self, now: float = NOW) -> list[Fact]:
        apart = self.registry.compare((), now, complete=True, bounds=Bounds(max_cards=100))
        return [*self.revocations.all(), *apart.cards]

    def live(self) -> object:
        """What is held, without floors: those are never told to others."""
        return self.registry.state()[0], self.revocations.all()


@given(facts, st.randoms(use_true_random=False))
def test_order_does_not_matter(given_facts: list[Fact], rng: random.Random) -> None:
    shuffled = list(given_facts)
    rng.shuffle(shuffled)
    assert Holder().take(given_facts).registry.state() == Holder().take(shuffled).registry.state()


@given(facts)
def test_repetition_does_not_matter(given_facts: list[Fact]) -> None:
    once = Holder().take(given_facts)
    state = once.registry.state()
    assert once.take(given_facts).registry.state() == state
    assert once.take(once.all()).registry.state() == state


@given(facts, facts, facts)
def test_grouping_does_not_matter(first: list[Fact], second: list[Fact], third: list[Fact]) -> None:
    left = Holder().take(Holder().take(first).all()).take(second)
    left = Holder().take(left.all()).take(third)
    right = Holder().take(second).take(third)
    right = Holder().take(first).take(right.all())
    assert left.live() == right.live()


@given(facts, facts)
def test_two_that_exchange_hold_the_same(first: list[Fact], second: list[Fact]) -> None:
    one, other = Holder().take(first), Holder().take(second)
    ones, others = one.all(), other.all()
    assert one.take(others).live() == other.take(ones).live()


@given(facts, st.lists(st.floats(0.0, 200.0), max_size=6))
def test_a_view_never_shows_a_card_past_its_ttl_nor_one_that_is_revoked_or_said_goodbye(
    given_facts: list[Fact], waits: list[float]
) -> None:
    holder, now = Holder(), NOW
    for place, fact in enumerate(given_facts):
        now += waits[place % len(waits)] if waits else 0.0
        holder.take([fact], now)
        for live in holder.registry.snapshot(now):
            assert 0 <= live.age_s < live.card.ttl_s
            assert not live.card.leaving
        shown = {live.card.node_id for live in holder.registry.snapshot(now)}
        void = {sealed.revocation.node_id for sealed in holder.revocations.all() if sealed.revocation.not_after >= 2000}
        assert not shown & void


@given(st.lists(revocations, min_size=1, max_size=8))
def test_revocations_only_grow(given_revocations: list[SealedRevocation]) -> None:
    held = Revocations()
    reach = [
        (held.merge([fact]), {sealed.revocation.node_id: sealed.revocation.not_after for sealed in held.all()})[1]
        for fact in given_revocations
    ]
    for before, after in pairwise(reach):
        assert all(after[node_id] >= not_after for node_id, not_after in before.items())


def test_of_two_lists_of_one_second_all_nodes_keep_the_same() -> None:
    a, b = Revocations(), Revocations()
    lists = [SealedList(RevocationList(9, a.digest, NodeId(name)), name.encode()) for name in ("a", "b")]
    a.complete(lists[0])
    b.complete(lists[1])
    for one, other in ((a, b), (b, a)):
        one.complete(other.completed)
    assert a.completed == b.completed == lists[1]
