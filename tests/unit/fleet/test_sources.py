"""Which node a model is fetched from."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.core.errors import ModelNotFound
from paceline.core.ids import NodeId
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import Eligible, Use
from paceline.fleet.placement import different_models, weights_sources

ONE, TWO = "1" * 64, "2" * 64


def card(name: str, *offers: ModelOffer, links: tuple[Link, ...] = (), leaving: bool = False) -> NodeCard:
    addresses = (f"{name}:1", f"{name}:2")
    return NodeCard(NodeId(name), 1, addresses, b"x", 120, 0, models=offers, links=links, leaving=leaving)


def offer(model_id: str = "org/m", digest: str = ONE, role: Role = Role.VERIFIER) -> ModelOffer:
    return ModelOffer(model_id, role, "int4", digest=digest, size_bytes=10)


def link(to: str, rate: float, address: str = "") -> Link:
    return Link(NodeId(to), address or f"{to}:1", 0.001, rate)


def ids(*cards: NodeCard, model: str = "org/m") -> list[str]:
    found = weights_sources(Eligible(Use.GIVE_WEIGHTS, NodeId("me"), tuple(cards)), model)
    return [source.node_id for source in found]


def test_the_best_link_comes_first_and_one_unmeasured_last() -> None:
    me = card("me", offer(), links=(link("fast", 1e9), link("slow", 1e6)))
    cards = [me, card("a", offer()), card("fast", offer()), card("slow", offer()), card("theirs", offer(), links=(link("me", 1e8),))]
    random.Random(0).shuffle(cards)
    assert ids(*cards) == ["fast", "theirs", "slow", "a"]


def test_who_leaves_has_only_layers_has_no_address_or_has_something_else_is_no_source() -> None:
    gone, shard = card("gone", offer(), leaving=True), card("shard", offer(role=Role.SHARD))
    unreachable, unknown = replace(card("far", offer()), addresses=()), card("new", offer(digest=""))
    assert ids(gone, shard, unreachable, unknown, card("other", offer("org/n", TWO))) == []


def test_a_model_goes_by_its_name_a_file_in_it_or_its_digest() -> None:
    named, same = card("a", offer("Org/M:big.gguf")), card("b", offer("mine"))
    for model in ("org/m:big.gguf", "ORG/M", ONE[:12], ONE):
        assert ids(named, same, model=model) == ["a", "b"], "equal digests, equal weights, whatever their name"
    assert ids(named, same, model=ONE[:11]) == []
    assert ids(named, same, model="org/m:small.gguf") == []


def test_two_models_of_one_name_are_told_apart_by_the_person() -> None:
    cards = (card("a", offer()), card("b", offer(digest=TWO)), card("c", offer("org/m:x.gguf", digest=TWO)))
    with pytest.raises(ModelNotFound, match=r"different models called 'org/m': .*111111111111, .*222222222222") as caught:
        ids(*cards)
    assert "digest" in caught.value.hint
    assert ids(*cards, model=TWO[:12]) == ["b", "c"]
    assert ids(card("a", offer("org/m:x.gguf"), offer("org/m:y.gguf", digest=TWO)), model="org/m:y.gguf") == ["a"]


def test_the_address_that_was_measured_best_comes_first() -> None:
    me = card("me", links=(link("a", 1e9, "a:2"), link("a", 1e6, "gone:1")))
    (source,) = weights_sources(Eligible(Use.GIVE_WEIGHTS, NodeId("me"), (me, card("a", offer()))), "org/m")
    assert source.addresses == ("a:2", "a:1")


@pytest.mark.parametrize(
    ("cards", "names"),
    [
        ([card("a", offer()), card("b", offer(digest=TWO))], ["org/m"]),
        ([card("a", offer()), card("b", offer())], []),
        ([card("a", offer()), card("b", offer(digest=""))], []),
        ([card("a", offer()), card("b", offer(digest=TWO, role=Role.SHARD))], []),
        ([card("a", offer(), offer(digest=TWO)), card("b", offer("org/n", TWO))], ["org/m"]),
    ],
    ids=["two files", "one file", "not read yet", "layers of another machine's file", "on one machine"],
)
def test_two_files_under_one_name_are_named_with_their_machines(cards: list[NodeCard], names: list[str]) -> None:
    said = different_models(cards)
    assert [name for name, _ in said] == names
    for _, words in said:
        assert ONE[:12] in words
        assert TWO[:12] in words
        assert "a" in words
