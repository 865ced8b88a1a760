"""What a card may say. A member is trusted to belong, not to be right: figures that would upset a plan, names that would upset a log, and
lists without end are refused before they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.core.errors import MalformedMessage, MessageTooLarge
from paceline.fleet.card import Link, ModelOffer, NodeCard, ShardState
from paceline.net.trust.addresses import is_address, is_node_id

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
