"""Input and output of placement: the request, the choices and the plan. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan

LEAST_ROWS = 512
"""Rows of a batch that a stage has working memory for, even if its first caller asks for fewer: the next caller may want more, and a row takes little.
Raising it: each stage reserves more memory; lowering it: a loaded shard is too small for a later caller more often."""


Way = NewType("Way", str)
"""Name in plans of a way to spread work: how machines share a request."""
ALONE: Final = Way("alone")
"""Way in which one machine runs all of the request."""


class Objective(StrEnum):
    """Figure that the best plan optimises."""

    LATENCY = "latency"
    """Shortest time for one request."""
    THROUGHPUT = "throughput"
    """Shortest time for `streams` requests that run at the same time; the slowest stage decides."""


class Constraint(StrEnum):
    """Limit that would have to change for a better plan."""

    MEMORY = "memory"
    LINK_LATENCY = "link latency"
    LINK_BANDWIDTH = "link bandwidth"
    COMPUTE = "compute"
    NO_CANDIDATE = "no candidate"


@dataclass(frozen=True, slots=True)
class Pin:
    """A machine that must run layers, chosen by a person. If there are pins, no other machine runs layers."""

    node_id: NodeId
    layers: LayerRange | None = None
    """Layers that it must run; None: the planner decides."""


TYPICAL_PROMPT, TYPICAL_ANSWER = 512, 256
"""Tokens of a request that names no other numbers."""
WORTH_A_HOP = 1.25
"""Factor by which another node must be faster for a request to leave the node that has the model itself: estimates are rough, and the way there and back
is not in them. Raising it: more requests stay where they arrived."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One model, a typical request to it, and the constraints on a plan."""

    model: str
    """The model's id, its digest, or at least the first twelve digits of the digest."""
    weights: str = ""
    """Weights format; empty: any format that is offered."""
    prompt_tokens: int = TYPICAL_PROMPT
    answer_tokens: int = TYPICAL_ANSWER
    ways: frozenset[Way] | None = None
    """Ways allowed; None: all ways."""
    pins: tuple[Pin, ...] = ()
    proposer: NodeId | None = None
    """The machine that must draft; None: the best one, if drafting pays."""
    draft_model: str = ""
    """Id of the model that must draft; empty: any suitable one."""
    acceptance: float | None = None
    """Measured share of drafted tokens that are accepted (0 to 1); None: not measured."""
    objective: Objective = Objective.LATENCY
    streams: int = 1
    """Number of requests that must have room for their KV at the same time."""
    kv_tokens: int = 0
    """Tokens of KV that every stage must have room for in any case: the least that the orchestrator reserves there."""
    rows: int = LEAST_ROWS
    """Rows of a batch that every machine must have working memory for."""
    orchestrator: NodeId | None = None
    """The machine that serves the request and begins every choice. In a pipeline it holds embedding and head, and as many layers as is best, possibly
    none. The other machines then serve shards, within the memory they give to that. None: any machine may begin, and all may take part."""
    orchestrator_layers: int | None = None
    """Number of layers that the orchestrator has loaded already, and must run; None: the planner decides."""
    exclude: frozenset[NodeId] = frozenset()
    min_host_trust: Trust = Trust.GUEST
    """Least trust of a machine that holds layers of another machine's pipeline."""
    numerics_id: str = ""
    """Numerics id that all stages of a pipeline must compute. A machine known to compute other bytes is left out; one that is not known yet is not.
    Empty: any machine may hold layers."""
    exact: bool = False
    """True: machines that are known to compute different bytes, or to promise none, take no part together. Speed decides otherwise."""
    max_shards: int = 16
    """Largest number of machines that run layers of a pipeline for its orchestrator."""
    last_route: tuple[LayerSpan, ...] = ()
    """Stages after the orchestrator in a pipeline that is to continue. Stages that are still there keep their layers, and so their KV, if other
    machines can take the layers of the lost stages."""
    in_need: bool = False
    """True: if nothing else is found, links that were not measured count as poor, and layers of shards that the orchestrator itself serves
    may be stages."""
    requests: int = 10
    """Number of requests that share the time to load: 1 while an answer waits for it. Raising it: the time to load counts less."""
    called: str = ""
    """Name that people use for the model, for messages; empty: `model`."""

    @property
    def title(self) -> str:
        """Name of the model for messages, at most 200 characters."""
        return (self.called or self.model)[:200]

    @property
    def is_pinned(self) -> bool:
        """Return whether a person named machines."""
        return bool(self.pins) or self.proposer is not None

    @property
    def is_apart(self) -> bool:
        """Return whether the serving node is not pinned itself. Even one pinned machine then makes a pipeline."""
        return self.orchestrator is not None and all(pin.node_id != self.orchestrator for pin in self.pins)

    @property
    def is_spread_by_pins(self) -> bool:
        """Return whether the pinned machines can only run the request together."""
        return len(self.pins) > 1 or (len(self.pins) == 1 and self.is_apart)

    @property
    def abreast(self) -> int:
        """Number of requests that run at the same time in the price of a plan."""
        return self.streams if self.objective is Objective.THROUGHPUT else 1


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """A machine's share of every layer, if several machines split each layer."""

    speed: float
    """Speed that the share was computed from, in relation to the other ranks' speeds."""
    kv_heads: int
    feed_forward: float
    """Share of the feed-forward part (0 to 1)."""
    weights: float
    """Share of a layer's weights (0 to 1)."""
    memory_bytes: int
    """Bytes that the share takes: weights, KV, working memory."""
    kv_tokens: int
    """Tokens of KV that the machine has room for."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A machine and the layers it runs. The first stage also holds embedding, final norm and head. An orchestrator's stage may run no layers."""

    node_id: NodeId
    instance: bytes
    """Instance of the node's process. After a restart it differs, and the KV is lost."""
    layers: LayerRange
    numerics_id: str
    warm: bool
    fetch_from: NodeId | None = None
    """Node that has the weights, if this machine must fetch them first."""
    fetch_bytes: int = 0
    load_bytes: int = 0
    """Bytes of weights that the machine must read before it can run them."""
    rank: PlannedRank | None = None
    """Share of each of these layers; None: all of them."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The machine and the model that propose draft tokens, and how many at a time."""

    node_id: NodeId
    instance: bytes
    model_id: str
    digest: str
    length: int
    acceptance: float
    """Share of draft tokens expected to be accepted (0 to 1)."""
    measured: bool = False
    """True if the verifying node measured the acceptance, or the request gave it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated times of a request; for throughput, of all its streams together. `fleet.choices` has the formulas."""

    tokens_per_s: float
    """Tokens per second after the first token; for throughput, of all answers together."""
    ttft_s: float
    """Seconds until the first token."""
    total_s: float
    """Seconds until the last token."""
    compute_s: float
    latency_s: float
    bandwidth_s: float
    """Parts of `total_s`: machines at work, round trips of links, bytes on links."""
    measured: bool
    """True if every speed was measured; False: at least one was estimated from a machine's memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way of running the request, with its estimate."""

    way: Way
    model_id: str
    digest: str
    weights: str
    stages: tuple[PlannedStage, ...]
    """Stages in the order of their layers, which they cover without gap or overlap. Ranks of a tensor split each have all layers."""
    draft: Draft | None
    estimate: Estimate

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """All nodes that take part, the drafting one included."""
        drafts = () if self.draft is None or self.draft.node_id == self.stages[0].node_id else (self.draft.node_id,)
        return (*(stage.node_id for stage in self.stages), *drafts)

    @property
    def is_unlike(self) -> bool:
        """Return whether its stages are known to compute different bytes. A machine that never loaded the model counts as unknown."""
        return len({stage.numerics_id for stage in self.stages} - {""}) > 1

    @property
    def fetches(self) -> bool:
        """Return whether a machine must fetch weights first."""
        return any(stage.fetch_from is not None for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Excluded:
    """A machine that can't run all of the model alone, and the reason."""

    node_id: NodeId
    why: str
    constraint: Constraint


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen way and the alternatives. Equal views give equal plans, on every machine."""

    request: PlanRequest
    chosen: Choice
    runners_up: tuple[Choice, ...]
    """Best alternatives, best first."""
    constraint: Constraint
    because: str
    """The constraint in words."""
    notes: tuple[str, ...]
    """Notes for a person: why fewer machines are faster, what was assumed."""
    excluded: tuple[Excluded, ...]
    spares: tuple[LayerSpan, ...] = ()
    """Spare machines of a pipeline with a named orchestrator, each with the span that it loads as its memory allows."""
