"""What a node says of itself, and what others hold of it. Values only: nothing here reads a clock, a disk or a wire.

A card travels as the bytes its node signed (`SealedCard.sealed`), so what is passed on is what was said. `proto/paceline/v1/fleet.proto`
describes the same fields on the wire; the codec is `net.card_codec`.
Figures have two significant digits, and change only when that means something, so that plans don't flap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, ModelRef


class Role(StrEnum):
    """What a model can be used for on a node."""

    VERIFIER = "verifier"
    """Runs the whole model and decides its tokens."""
    PROPOSER = "proposer"
    """Proposes tokens that a verifier accepts or rejects."""
    EMBEDDER = "embedder"
    TOOL = "tool"
    SHARD = "shard"
    """Runs a range of layers."""
    PREFILL = "prefill"
    """Runs the whole model, to compute the KV of prompts for other nodes: it answers where no verifier does."""


@dataclass(frozen=True, slots=True)
class DividedShape:
    """What tensor ranks divide of a model, by the names that `ModelSpec` has for it."""

    n_kv_heads: int
    ffn: int
    vocab: int
    attention_bytes: int
    """Of a layer's weights, what attention's take."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What placement must know of a model's sizes, in the weights format offered."""

    n_layers: int
    hidden: int
    layer_bytes: int
    edge_bytes: int
    """Embedding, final norm and head."""
    kv_bytes_per_token_per_layer: int
    max_context: int
    row_bytes: int = 0
    """Working memory that each row of a batch takes, however many layers there are."""
    divided: DividedShape | None = None
    """None: tensor ranks can't share its layers there."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """Layers that are loaded on a node for others, and how busy they are. Two significant digits where a figure would flap."""

    layers: LayerRange
    max_streams: int
    """Sessions it runs at once, at most."""
    streams: int = 0
    """Those it runs."""
    queue_depth: int = 0
    """Batches that wait, over all streams."""
    memory_bytes: int = 0
    """What weights and KV of these layers take."""
    loaded_percent: int = 0
    """Of an offer that is not warm yet: how far the load is, in steps of five."""

    @property
    def streams_free(self) -> int:
        return max(0, self.max_streams - self.streams)


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step without prompts took as a model was served. Two significant digits."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """What became of the drafts that one node made with one model, seen by the node they were made for."""

    node_id: NodeId
    model_id: str
    acceptance: float
    """Share of the drafted tokens that came true. Two significant digits."""


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """One model in one role on one node. Rates have two significant digits; 0 means not measured."""

    model_id: str
    role: Role
    weights: str
    tokens_per_second: float = 0.0
    """Decode, one sequence."""
    prefill_tokens_per_second: float = 0.0
    digest: str = ""
    """SHA-256 of the weights, hex."""
    warm: bool = False
    """Loaded and serving; False: on disk."""
    numerics_id: str = ""
    """Equal ids give equal bytes. Empty until the model was loaded once."""
    holds_identity: bool = False
    size_bytes: int = 0
    """Of its weights, in their files."""
    shape: ModelShape | None = None
    vocabulary: str = ""
    """Hash of the tokens' bytes in order: equal hashes, equal ids, so one may draft for the other. Empty: not known."""
    shard: ShardState | None = None
    """Of a `SHARD` that is loaded: which layers. None: any range may be asked for."""
    tokenizer: str = ""
    """SHA-256 of its packed tokenizer and chat template, hex. Empty where it is not loaded."""
    under_way: int = 0
    """Sequences that run and wait, where it is loaded: a power of four, 0 below four."""
    files: str = ""
    """One SHA-256 for all of its files, hex: those that `digest` leaves out too. Empty where it is not known."""
    steps: tuple[StepTime, ...] = ()
    """Of a model that answers: what was seen, few rows to many."""
    drafts: tuple[MeasuredDraft, ...] = ()
    """Of a model that answers: what was seen of the drafts that it had, by node and model."""

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.digest, self.weights, self.model_id)

    @property
    def runs_whole(self) -> bool:
        """Whether all layers run there."""
        return self.role in {Role.VERIFIER, Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another node, as the card's node measured it. Two significant digits."""

    to: NodeId
    address: str
    """host:port that was best."""
    rtt_s: float
    """Of a short call."""
    bytes_per_s: float
    network_s: float | None = None
    """Of it, what the network takes; None: not known."""


@dataclass(frozen=True, slots=True)
class Device:
    """What runs layers on a node, and the memory it has for them."""

    backend: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    memory_bytes_per_s: int
    shard_memory_bytes: int = 0
    """What further layers for others and their KV may take of it."""
    weights: tuple[str, ...] = ()
    """Weights formats that it runs."""


@dataclass(frozen=True, slots=True)
class NodeCard:
    """A node's own account of itself, measured."""

    node_id: NodeId
    version: int
    """Strictly higher wins. At least the clock in microseconds, and above every one used before."""
    addresses: tuple[str, ...]
    """host:port of the node's gRPC services, all interfaces."""
    instance: bytes
    """Random, new with each start of the process: two under one id are a clash."""
    ttl_s: int
    announced_at: int
    """Unix seconds by the announcer's clock, for people."""
    platform: str = ""
    backend: str = ""
    device: str = ""
    memory_total_bytes: int = 0
    memory_free_bytes: int = 0
    memory_bytes_per_s: int = 0
    models: tuple[ModelOffer, ...] = ()
    links: tuple[Link, ...] = ()
    ring_address: str = ""
    mlx_version: str = ""
    software: str = ""
    leaving: bool = False
    """The node says goodbye."""
    serves_shards: bool = False
    """Loads and runs layers for other members."""
    shard_memory_bytes: int = 0
    """What further layers and their KV may take there. Two significant digits."""
    devices: tuple[Device, ...] = ()
    """What runs the weights formats that the device named above does not."""

    def device_of(self, weights: str) -> Device | None:
        """What runs a weights format; None: the device that the card itself names."""
        return next((device for device in self.devices if weights in device.weights), None)

    def running(self, weights: str) -> NodeCard:
        """The card with the memory and the speed of what runs a weights format."""
        device = self.device_of(weights)
        if device is None:
            return self
        return replace(
            self,
            backend=device.backend,
            device=device.name,
            memory_total_bytes=device.memory_total_bytes,
            memory_free_bytes=device.memory_free_bytes,
            memory_bytes_per_s=device.memory_bytes_per_s,
            shard_memory_bytes=device.shard_memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class SealedCard:
    """A card whose signature was checked, and the bytes that prove it to others."""

    card: NodeCard
    sealed: bytes
    """A serialised SignedCard without the certificate: the card as its node serialised it, the beat, and the signature over both."""
    beat: int = 0
    """How many times the node has signed this unchanged card again. Greater is newer."""
    certificate: bytes = b""
    """DER. Kept apart because it travels only to those who hold no card of the node yet."""
    issued_at: int = 0
    """Unix seconds at which the CA issued the certificate; a revocation voids those issued up to its `not_after`."""
    trust: Trust = Trust.MEMBER
    """What the certificate says."""


@dataclass(frozen=True, slots=True)
class Revocation:
    """The CA's word that certificates of a node issued up to `not_after` are void."""

    node_id: NodeId
    revoked_at: int
    not_after: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """The CA's word that at a time a set of revocations was all there is."""

    signed_at: int
    """Unix seconds."""
    digest: bytes
    """`Revocations.digest` of the set."""
    issuer: NodeId
    """Where the CA was."""


@dataclass(frozen=True, slots=True)
class SealedList:
    """A list whose signature was checked, and the bytes that prove it to others."""

    said: RevocationList
    sealed: bytes


@dataclass(frozen=True, slots=True)
class SealedRevocation:
    """A revocation whose signature was checked, and the bytes that prove it to others."""

    revocation: Revocation
    sealed: bytes


WITHIN = 0.1
"""Of a figure that is measured while requests are answered, by how much it may be off. Raising it: fewer new cards, and prices that are older."""
SLACK = 0.25
"""How far, in steps of the last digit, a value must be past the edge where rounding changes. Raising it shows changes later."""


def two_digits(value: float) -> float:
    """A figure rounded to two significant digits, half away from nothing special: as decimal text rounds it. Not a number: 0."""
    return float(f"{value:.1e}") if math.isfinite(value) else 0.0


def settled(value: float, shown: float) -> float:
    """What to show for `value` where `shown` was shown before: the same, until the value is clearly nearer to another.

    Args:
        shown: the last result of this function, or 0.
    """
    rounded = two_digits(value)
    if rounded == shown or not math.isfinite(shown) or shown == 0 or (rounded > 0) != (shown > 0):
        return rounded
    # Below a power of ten steps are ten times finer: the finer ones count, or 9.7 would hide behind 10.
    step = min(_step(rounded), _step(shown)) if value != 0 else 0.0
    return shown if abs(value - shown) <= step * (0.5 + SLACK) else rounded


def kept(value: float, shown: float) -> float:
    """What to show of a figure that is measured again and again: what was shown, until it is off by more than a tenth."""
    return shown if shown > 0 and abs(value - shown) <= shown * WITHIN else two_digits(value)


def settled_within(value: float, shown: float) -> float:
    """The same for what may be taken: never more than there is. It falls at once, and rises once the value is clearly beyond the next figure."""
    rounded = two_digits(value)
    below = rounded if rounded <= value else two_digits(rounded - 10.0 ** (math.floor(math.log10(value)) - 1))
    return shown if 0 < shown < below and value < below + SLACK * _step(below) else below


def _step(value: float) -> float:
    """One of the last digit of a figure with two."""
    return float(f"1e{int(f'{value:.1e}'.partition('e')[2]) - 1}")
