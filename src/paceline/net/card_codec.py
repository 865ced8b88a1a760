"""A card as fleet.proto's NodeCapability, and back.

What comes from a peer is read leniently where a later version may say more (an unknown role is left out) and strictly where a reader
relies on it: bytes that are no card raise `MalformedMessage`.

What a card may say. A member is trusted to belong, not to be right: figures that would upset a plan, names that would upset a log, and
lists without end are refused before they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from paceline.core.errors import MalformedMessage, MessageTooLarge
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.card import Device, Link, ModelOffer, ModelShape, NodeCard, Role, ShardState
from paceline.net.trust.certificates import is_address, is_node_id
from paceline.net.wire import fleet_pb2 as wire

MAX_CARD_BYTES = 64 << 10
"""Of a serialised card. Gossip has narrower bounds of its own."""
MAX_ADDRESSES = 64
MAX_MODELS = 1024
MAX_LINKS = 1024
MAX_DEVICES = 16
MAX_FORMATS = 16
"""Of weights, of one device."""
MAX_LAYERS = 1 << 16
MAX_STREAMS = 1 << 16
MAX_TEXT = 300
MAX_TTL_S = 86400
"""No card that is to live for longer is believed."""
MAX_NONCE_BYTES = 64
LATEST = 1 << 33
"""Seconds since 1970 that no clock shows."""
MOST = 1 << 62
"""Bytes that no machine has, versions that no clock reaches."""
FASTEST = 1e15
"""Bytes or tokens a second that nothing does."""


def check_size(data: bytes) -> None:
    """Before a card is decoded.

    Raises:
        MessageTooLarge: it is longer than any of ours.
    """
    if len(data) > MAX_CARD_BYTES:
        raise MessageTooLarge(f"A card of {len(data)} bytes; the bound is {MAX_CARD_BYTES}")


def check_card(card: NodeCard) -> None:
    """Before a card of another node is believed.

    Raises:
        MalformedMessage: it says something that no node says.
    """
    if not is_node_id(card.node_id):
        raise MalformedMessage("A card names no node")
    who = f"The card of {card.node_id}"
    _within(who, "version", card.version, 1, MOST)
    _within(who, "TTL", card.ttl_s, 1, MAX_TTL_S)
    _within(who, "time", card.announced_at, 0, LATEST)
    _within(who, "instance nonce's length", len(card.instance), 1, MAX_NONCE_BYTES)
    if len(card.stamp_anchor) not in {0, 16}:
        raise MalformedMessage(f"{who} has a stamp anchor of {len(card.stamp_anchor)} bytes")
    for what, count, most in (
        ("addresses", len(card.addresses), MAX_ADDRESSES),
        ("models", len(card.models), MAX_MODELS),
        ("links", len(card.links), MAX_LINKS),
        ("devices", len(card.devices), MAX_DEVICES),
        ("formats", sum(len(device.weights) for device in card.devices), MAX_DEVICES * MAX_FORMATS),
    ):
        _within(who, f"number of {what}", count, 0, most)
    for address in card.addresses:
        if not is_address(address):
            raise MalformedMessage(f"{who} lists an address that is not host:port")
    _texts(who, (card.platform, card.backend, card.device, card.ring_address, card.mlx_version, card.software))
    for device in card.devices:
        _texts(who, (device.backend, device.name, *device.weights))
    for of in (card, *card.devices):
        for what, size in (
            ("memory", of.memory_total_bytes),
            ("free memory", of.memory_free_bytes),
            ("memory bandwidth", of.memory_bytes_per_s),
            ("memory for shards", of.shard_memory_bytes),
        ):
            _within(who, what, size, 0, MOST)
    for offer in card.models:
        _check_offer(who, offer)
    for link in card.links:
        _check_link(who, link)


def _check_offer(who: str, offer: ModelOffer) -> None:
    if not offer.model_id:
        raise MalformedMessage(f"{who} offers a model without a name")
    _texts(who, (offer.model_id, offer.weights, offer.digest, offer.numerics_id, offer.vocabulary, offer.tokenizer, offer.files))
    _rates(who, (offer.tokens_per_second, offer.prefill_tokens_per_second))
    _within(who, "model's size", offer.size_bytes, 0, MOST)
    _within(who, "load", offer.under_way, 0, 1 << 31)
    shape = offer.shape
    if offer.shard is not None:
        _check_shard(who, offer.shard, MAX_LAYERS if shape is None else shape.n_layers)
    if shape is None:
        return
    for what, size, most in (
        ("number of layers", shape.n_layers, MAX_LAYERS),
        ("hidden size", shape.hidden, 1 << 24),
        ("bytes a layer", shape.layer_bytes, MOST >> 16),
        ("bytes beside layers", shape.edge_bytes, MOST >> 16),
        ("bytes of KV", shape.kv_bytes_per_token_per_layer, 1 << 32),
        ("context", shape.max_context, 1 << 31),
        ("bytes a row", shape.row_bytes, 1 << 32),
    ):
        _within(who, what, size, 0, most)


def _check_shard(who: str, shard: ShardState, n_layers: int) -> None:
    _within(who, "shard's first layer", shard.layers.start, 0, n_layers - 1)
    _within(who, "shard's end", shard.layers.stop, shard.layers.start + 1, n_layers)
    _within(who, "shard's most streams", shard.max_streams, 1, MAX_STREAMS)
    _within(who, "shard's streams in use", shard.streams, 0, MAX_STREAMS)
    _within(who, "shard's queue", shard.queue_depth, 0, 1 << 31)
    _within(who, "shard's memory", shard.memory_bytes, 0, MOST)
    _within(who, "shard's load", shard.loaded_percent, 0, 100)


def _check_link(who: str, link: Link) -> None:
    if not is_node_id(link.to) or not is_address(link.address):
        raise MalformedMessage(f"{who} has a link to nobody or nowhere")
    _rates(who, (link.rtt_s, link.bytes_per_s))


def _within(who: str, what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise MalformedMessage(f"{who} has a {what} of {value}")


def _rates(who: str, rates: Iterable[float]) -> None:
    for rate in rates:
        if not (math.isfinite(rate) and 0 <= rate <= FASTEST):
            raise MalformedMessage(f"{who} has a figure of {rate}")


def _texts(who: str, texts: Iterable[str]) -> None:
    for text in texts:
        if len(text) > MAX_TEXT or not text.isprintable():
            raise MalformedMessage(f"{who} has a text that is too long or can't be shown")


_TO_WIRE = {
    Role.VERIFIER: wire.CAPABILITY_ROLE_VERIFIER,
    Role.PROPOSER: wire.CAPABILITY_ROLE_PROPOSER,
    Role.EMBEDDER: wire.CAPABILITY_ROLE_EMBEDDER,
    Role.TOOL: wire.CAPABILITY_ROLE_TOOL,
    Role.SHARD: wire.CAPABILITY_ROLE_SHARD,
    Role.PREFILL: wire.CAPABILITY_ROLE_PREFILL,
}
_FROM_WIRE = {number: role for role, number in _TO_WIRE.items()}


def write_card(card: NodeCard) -> bytes:
    """The bytes a node signs."""
    message = wire.NodeCapability(
        node_id=card.node_id,
        grpc_addresses=card.addresses,
        ring_address=card.ring_address,
        platform=card.platform,
        memory_total_bytes=card.memory_total_bytes,
        memory_free_bytes=card.memory_free_bytes,
        memory_bandwidth_bytes_per_second=card.memory_bytes_per_s,
        mlx_version=card.mlx_version,
        backend=card.backend,
        device=card.device,
        models=[_write_offer(offer) for offer in card.models],
        version=card.version,
        announced_at_unix=card.announced_at,
        ttl_seconds=card.ttl_s,
        instance_nonce=card.instance,
        leaving=card.leaving,
        software_version=card.software,
        links=[
            wire.Link(to_node_id=link.to, address=link.address, rtt_seconds=link.rtt_s, bytes_per_second=link.bytes_per_s)
            for link in card.links
        ],
        stamp_anchor=card.stamp_anchor,
        serves_shards=card.serves_shards,
        shard_memory_bytes=card.shard_memory_bytes,
        devices=[
            wire.Device(
                backend=device.backend,
                device=device.name,
                memory_total_bytes=device.memory_total_bytes,
                memory_free_bytes=device.memory_free_bytes,
                memory_bandwidth_bytes_per_second=device.memory_bytes_per_s,
                shard_memory_bytes=device.shard_memory_bytes,
                weights=device.weights,
            )
            for device in card.devices
        ],
    )
    return message.SerializeToString(deterministic=True)


def read_card(data: bytes) -> NodeCard:
    """The card in bytes that a node signed.

    Raises:
        MalformedMessage: they are no card.
    """
    try:
        message = wire.NodeCapability.FromString(data)
    except DecodeError as error:
        raise MalformedMessage("A card's bytes are not a NodeCapability") from error
    # Fields that a later version added stay where they are: a fleet is updated one machine at a time.
    if message.SerializeToString(deterministic=True) != data:
        raise MalformedMessage("A card is not written as any version writes it")
    if not message.node_id or not message.version:
        raise MalformedMessage("A card names no node or has no version")
    return NodeCard(
        node_id=NodeId(message.node_id),
        version=message.version,
        addresses=tuple(message.grpc_addresses),
        instance=message.instance_nonce,
        ttl_s=message.ttl_seconds,
        announced_at=message.announced_at_unix,
        platform=message.platform,
        backend=message.backend,
        device=message.device,
        memory_total_bytes=message.memory_total_bytes,
        memory_free_bytes=message.memory_free_bytes,
        memory_bytes_per_s=message.memory_bandwidth_bytes_per_second,
        models=tuple(_read_offer(offer, _FROM_WIRE[offer.role]) for offer in message.models if offer.role in _FROM_WIRE),
        links=tuple(Link(NodeId(link.to_node_id), link.address, link.rtt_seconds, link.bytes_per_second) for link in message.links),
        ring_address=message.ring_address,
        mlx_version=message.mlx_version,
        software=message.software_version,
        leaving=message.leaving,
        stamp_anchor=message.stamp_anchor,
        serves_shards=message.serves_shards,
        shard_memory_bytes=message.shard_memory_bytes,
        devices=tuple(
            Device(
                told.backend,
                told.device,
                told.memory_total_bytes,
                told.memory_free_bytes,
                told.memory_bandwidth_bytes_per_second,
                told.shard_memory_bytes,
                tuple(told.weights),
            )
            for told in message.devices
        ),
    )


def _write_offer(offer: ModelOffer) -> wire.ModelCapability:
    shape = offer.shape
    return wire.ModelCapability(
        model_id=offer.model_id,
        role=_TO_WIRE[offer.role],
        quantization=offer.weights,
        tokens_per_second=offer.tokens_per_second,
        prefill_tokens_per_second=offer.prefill_tokens_per_second,
        digest=offer.digest,
        warm=offer.warm,
        numerics_id=offer.numerics_id,
        holds_identity=offer.holds_identity,
        size_bytes=offer.size_bytes,
        vocabulary=offer.vocabulary,
        tokenizer_sha256=offer.tokenizer,
        under_way=offer.under_way,
        files_sha256=offer.files,
        shape=None
        if shape is None
        else wire.ModelShape(
            n_layers=shape.n_layers,
            hidden=shape.hidden,
            layer_bytes=shape.layer_bytes,
            edge_bytes=shape.edge_bytes,
            kv_bytes_per_token_per_layer=shape.kv_bytes_per_token_per_layer,
            max_context=shape.max_context,
            row_bytes=shape.row_bytes,
        ),
        shard=None if offer.shard is None else _write_shard(offer.shard),
    )


def _write_shard(shard: ShardState) -> wire.ShardCapability:
    return wire.ShardCapability(
        first_layer=shard.layers.start,
        stop_layer=shard.layers.stop,
        max_concurrent_streams=shard.max_streams,
        streams_in_use=shard.streams,
        queue_depth=shard.queue_depth,
        memory_bytes=shard.memory_bytes,
        loaded_percent=shard.loaded_percent,
    )


def _read_offer(offer: wire.ModelCapability, role: Role) -> ModelOffer:
    shape = offer.shape
    return ModelOffer(
        model_id=offer.model_id,
        role=role,
        weights=offer.quantization,
        tokens_per_second=offer.tokens_per_second,
        prefill_tokens_per_second=offer.prefill_tokens_per_second,
        digest=offer.digest,
        warm=offer.warm,
        numerics_id=offer.numerics_id,
        holds_identity=offer.holds_identity,
        size_bytes=offer.size_bytes,
        shape=ModelShape(
            shape.n_layers,
            shape.hidden,
            shape.layer_bytes,
            shape.edge_bytes,
            shape.kv_bytes_per_token_per_layer,
            shape.max_context,
            shape.row_bytes,
        )
        if offer.HasField("shape")
        else None,
        vocabulary=offer.vocabulary,
        tokenizer=offer.tokenizer_sha256,
        under_way=offer.under_way,
        files=offer.files_sha256,
        shard=_read_shard(offer.shard) if offer.HasField("shard") else None,
    )


def _read_shard(shard: wire.ShardCapability) -> ShardState:
    layers = LayerRange(shard.first_layer, shard.stop_layer)
    return ShardState(
        layers, shard.max_concurrent_streams, shard.streams_in_use, shard.queue_depth, shard.memory_bytes, shard.loaded_percent
    )
