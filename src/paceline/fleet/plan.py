"""What placement is asked, and what it answers. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan

LEAST_ROWS = 512
"""Of a batch, what a stage has room for whatever its first caller asks for: the next may want more, and rows take little."""


Way = NewType("Way", str)
"""How machines share a request: what a way of spreading work calls itself in plans."""
ALONE: Final = Way("alone")
"""One machine runs all of it."""


class Objective(StrEnum):
    """What the best plan has most of."""

    LATENCY = "latency"
    """One request is done soonest."""
    THROUGHPUT = "throughput"
    """`streams` requests side by side are done soonest; the slowest stage decides."""


class Constraint(StrEnum):
    """What would have to change for a better plan."""

    MEMORY = "memory"
    LINK_LATENCY = "link latency"
    LINK_BANDWIDTH = "link bandwidth"
    COMPUTE = "compute"
    NO_CANDIDATE = "no candidate"


@dataclass(frozen=True, slots=True)
class Pin:
    """A machine that must run layers, chosen by a person. Pins name all machines that do: none else is taken."""

    node_id: NodeId
    layers: LayerRange | None = None
    """None: whatever is best."""


TYPICAL_PROMPT, TYPICAL_ANSWER = 512, 256
"""Tokens of a request that says nothing else."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One model and a typical request to it."""

    model: str
    """A model's id, or its digest, or the first twelve or more digits of that."""
    weights: str = ""
    """Weights format; empty: any that is offered."""
    prompt_tokens: int = TYPICAL_PROMPT
    answer_tokens: int = TYPICAL_ANSWER
    ways: frozenset[Way] | None = None
    """Those allowed; None: all there are."""
    pins: tuple[Pin, ...] = ()
    proposer: NodeId | None = None
    """The machine that must draft; None: the best, if drafting pays."""
    draft_model: str = ""
    """The id of the model that must draft; empty: any that can."""
    acceptance: float | None = None
    """Share of drafted tokens that are accepted, where it was measured."""
    objective: Objective = Objective.LATENCY
    streams: int = 1
    """Requests whose KV must fit at once."""
    kv_tokens: int = 0
    """KV that every stage must have room for in any case: the least that the orchestrator asks of it."""
    rows: int = LEAST_ROWS
    """Of a batch, which every machine has working memory for."""
    orchestrator: NodeId | None = None
    """The machine that serves the request, which every choice begins on. It holds a pipeline's embedding and head, and as many layers as are
    best, none included; the others are then machines that serve shards, in the memory they give to that. None: any may begin, and all may take
    part."""
    orchestrator_layers: int | None = None
    """How many layers the orchestrator has loaded already: it runs exactly those. None: as many as are best."""
    exclude: frozenset[NodeId] = frozenset()
    min_host_trust: Trust = Trust.GUEST
    """What it takes to hold layers of a pipeline that another machine orchestrates."""
    numerics_id: str = ""
    """Machines that are known to compute other bytes hold no layers of a pipeline; empty: any may."""
    allows_unlike: bool = False
    """Machines that are known to compute other bytes than one another may share the layers."""
    max_shards: int = 16
    """Machines that may run layers of a pipeline for its orchestrator."""
    last_route: tuple[LayerSpan, ...] = ()
    """The stages behind the orchestrator of a pipeline that is to go on. Those that are left keep their layers, and with them their KV, where others
    can take those of the lost."""
    in_need: bool = False
    """Where there is nothing else, links that were not measured are taken to be poor, and layers count that the orchestrator runs for others."""
    requests: int = 10
    """Among which the time to load is shared: 1 while an answer waits for it. Raising it: what is loaded counts for less."""
    called: str = ""
    """What people call the model, for messages; empty: as `model` does."""

    @property
    def title(self) -> str:
        """The model, for messages."""
        return (self.called or self.model)[:200]

    @property
    def is_pinned(self) -> bool:
        """Whether a person named machines."""
        return bool(self.pins) or self.proposer is not None

    @property
    def is_apart(self) -> bool:
        """Whether the node that serves is none of those pinned, so that even one of them makes a pipeline."""
        return self.orchestrator is not None and all(pin.node_id != self.orchestrator for pin in self.pins)

    @property
    def is_spread_by_pins(self) -> bool:
        """Whether the machines that are pinned can only run the request together."""
        return len(self.pins) > 1 or (len(self.pins) == 1 and self.is_apart)

    @property
    def abreast(self) -> int:
        """Requests that run side by side as the plan is priced."""
        return self.streams if self.objective is Objective.THROUGHPUT else 1


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """What a machine has of every layer, as one of several that share them."""

    speed: float
    """By which shares are dealt, beside the others' speeds."""
    kv_heads: int
    feed_forward: float
    """Part of it."""
    weights: float
    """Part of a layer's weights."""
    memory_bytes: int
    """What the share takes: weights, KV, working memory."""
    kv_tokens: int
    """That the machine has room for."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A machine and the layers it runs. The first stage also holds embedding, final norm and head; an orchestrator's may run no layers."""

    node_id: NodeId
    instance: bytes
    """Of the node's process: another one has lost the KV."""
    layers: LayerRange
    numerics_id: str
    warm: bool
    fetch_from: NodeId | None = None
    """Who has the weights, where this machine does not."""
    fetch_bytes: int = 0
    load_bytes: int = 0
    """What must be read before it can run them."""
    rank: PlannedRank | None = None
    """None: all of these layers."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Who proposes tokens, and how many at a time."""

    node_id: NodeId
    instance: bytes
    model_id: str
    digest: str
    length: int
    acceptance: float
    """Share of them expected to be accepted."""
    measured: bool = False
    """The share was seen by the node they are made for, or said by who asks."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request is expected to take, or, where throughput counts, all its streams together. `fleet.choices` has the formulas."""

    tokens_per_s: float
    """Of the answer, once it has begun; of all answers together."""
    ttft_s: float
    """Until the first token."""
    total_s: float
    """Until the last."""
    compute_s: float
    latency_s: float
    bandwidth_s: float
    """The parts of `total_s`: machines at work, links' round trips, links' bytes."""
    measured: bool
    """Every speed in it was measured; False: at least one was taken from a machine's memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way of running the request, and what it would take."""

    way: Way
    model_id: str
    digest: str
    weights: str
    stages: tuple[PlannedStage, ...]
    """In the order of their layers, which they cover without gap or overlap; of ranks, each has all."""
    draft: Draft | None
    estimate: Estimate

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """Everyone who takes part."""
        drafts = () if self.draft is None or self.draft.node_id == self.stages[0].node_id else (self.draft.node_id,)
        return (*(stage.node_id for stage in self.stages), *drafts)

    @property
    def is_unlike(self) -> bool:
        """Whether its stages are known to compute other bytes than one another. A machine that never loaded the model is not known yet."""
        return len({stage.numerics_id for stage in self.stages} - {""}) > 1

    @property
    def fetches(self) -> bool:
        """Whether weights must travel first."""
        return any(stage.fetch_from is not None for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Excluded:
    """A machine that can't run all of the model alone, and why."""

    node_id: NodeId
    why: str
    constraint: Constraint


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice, and what it was chosen from. Equal views give equal plans, on every machine."""

    request: PlanRequest
    chosen: Choice
    runners_up: tuple[Choice, ...]
    """The best of the others, best first."""
    constraint: Constraint
    because: str
    """The constraint in words."""
    notes: tuple[str, ...]
    """What a person should know: where fewer machines are faster, what was assumed."""
    excluded: tuple[Excluded, ...]
    spares: tuple[LayerSpan, ...] = ()
    """For a pipeline that an orchestrator was named for: which machines load which of its spans, as memory allows."""
