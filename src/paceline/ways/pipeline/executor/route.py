"""A pipeline's route as its executor sees it: the stages, how activations travel to and from them, and what a session with a stage asks and is told.

Laws:
- A route that broke is never mended: it is closed and another one is found. Its stages keep their KV for a while, and those that take part in the next
  route go on with it. The node to blame stays out for a while.
- A session lives as long as the call that opened it. Its identity is the caller's and the id the caller drew: no other caller can name it.

Values and seams alone; `ways.pipeline.host.ends` has the real ends. Shapes: T rows of a batch, D hidden. Activations are bits of bf16, whatever they
travel as.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype, LayerRange, LayerSpan, ModelRef, WeightsFormat
from paceline.engine.local import WireBits
from paceline.machine.kv_spans import KvMove
from paceline.ways.pipeline.executor.stage import StageBatch


class ActivationSink(Protocol):
    """Takes batches, in order. For one thread."""

    def prepare(self, batch: StageBatch, width: int) -> None:
        """Do for `send` what can be done before the activations are there. Never waits. Batches may be sent without.

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

    def receive(self, deadline: float) -> tuple[StageBatch, WireBits]:
        """The next batch. The array is good until the next call.

        Args:
            deadline: on the monotonic clock, for as long as no byte comes: each that does gives the whole time anew.

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
    dtype: ActivationDtype = ActivationDtype.BF16
    report_s: float = 0.25
    """How often the stage says how far it is."""
    kv: bytes = b""
    """Names the session's KV: it outlives the session for a while, and the caller's next session of that name goes on with it. Empty: it does not."""

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.digest, self.weights, self.model_id)


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
    kv_blocks: bool = False
    """Whether its node keeps blocks on a disk, and answers `BlocksAsked`."""
    kv_moves: bool = False
    """Whether its node moves blocks from and to other nodes (`KvMove`)."""
    kv_under_way: bool = False
    """It fetches blocks of prompts that are still being computed, too."""


class BlocksUse(StrEnum):
    """What is wanted of blocks on the disk of a stage's node, or between it and other nodes, or whether blocks are alike."""

    FIND = "find"
    RESTORE = "restore"
    KEEP = "keep"
    FETCH = "fetch"
    GIVE = "give"
    COMPARE = "compare"

    @property
    def moves(self) -> bool:
        return self in (BlocksUse.FETCH, BlocksUse.GIVE)


@dataclass(frozen=True, slots=True)
class BlocksAsked:
    """Blocks of a session's layers, by name."""

    use: BlocksUse
    keys: Sequence[bytes]
    blocks: Sequence[int] = ()
    """As batches name them; none to find."""
    within_s: float = 1.0
    move: KvMove | None = None
    """From whom, or to whom, where they are to be fetched or given."""
    parents: Sequence[bytes | None] = ()
    """The name before each in its chain, where they are to be kept; None: it begins one. None of them: it is not said."""


@dataclass(frozen=True, slots=True)
class BlocksDone:
    """What came of it."""

    n_blocks: int
    """Found, restored, moved or alike, from the first on; kept: as many as the disk takes."""
    is_wrong: bool = False
    """The next one was fetched, and another block than the one asked for, or damaged."""

    @staticmethod
    def of_all(stages: Sequence[BlocksDone]) -> BlocksDone:
        """As far as all stages have them."""
        return BlocksDone(min((done.n_blocks for done in stages), default=0), any(done.is_wrong for done in stages))


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
    latency_s: float = 0.0
    """From a batch's arrival to its result's departure, all batches together. 0: the stage does not say."""


@dataclass(frozen=True, slots=True)
class PipelineFault:
    """Why a stage's session, or the route that it is part of, can't go on: the same from the stream that broke to the answer that ends."""

    node_id: NodeId | None
    """The node that is held responsible; None: the one that says so, or, of a route, it is not known."""
    code: str
    """As `core.errors.PipelineError` and its kin have it."""
    message: str
    reported: bool = False
    """The stage said so itself; else it is what was seen of it from here."""


def said_of(node_id: str, message: str) -> str:
    """What went wrong, and at which node: errors of calls name it themselves."""
    return message if message.startswith((f"{node_id} ", f"{node_id}: ")) else f"{node_id}: {message}"


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


@dataclass(frozen=True, slots=True)
class RouteStage(LayerSpan):
    """One machine's part in a route."""

    shard_id: str
    numerics_id: str
    holds_identity: bool
    """Its kernels give a row the same bytes whatever runs beside it."""
    kv_tokens: int = 0
    """Whose KV of these layers fits what it leased."""
    resumed: bool | None = False
    """It has the KV of the same stage of the route before. None: it knows nothing of such things."""

    def __str__(self) -> str:
        return f"{self.layers.words} on {self.node_id}"


@dataclass(frozen=True, slots=True)
class Opening:
    """A route that is being opened, as far as its machines have loaded their layers."""

    bytes_done: int = 0
    bytes_total: int = 0
    """Over all machines; 0: none has said yet."""
    advanced: int = 0
    """Bytes gained since there was a route. Rises with progress and with nothing else: a load that is tried again counts once it is beyond
    where it was."""
    seconds_left: float | None = None
    """At the speed until now; None: not known."""
    nodes: tuple[NodeId, ...] = ()
    """Those that load."""

    @property
    def counts_no_bytes(self) -> bool:
        """What machines do now has no bytes, as far as is known: before the first they read kernels, one process of a machine at a time, and
        behind the last they compile.
        """
        return self.bytes_total <= self.bytes_done and bool(self.bytes_total or self.nodes)

    @property
    def percent(self) -> int:
        return 100 * self.bytes_done // self.bytes_total if self.bytes_total else 0

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return f"{self.percent} %{left}"


class Route(Protocol):
    """Stages that were opened, in the order of their layers, from the first layer the orchestrator does not hold itself."""

    @property
    def stages(self) -> Sequence[RouteStage]: ...

    @property
    def reports(self) -> Sequence[StageReport]:
        """How far each stage says it is, in their order; none where this machine runs them itself."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that batches name: as many as the stage, or the orchestrator, with the widest blocks keeps together."""
        ...

    @property
    def sink(self) -> ActivationSink:
        """Into the first stage."""
        ...

    @property
    def source(self) -> ActivationSource:
        """Out of the last."""
        ...

    def fault(self, wait_s: float = 0.0) -> PipelineFault | None:
        """What broke, as far as is known: a stage that is gone, or that reported a fault.

        Args:
            wait_s: how long to wait for word of it.
        """
        ...

    def suspect(self, received: int) -> PipelineFault:
        """Who does not work on, now that nothing came within the bound. Does not wait.

        Args:
            received: batches that came out of the last stage.
        """
        ...

    def close(self) -> None:
        """End the session with every stage. Idempotent; does not wait for them."""
        ...


class Router(Protocol):
    """Finds routes. `find` is called by the engine's thread, and waits."""

    def find(self, wait_s: float) -> Route | Opening:
        """A route over machines that work; where none could be opened within `wait_s`, how far the attempt is, which goes on.

        Raises:
            PipelineError: there can be none: no nodes have the layers, or those who have them refuse.
        """
        ...

    def lacks(self) -> str | None:
        """Why there can be no route now, as far as nodes say of themselves: none is asked. Any thread may look."""
        ...

    def forget_kv(self) -> None:
        """What stages kept of routes before is of no use: the next begins with none."""
        ...

    def quarantine(self, fault: PipelineFault) -> None:
        """Leave out whom a fault blames, until it is known to work again."""
        ...

    def close(self) -> None:
        """Stop looking. Idempotent."""
        ...
