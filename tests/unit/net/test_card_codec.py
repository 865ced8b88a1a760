"""A card survives the wire whole; bytes that are no card are refused with a typed error."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import MalformedMessage
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.card import Device, Link, ModelOffer, ModelShape, NodeCard, Role, ShardState
from paceline.net.card_codec import check_card, read_card, write_card
from paceline.net.wire import fleet_pb2 as wire

names = st.text(max_size=20)
sizes = st.integers(0, (1 << 64) - 1)
small = st.integers(0, (1 << 32) - 1)
rates = st.floats(allow_nan=False)
shapes = st.builds(ModelShape, small, small, sizes, sizes, sizes, small)
shards = st.builds(ShardState, st.builds(LayerRange, small, small), small, small, small, sizes)
offers = st.builds(
    ModelOffer,
    names,
    st.sampled_from(Role),
    names,
    rates,
    rates,
    names,
    st.booleans(),
    names,
    st.booleans(),
    sizes,
    st.none() | shapes,
    names,
    st.none() | shards,
    names,
    small,
)
links = st.builds(Link, names.map(NodeId), names, rates, rates)
cards = st.builds(
    NodeCard,
    node_id=st.text(min_size=1, max_size=20).map(NodeId),
    version=st.integers(1, (1 << 64) - 1),
    addresses=st.lists(names, max_size=3).map(tuple),
    instance=st.binary(max_size=16),
    ttl_s=small,
    announced_at=st.integers(-(1 << 63), (1 << 63) - 1),
    platform=names,
    backend=names,
    device=names,
    memory_total_bytes=sizes,
    memory_free_bytes=sizes,
    memory_bytes_per_s=sizes,
    models=st.lists(offers, max_size=3).map(tuple),
    links=st.lists(links, max_size=3).map(tuple),
    ring_address=names,
    mlx_version=names,
    software=names,
    leaving=st.booleans(),
    serves_shards=st.booleans(),
    shard_memory_bytes=sizes,
    devices=st.lists(st.builds(Device, names, names, sizes, sizes, sizes, sizes, st.lists(names, max_size=3).map(tuple)), max_size=2).map(
        tuple
    ),
)


@given(cards)
def test_a_card_survives_the_wire(card: NodeCard) -> None:
    assert read_card(write_card(card)) == card


@given(cards)
def test_equal_cards_have_equal_bytes(card: NodeCard) -> None:
    assert write_card(card) == write_card(read_card(write_card(card)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_card_or_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        assert read_card(data).node_id


@pytest.mark.parametrize("message", [wire.NodeCapability(version=1), wire.NodeCapability(node_id="a")])
def test_a_card_without_a_name_or_a_version_is_refused(message: wire.NodeCapability) -> None:
    with pytest.raises(MalformedMessage):
        read_card(message.SerializeToString())


def test_a_role_of_a_later_version_is_left_out() -> None:
    message = wire.NodeCapability(node_id="a", version=1)
    message.models.add(model_id="m", role=wire.CAPABILITY_ROLE_VERIFIER)
    message.models.add(model_id="m").MergeFromString(bytes([2 << 3, 99]))
    assert [offer.model_id for offer in read_card(message.SerializeToString()).models] == ["m"]


@pytest.mark.parametrize("field", ["tokenizer", "files"])
@pytest.mark.parametrize("text", ["../../x", "/etc/x", "d" * 63, "D" * 64, "d" * 64 + "\n", "d" * 300])
def test_what_a_file_is_named_after_is_a_digest(field: str, text: str) -> None:
    card = NodeCard(NodeId("a"), version=1, addresses=(), instance=b"i", ttl_s=30, announced_at=0)
    check_card(replace(card, models=(replace(ModelOffer("m", Role.VERIFIER, "int4"), **{field: "d" * 64}),)))
    with pytest.raises(MalformedMessage):
        check_card(replace(card, models=(replace(ModelOffer("m", Role.VERIFIER, "int4"), **{field: text}),)))
