"""One orchestrator's use of one stage, from the moment it asks: what is asked, what is told, and where results go. Values only.

A session lives as long as the call that opened it. Its identity is the caller's and the id the caller drew: no other caller can name it.

How activations travel, as stages and executors see it; `ways.pipeline.batches` has the real ones.

Shapes: T rows of a batch, D hidden. Activations are bits of bf16, whatever they travel as.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype, LayerRange, WeightsFormat
from paceline.engine.local import WireBits
from paceline.ways.pipeline.executor.stage import StageBatch

Rehearse = Callable[[StageBatch, WireBits], None]
"""Goes a batch's way, as far as that changes nothing, so that what the next one needs is at hand: a kernel that reads weights of many MB
leaves no code and no data in the caches. Takes some tens of microseconds; the batch is like the last one, its activations are zeros."""


class ActivationSink(Protocol):
    """Takes batches, in order. For one thread."""

    def prepare(self, batch: StageBatch, width: int) -> None:
        """Do for `send` what can be done before the activations are there. Never waits. Batches may be sent without.

        Args:
            width: of its rows.

        Raises:
            TensorStreamError: the stream is broken.
        """
        ...

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        """Hand a batch on; returns once it is on its way.

        Args:
            x_TD: may be reused by the caller afterwards.
            deadline: on the monotonic clock, for as long as no byte is taken: each that is gives the whole time anew.

        Raises:
            StreamStalled: the other side takes nothing.
            TensorStreamError: the stream is broken.
        """
        ...

    def close(self) -> None:
        """Idempotent; wakes a thread that waits."""
        ...


class ActivationSource(Protocol):
    """Gives batches, in order. For one thread."""

    def receive(self, deadline: float, rehearse: Rehearse | None = None) -> tuple[StageBatch, WireBits]:
        """The next batch. The array is good until the next call.

        Args:
            deadline: on the monotonic clock, for as long as no byte comes: each that does gives the whole time anew.
            rehearse: may be called while nothing comes.

        Raises:
            StreamStalled: nothing came until `deadline`.
            TensorStreamError: the stream is broken, or what it carries is.
        """
        ...

    def close(self) -> None:
        """Idempotent; wakes a thread that waits."""
        ...


SESSION_ID_BYTES = 16
KV_NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What an orchestrator asks of a stage."""

    session_id: bytes
    model_id: str
    """For people: weights are found by their digest."""
    digest: str
    """SHA-256 of the weights, hex."""
    weights: WeightsFormat
    layers: LayerRange
    n_blocks: int
    """KV wanted, in blocks of 16 tokens whatever the stage keeps together; fewer may be leased."""
    least_blocks: int
    """The fewest that are of use."""
    max_rows: int
    """Of a batch."""
    dtype: ActivationDtype = ActivationDtype.BF16
    report_s: float = 0.25
    """How often the stage says how far it is."""
    kv: bytes = b""
    """Names the session's KV: it outlives the session for a while, and the caller's next session of that name goes on with it. Empty: it does not."""


@dataclass(frozen=True, slots=True)
class StageLoading:
    """Weights are fetched or loaded."""

    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class StageOpened:
    """A stage that waits to be connected."""

    tensor_port: int
    """On the node's addresses."""
    ticket: bytes
    """A node that brings it may send to this session; good once."""
    n_blocks: int
    """KV leased, in blocks of 16 tokens."""
    block_size: int
    """Tokens that it keeps together: batches name blocks of so many, or of a multiple."""
    numerics_id: str
    one_path: bool
    holds_identity: bool
    resumed: bool | None = None
    """It has the KV that a session of the same name left. None: its node keeps none."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """How far a session is: batches since it was opened."""

    received: int = 0
    computed: int = 0
    sent: int = 0
    queue_depth: int = 0
    """Batches that wait."""
    p95_latency_ms: float = 0.0
    """Of the time from a batch's arrival to its result's departure, over the last few hundred."""
    busy_s: float = 0.0
    """Spent computing, all batches together: the rest of its time it waits."""


@dataclass(frozen=True, slots=True)
class PipelineFault:
    """Why a stage's session, or the route that it is part of, can't go on: the same from the stream that broke to the answer that ends."""

    node_id: NodeId | None
    """The node that is held responsible; None: the one that says so, or, of a route, it is not known."""
    code: str
    """As `core.errors.PipelineError` and its kin have it."""
    message: str
    told: bool = False
    """The stage said so itself; else it is what was seen of it from here."""


StageEvent = StageLoading | StageOpened | StageReport | PipelineFault


@dataclass(frozen=True, slots=True)
class NextStage:
    """Where a stage's results go."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """host:port of its tensor streams, the best first."""
    ticket: bytes
    block_size: int | None = None
    """Tokens of the blocks that the batches on this way name; None: of the stage's own."""
