"""A card as fleet.proto's NodeCapability, and back.

A card from a peer is read leniently where a later version may say more (an unknown role is left out) and strictly where a reader relies on it: bytes
that are not a card raise `MalformedMessage`.

A member is trusted to belong to the fleet, but not to be right. Figures that would break a plan, names that would break a log line, and endless lists are
refused before they are read.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from paceline.core.errors import MalformedMessage, MessageTooLarge
from paceline.core.generation import Range
from paceline.core.ids import is_sha256
from paceline.core.via import MOST_NODES, is_node_mark
from paceline.fleet.card import (
    Device,
    DividedShape,
    EngineOffer,
    Link,
    MeasuredDraft,
    ModelOffer,
    ModelShape,
    NodeCard,
    Role,
    ShardState,
    StepTime,
)
from paceline.fleet.presets import MAX_TTL_S
from paceline.net.mapper import Bound, Codec, Length, Mapped, layer_span, or_none, refuse_with
from paceline.net.trust.certificates import is_address, is_node_id
from paceline.net.wire import fleet_pb2 as wire

MAX_CARD_BYTES = 64 << 10
"""Maximum size of a serialised card. Gossip has narrower bounds of its own."""
MAX_ADDRESSES = 64
MAX_MODELS = 1024
MAX_LINKS = 1024
MAX_DEVICES = 16
MAX_FORMATS = 16
"""Maximum number of weights formats of one device."""
MAX_LAYERS = 1 << 16
MAX_STREAMS = 1 << 16
MAX_STEPS, MAX_ROWS = 16, 1 << 16
MAX_DRAFTERS = 64
MAX_WORDS = 16
"""Maximum number of an engine's forms of prompt, and of its capabilities."""
MAX_TEXT = 300
MAX_NONCE_BYTES = 64
LATEST = 1 << 33
"""Unix seconds that no clock shows."""
MOST = 1 << 62
"""A number above every size in bytes, and above every version (microseconds of a clock)."""
FASTEST = 1e15
"""A rate, in bytes or tokens a second, that nothing reaches."""


_REFUSE: Final = refuse_with(MalformedMessage)
_ROLES: Final = {
    Role.VERIFIER: wire.CAPABILITY_ROLE_VERIFIER,
    Role.PROPOSER: wire.CAPABILITY_ROLE_PROPOSER,
    Role.EMBEDDER: wire.CAPABILITY_ROLE_EMBEDDER,
    Role.TOOL: wire.CAPABILITY_ROLE_TOOL,
    Role.SHARD: wire.CAPABILITY_ROLE_SHARD,
    Role.PREFILL: wire.CAPABILITY_ROLE_PREFILL,
}
_FROM_WIRE: Final = {number: role for role, number in _ROLES.items()}


def _is_shown(text: str) -> bool:
    return len(text) <= MAX_TEXT and text.isprintable()


def _is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 or empty. A file is named after a tokenizer's: any other text could lead out of the folder."""
    return not text or is_sha256(text)


_BOUNDS: Final[dict[str, Bound]] = {"str": _is_shown, "int": Range(0, MOST), "float": Range(0, FASTEST)}
"""Bounds by type, for each field without a bound of its own."""

_SHARD: Final = Codec(
    ShardState,
    wire.ShardCapability,
    _REFUSE,
    {
        "layers": layer_span(lambda layers: 0 <= layers.start < layers.stop <= MAX_LAYERS),
        "max_streams": Mapped("max_concurrent_streams", Range(1, MAX_STREAMS)),
        "streams": Mapped("streams_in_use", Range(0, MAX_STREAMS)),
        "queue_depth": Range(0, 1 << 31),
        "loaded_percent": Range(0, 100),
    },
    bounds=_BOUNDS,
)
_DIVIDED: Final = Codec(
    DividedShape,
    wire.DividedShape,
    _REFUSE,
    {
        "n_kv_heads": Mapped("kv_heads", Range(1, 1 << 16)),
        "ffn": Range(1, 1 << 24),
        "vocab": Mapped("vocabulary", Range(1, 1 << 28)),
        "attention_bytes": Range(0, MOST >> 16),
    },
)
_SHAPE: Final = Codec(
    ModelShape,
    wire.ModelShape,
    _REFUSE,
    {
        "n_layers": Range(0, MAX_LAYERS),
        "hidden": Range(0, 1 << 24),
        "layer_bytes": Range(0, MOST >> 16),
        "edge_bytes": Range(0, MOST >> 16),
        "kv_bytes_per_token_per_layer": Range(0, 1 << 32),
        "max_context": Range(0, 1 << 31),
        "row_bytes": Range(0, 1 << 32),
        "divided": _DIVIDED,
    },
)

_STEP: Final = Codec(StepTime, wire.StepTime, _REFUSE, {"rows": Range(1, MAX_ROWS), "seconds": Range(0, 1e6)})
_DRAFT: Final = Codec(
    MeasuredDraft,
    wire.MeasuredDraft,
    _REFUSE,
    {"node_id": is_node_id, "acceptance": Range(0, 1)},
    bounds=_BOUNDS,
)


_ENGINE: Final = Codec(
    EngineOffer,
    wire.EngineCapability,
    _REFUSE,
    {
        "engine": Mapped(bound=lambda name: name and _is_shown(name)),
        "takes": Length(0, MAX_WORDS, _is_shown),
        "quantisation": "quantization",
        "slots": Range(0, 1 << 16),
        "context": Range(0, 1 << 31),
        "load_s": Mapped("load_seconds", Range(0, 1e6)),
        "capacity": Range(0, 1 << 16),
        "first_token_s": Mapped("first_token_seconds", Range(0, 1e6)),
        "capabilities": Length(0, MAX_WORDS, _is_shown),
        "via": Length(0, MOST_NODES, is_node_mark),
    },
    bounds=_BOUNDS,
)


def _beyond_its_model(offer: ModelOffer) -> str:
    beyond = offer.shard is not None and offer.shape is not None and offer.shard.layers.stop > offer.shape.n_layers
    return "shard has layers that its model has not" if beyond else ""


_OFFER: Final = Codec(
    ModelOffer,
    wire.ModelCapability,
    _REFUSE,
    {
        "model_id": Mapped(bound=lambda name: name and _is_shown(name)),
        "role": Mapped(write=_ROLES.__getitem__, read=_FROM_WIRE.__getitem__),
        "weights": "quantization",
        "shape": _SHAPE,
        "shard": _SHARD,
        "tokenizer": Mapped("tokenizer_sha256", _is_digest),
        "under_way": Range(0, 1 << 31),
        "files": Mapped("files_sha256", _is_digest),
        "steps": Mapped(bound=Length(0, MAX_STEPS), codec=_STEP),
        "drafts": Mapped(bound=Length(0, MAX_DRAFTERS), codec=_DRAFT),
        "engine": _ENGINE,
    },
    bounds=_BOUNDS,
    also=_beyond_its_model,
)
_LINK: Final = Codec(
    Link,
    wire.Link,
    _REFUSE,
    {
        "to": Mapped("to_node_id", is_node_id),
        "address": is_address,
        "rtt_s": "rtt_seconds",
        "bytes_per_s": "bytes_per_second",
        "network_s": or_none(_BOUNDS["float"], "network_seconds"),
    },
    bounds=_BOUNDS,
)
_DEVICE: Final = Codec(
    Device,
    wire.Device,
    _REFUSE,
    {"name": "device", "memory_bytes_per_s": "memory_bandwidth_bytes_per_second", "weights": Length(0, MAX_FORMATS, _is_shown)},
    bounds=_BOUNDS,
)
_CARD: Final = Codec(
    NodeCard,
    wire.NodeCapability,
    _REFUSE,
    {
        "node_id": is_node_id,
        "version": Range(1, MOST),
        "addresses": Mapped("grpc_addresses", Length(0, MAX_ADDRESSES, is_address)),
        "instance": Mapped("instance_nonce", Length(1, MAX_NONCE_BYTES)),
        "ttl_s": Mapped("ttl_seconds", Range(1, MAX_TTL_S)),
        "announced_at": Mapped("announced_at_unix", Range(0, LATEST)),
        "memory_bytes_per_s": "memory_bandwidth_bytes_per_second",
        "models": Mapped(
            bound=Length(0, MAX_MODELS),
            codec=_OFFER,
            read=lambda offers: tuple([_OFFER.read(offer) for offer in offers if offer.role in _FROM_WIRE]),
        ),
        "links": Mapped(bound=Length(0, MAX_LINKS), codec=_LINK),
        "software": "software_version",
        "devices": Mapped(bound=Length(0, MAX_DEVICES), codec=_DEVICE),
    },
    bounds=_BOUNDS,
)


def check_size(data: bytes) -> None:
    """Check the size of a serialised card before it is decoded.

    Raises:
        MessageTooLarge: it is longer than `MAX_CARD_BYTES`.
    """
    if len(data) > MAX_CARD_BYTES:
        raise MessageTooLarge(f"A card of {len(data)} bytes; the bound is {MAX_CARD_BYTES}")


def check_card(card: NodeCard) -> None:
    """Check the values in a card of another node before they are believed.

    Raises:
        MalformedMessage: a value is outside of its bound.
    """
    _CARD.check(card, f"The card of {card.node_id}" if is_node_id(card.node_id) else "A card")


def write_card(card: NodeCard) -> bytes:
    """Serialise a card to the bytes that its node signs."""
    return _CARD.write(card).SerializeToString(deterministic=True)


def read_card(data: bytes) -> NodeCard:
    """Read a card from the bytes that its node signed.

    Raises:
        MalformedMessage: the bytes are not a card, or are not in the one form in which a card is serialised.
    """
    try:
        message = wire.NodeCapability.FromString(data)
    except DecodeError as error:
        raise MalformedMessage("A card's bytes are not a NodeCapability") from error
    # Fields that a later version added are kept, because a fleet is updated one machine at a time.
    if message.SerializeToString(deterministic=True) != data:
        raise MalformedMessage("A card is not written as any version writes it")
    if not message.node_id or not message.version:
        raise MalformedMessage("A card names no node or has no version")
    return _CARD.read(message)
