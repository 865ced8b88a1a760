"""The card with which a node describes itself, and the signed forms that others hold. Values only: nothing here reads a clock, a disk or a wire.

A card travels as the bytes its node signed (`SealedCard.sealed`), so no node on the way can change it. `proto/paceline/v1/fleet.proto`
describes the same fields on the wire; the codec is `net.card_codec`.
Figures have two significant digits and change only when the measured value has clearly changed, so that plans don't flap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, ModelRef


class Role(StrEnum):
    """A use of a model on a node."""

    VERIFIER = "verifier"
    """Runs the whole model and decides its tokens."""
    PROPOSER = "proposer"
    """Proposes tokens that a verifier accepts or rejects."""
    EMBEDDER = "embedder"
    TOOL = "tool"
    SHARD = "shard"
    """Runs a range of layers."""
    PREFILL = "prefill"
    """Runs the whole model to compute the KV of prompts for other nodes. It answers requests only where no verifier does."""


@dataclass(frozen=True, slots=True)
class DividedShape:
    """Sizes of a model that tensor ranks divide among them. The names are those of `ModelSpec`."""

    n_kv_heads: int
    ffn: int
    vocab: int
    attention_bytes: int
    """Size of one layer's attention weights, which is a part of `ModelShape.layer_bytes`."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that placement computes with, in the weights format offered."""

    n_layers: int
    hidden: int
    layer_bytes: int
    edge_bytes: int
    """Size of embedding, final norm and head together."""
    kv_bytes_per_token_per_layer: int
    max_context: int
    row_bytes: int = 0
    """Working memory that each row of a batch takes, however many layers there are."""
    divided: DividedShape | None = None
    """None: tensor ranks can't share the model's layers on this node."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """Layers that are loaded on a node for others, and how busy they are. Two significant digits where a figure would flap."""

    layers: LayerRange
    max_streams: int
    """Maximum number of sessions at once."""
    streams: int = 0
    """Sessions that run now."""
    queue_depth: int = 0
    """Waiting batches of all streams together."""
    memory_bytes: int = 0
    """Memory that weights and KV of these layers take."""
    loaded_percent: int = 0
    """Progress of the load in percent, in steps of five, while the offer is not warm yet."""

    @property
    def streams_free(self) -> int:
        return max(0, self.max_streams - self.streams)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The measured time of a step without prompts, taken while the model was served. Two significant digits."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """Acceptance of the drafts that node `node_id` made with `model_id`, measured by the card's node, for which they were made."""

    node_id: NodeId
    model_id: str
    acceptance: float
    """Fraction of the drafted tokens that were accepted. Two significant digits."""


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """The engine of another maker that runs an offered model. It promises no bytes: the offer's `numerics_id` is empty."""

    engine: str
    """Name and version, such as `llama-server b9000`."""
    takes: tuple[str, ...]
    """Forms of prompt that it takes: `ids`, `text`, `messages`. See `engines.contract.Takes`."""
    quantisation: str = ""
    """Name of the weights' format that the engine uses."""
    slots: int = 0
    """Number of requests that run at once; 0: not known."""
    capabilities: tuple[str, ...] = ()
    """See `engines.contract.Capability`."""
    leaves_network: bool = False
    """Prompts leave the home network: the engine is elsewhere. Requests reach it only by name."""
    plain_http: bool = False
    """Prompts cross the network unencrypted."""
    via: tuple[str, ...] = ()
    """Marks of the nodes that a request goes through there, if the engine is an endpoint of Paceline; see `core.via`."""
    context: int = 0
    """Maximum tokens of prompt and answer together, of one request; 0: not known."""
    load_s: float | None = None
    """Measured seconds of a load, which the next request causes; 0: not measured yet. None: the model is loaded."""
    capacity: int = 0
    """Measured number of requests at which first tokens are not later yet; 0: not known."""
    first_token_s: float = 0.0
    """Measured seconds to the first token, if the rate of prompts is not known; 0: not measured."""

    @property
    def at_once(self) -> int:
        """Number of requests that it takes before others wait; 0: not known."""
        return self.capacity or self.slots


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """One model in one role on one node. Rates have two significant digits; 0 means not measured."""

    model_id: str
    role: Role
    weights: str
    tokens_per_second: float = 0.0
    """Decoding speed with one sequence."""
    prefill_tokens_per_second: float = 0.0
    digest: str = ""
    """SHA-256 of the weights, hex."""
    warm: bool = False
    """True if it is loaded and serves requests; False if it is only on disk."""
    numerics_id: str = ""
    """Nodes with equal ids compute equal bytes. Empty until the model was loaded once."""
    holds_identity: bool = False
    size_bytes: int = 0
    """Size of the weights in their files."""
    shape: ModelShape | None = None
    vocabulary: str = ""
    """Hash of the tokens' bytes in order. Models with equal hashes have equal token ids, so each may draft for the other. Empty: not known."""
    shard: ShardState | None = None
    """The layers that a loaded `SHARD` holds, and its load. None: any range may be asked for."""
    tokenizer: str = ""
    """SHA-256 of the packed tokenizer and chat template, hex. Empty if the model is not loaded."""
    under_way: int = 0
    """Running and waiting sequences of a loaded model, rounded down to a power of four; 0 below four."""
    files: str = ""
    """One SHA-256 for all of the model's files, hex: also for the tokenizer and template, which `digest` does not cover. Empty: not known."""
    steps: tuple[StepTime, ...] = ()
    """Measured step times of a model that answers, by increasing number of rows."""
    drafts: tuple[MeasuredDraft, ...] = ()
    """Measured acceptance of the drafts that an answering model got, by drafting node and model."""
    engine: EngineOffer | None = None
    """The engine of another maker that runs it; None: Paceline's own kernels."""

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.digest, self.weights, self.model_id)

    @property
    def runs_whole(self) -> bool:
        """True if all layers of the model run on the node."""
        return self.role in {Role.VERIFIER, Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another node, as the card's node measured it. Two significant digits."""

    to: NodeId
    address: str
    """host:port of the best of the other node's addresses."""
    rtt_s: float
    """Round-trip time of a short call."""
    bytes_per_s: float
    network_s: float | None = None
    """Part of `rtt_s` that the network takes; None: not known."""


@dataclass(frozen=True, slots=True)
class Device:
    """A processor that runs layers on a node, and its memory."""

    backend: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    memory_bytes_per_s: int
    shard_memory_bytes: int = 0
    """Memory that further layers for other nodes, with their KV, may take on this device."""
    weights: tuple[str, ...] = ()
    """Weights formats that this device runs."""


@dataclass(frozen=True, slots=True)
class NodeCard:
    """The description of a node that the node itself measured."""

    node_id: NodeId
    version: int
    """The card with the strictly higher version wins. A new version is at least the clock in microseconds, and above every one used before."""
    addresses: tuple[str, ...]
    """host:port of the node's gRPC services on each of its interfaces."""
    instance: bytes
    """Random bytes, new with each start of the process. Two instances that run under one id are an id conflict."""
    ttl_s: int
    announced_at: int
    """Unix seconds by the announcing node's clock. Shown to people; nothing computes with it."""
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
    """True in the last card of a node, its goodbye."""
    serves_shards: bool = False
    """True if the node loads and runs layers for other members."""
    shard_memory_bytes: int = 0
    """Memory that further layers for other nodes, with their KV, may take. Two significant digits."""
    devices: tuple[Device, ...] = ()
    """Further devices, for weights formats that the card's own device (`backend`, `device`) does not run."""

    def device_of(self, weights: str) -> Device | None:
        """Return the entry of `devices` that runs a weights format. None if no entry does: then the card's own device counts."""
        return next((device for device in self.devices if weights in device.weights), None)

    def running(self, weights: str) -> NodeCard:
        """Return the card with the memory and the speed of the device that runs a weights format."""
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
    """A card with a checked signature, and the bytes that prove it to others."""

    card: NodeCard
    sealed: bytes
    """A serialised SignedCard without the certificate. It holds the card as its node serialised it, the beat, and the signature over both."""
    beat: int = 0
    """Number of times that the node has signed this unchanged card again. The greater one is newer."""
    certificate: bytes = b""
    """DER. Kept apart because it is sent only to nodes that may not have it: with a node's first card, and after a renewal."""
    issued_at: int = 0
    """Unix seconds at which the CA issued the certificate. A revocation covers certificates issued up to its `not_after`."""
    trust: Trust = Trust.MEMBER
    """Trust that the certificate grants."""


@dataclass(frozen=True, slots=True)
class Revocation:
    """The CA's statement that certificates of a node issued up to `not_after` are revoked."""

    node_id: NodeId
    revoked_at: int
    not_after: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """The CA's statement that a set of revocations was complete at one time."""

    signed_at: int
    """Unix seconds."""
    digest: bytes
    """`Revocations.digest` of the set."""
    issuer: NodeId
    """Node that held the CA."""


@dataclass(frozen=True, slots=True)
class SealedList:
    """A revocation list with a checked signature, and the bytes that prove it to others."""

    said: RevocationList
    sealed: bytes


@dataclass(frozen=True, slots=True)
class SealedRevocation:
    """A revocation with a checked signature, and the bytes that prove it to others."""

    revocation: Revocation
    sealed: bytes


WITHIN = 0.1
"""Fraction by which a figure measured during requests may differ from the one shown before a new one is shown. Raising it: fewer new cards, and
plans that compute with older figures."""
SLACK = 0.25
"""Fraction of the last digit's step by which a value must pass the rounding edge before another figure is shown. Raising it: changes are shown later."""


def two_digits(value: float) -> float:
    """Return a figure rounded to two significant digits, as decimal formatting rounds it; 0 if it is not finite."""
    return float(f"{value:.1e}") if math.isfinite(value) else 0.0


def settled(value: float, shown: float) -> float:
    """Return the figure to show for `value` after `shown`. It stays `shown` until the value is clearly nearer to another figure.

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
    """Return the figure to show for a value that is measured repeatedly. It stays `shown` until the value differs by more than `WITHIN`."""
    return shown if shown > 0 and abs(value - shown) <= shown * WITHIN else two_digits(value)


def settled_within(value: float, shown: float) -> float:
    """Return the figure to show for an amount that others may take, never more than `value`.

    It falls at once, and rises only when the value is clearly beyond the next figure.
    """
    rounded = two_digits(value)
    below = rounded if rounded <= value else two_digits(rounded - 10.0 ** (math.floor(math.log10(value)) - 1))
    return shown if 0 < shown < below and value < below + SLACK * _step(below) else below


def _step(value: float) -> float:
    """Return the step between two neighbouring figures of two digits, near `value`."""
    return float(f"1e{int(f'{value:.1e}'.partition('e')[2]) - 1}")
