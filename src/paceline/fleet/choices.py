"""Choices of a plan: their price, their stages and their order; and when a node moves from its present choice to a better one.

Law of the order, by the first difference:
1. weights that are there before weights that must be fetched;
2. several machines with an estimated speed after everything else;
3. the request's time, with its share of the time to load, to two digits, so that tiny differences change nothing. Several machines count a tenth
   longer, since estimates are rough;
4. fewer machines;
5. the exact time;
6. more memory, then the higher id.

    P, A       tokens of prompt and answer                  N       layers of the model
    1/d, 1/p   decode and prefill rates on a card, tok/s    w, e    bytes of a layer, of embedding + norm + head
    M          memory bytes/s                               u       KV bytes of a token in a layer / (M KV_READ_SHARE): reading them

    machine    layer = d w / (N w + e) + u (P + A / 2)          edge = d e / (N w + e)
               prompt layer = p / N + u PROMPT_KV max(0, P - 512) / 2
    alone      ttft = P N prompt layer                          token = N layer + edge
    all        total = ttft + (A - 1) token

Each way that spreads work adds formulas of its own, in its own module. For a machine that never ran the model, d = (N w + e) / (M DECODE_SHARE) and
p = d / PREFILL_PER_DECODE; the estimate then counts as not measured. Sources: rates from `machine.speed`, M from `machine.devices`.
bench/placement.py compares the formulas with the engine.

A node changes the way it serves a model with hysteresis, so that a flapping view changes nothing. It changes in two cases: another choice was first,
and better by `BETTER`, at each look for `HELD_S`; or the present one was not among the choices for as long. One look to the contrary restarts the
wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from paceline.core.backoff import LeftOut
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.card import NodeCard, two_digits
from paceline.fleet.machines import Machine
from paceline.fleet.plan import ALONE, Choice, Constraint, Draft, Estimate, Excluded, Plan, PlannedStage, PlanRequest, Way


def alone(machine: Machine, request: PlanRequest) -> Choice:
    streams = request.abreast
    token = machine.layer_batch_s(streams) * machine.shape.n_layers + machine.edge_batch_s(streams)
    expected = estimate(first_token_s(machine, request), Seconds(token), request, measured=machine.measured)
    return choice(ALONE, [machine], [machine.shape.n_layers], None, expected)


def unfit(machine: Machine, request: PlanRequest) -> Excluded | None:
    """Return the reason why a machine can't run all of the model; None if it can."""
    tokens = request.prompt_tokens + request.answer_tokens
    if not machine.runs_whole:
        return Excluded(machine.node_id, "offers layers of the model only", Constraint.NO_CANDIDATE)
    if tokens > machine.shape.max_context:
        why = f"holds a context of {machine.shape.max_context} tokens, and the request has {tokens}"
        return Excluded(machine.node_id, why, Constraint.NO_CANDIDATE)
    # A warm model already has its memory.
    needed = machine.needs(machine.shape.n_layers, edges=True)
    if needed > machine.room_bytes and not machine.offer.warm:
        why = f"needs {gib(needed)} for weights and KV, and has {gib(machine.room_bytes)} to give"
        return Excluded(machine.node_id, why, Constraint.MEMORY)
    return None


LOAD_BYTES_PER_S = 5e8
"""Slowest rate (bytes/s) at which weights are read from a disk and packed. Raising it: loading counts less, so layers that are loaded already are left
sooner for a faster set of machines."""
WORTH_SPREADING = 1.1
"""Factor by which several machines must be faster than one. Raising it: small gains of a pipeline are left unused; lowering it: rough estimates start
pipelines that gain nothing."""


def ranked(choices: Iterable[Choice], cards: Mapping[NodeId, NodeCard], request: PlanRequest) -> list[Choice]:
    """Sort choices, best first."""
    by_id = sorted(choices, key=lambda choice: (choice.node_ids, repr(choice)), reverse=True)
    return sorted(by_id, key=lambda choice: _rank(choice, cards, request))


def gib(n_bytes: int) -> str:
    """Format bytes for a person."""
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.0f} MiB"


def rate(choice: Choice) -> str:
    """Format the answer's tokens per second for a person."""
    return f"{choice.estimate.tokens_per_s:.3g} tokens/s"


def seconds(duration_s: float) -> str:
    """Format a duration for a person."""
    if duration_s < 1:
        return f"{1000 * duration_s:.3g} ms"
    return f"{duration_s:.3g} s" if duration_s < 1000 else f"{duration_s:.0f} s"


def _rank(choice: Choice, cards: Mapping[NodeId, NodeCard], request: PlanRequest) -> tuple[bool, bool, float, int, float, int]:
    is_spread = len(choice.stages) > 1
    total_s = choice.estimate.total_s * (WORTH_SPREADING if is_spread else 1.0)
    total_s += max(stage.load_bytes for stage in choice.stages) / LOAD_BYTES_PER_S / request.requests
    memory = cards[choice.stages[0].node_id].memory_total_bytes
    is_guess = is_spread and not choice.estimate.measured
    return (choice.fetches, is_guess, two_digits(total_s), len(choice.node_ids), total_s, -memory)


def choice(way: Way, machines: Sequence[Machine], layers: Sequence[int], draft: Draft | None, estimate: Estimate) -> Choice:
    """Build a choice in which each machine runs as many consecutive layers as `layers` says, in this order."""
    stages: list[PlannedStage] = []
    start = 0
    for place, (machine, count) in enumerate(zip(machines, layers, strict=True)):
        card, offer, shape = machine.card, machine.offer, machine.shape
        fetch_bytes = 0
        if machine.fetch_from is not None:
            fetch_bytes = shape.layer_bytes * count + (0 if place else shape.edge_bytes)
        span = LayerRange(start, start + count)
        warm = offer.warm or _is_loaded(machine, span)
        load_bytes = 0 if warm else shape.layer_bytes * count + (0 if place else shape.edge_bytes)
        stages.append(PlannedStage(card.node_id, card.instance, span, offer.numerics_id, warm, machine.fetch_from, fetch_bytes, load_bytes))
        start += count
    offer = machines[0].offer
    return Choice(way, offer.model_id, offer.digest, offer.weights, tuple(stages), draft, estimate)


def _is_loaded(machine: Machine, span: LayerRange) -> bool:
    """Return whether a loaded shard on that node covers these layers."""
    wanted = machine.offer
    return any(
        each.shard is not None
        and each.warm
        and each.model == wanted.model
        and each.shard.layers.start <= span.start
        and span.stop <= each.shard.layers.stop
        for each in machine.card.models
    )


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds by cause: computing, round trips, bytes on links."""

    compute: float = 0.0
    latency: float = 0.0
    bandwidth: float = 0.0

    @property
    def all(self) -> float:
        return fsum((self.compute, self.latency, self.bandwidth))

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.latency + other.latency, self.bandwidth + other.bandwidth)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(self.compute * times, self.latency * times, self.bandwidth * times)


def estimate(ttft: Seconds, token: Seconds, request: PlanRequest, *, measured: bool) -> Estimate:
    """Estimate a whole request from the time of its first token and of each later one."""
    total = ttft + token * (request.answer_tokens - 1)
    return Estimate(request.abreast / token.all, ttft.all, total.all, total.compute, total.latency, total.bandwidth, measured)


def first_token_s(machine: Machine, request: PlanRequest) -> Seconds:
    return Seconds(machine.prompt_layer_s * machine.shape.n_layers * request.prompt_tokens * request.abreast)


def sum_of(parts: Sequence[Seconds]) -> Seconds:
    """Add times. The sums are correctly rounded, so that every version of Python gives the same plan."""
    return Seconds(fsum(part.compute for part in parts), fsum(part.latency for part in parts), fsum(part.bandwidth for part in parts))


BETTER = 1.25
"""Factor by which a typical request must take longer as the model is served now. Raising it: a faster way is left unused; lowering it: models are
loaded again for gains below the estimates' error."""
HELD_S = 60.0
"""Seconds for which that must hold. Raising it: a new machine is used later, and a lost one is missed for longer; lowering it: a machine that comes and
goes makes nodes load models again each time."""
FAILED_S = 3600.0
"""Seconds until a way that failed to start is tried again. Raising it: a passing fault costs its gain for longer; lowering it: a model is unloaded and
restored in vain more often."""


_Same = tuple[Way, tuple[NodeId, ...]]


class Standing:
    """The choice that serves a model, and the time for which another has been better."""

    def __init__(self, running: Choice) -> None:
        self.running = running
        """The running choice, with its last price."""
        self.rather: Choice | None = None
        """The choice that the last plan prefers; None: the running one is good enough."""
        self._since_s: float | None = None
        self._failed: LeftOut[_Same, None] = LeftOut()
        """Choices that failed to start, until `FAILED_S` have passed."""

    def look(self, made: Plan | None, now: float, *, is_whole: bool = True) -> Choice | None:
        """Compare the running choice with a new plan. Returns: the choice to move to; None: stay.

        Args:
            made: the plan of the present view; None: there is none, so the node stays.
            now: monotonic seconds.
            is_whole: False if a pipeline no longer runs as it was built, although its machines may be back.
        """
        priced = None if made is None else next((each for each in (made.chosen, *made.runners_up) if is_same(each, self.running)), None)
        if priced is not None and _parts(priced) == _parts(self.running):
            self.running = priced
        better = None if made is None else _better(made.chosen, priced if is_whole else None)
        if better is None or (self.rather is not None and not is_same(better, self.rather)):
            self._since_s = None
        self.rather = better
        if better is None:
            return None
        self._since_s = now if self._since_s is None else self._since_s
        if _same(better) in self._failed.now(now):
            return None
        return better if now - self._since_s >= HELD_S else None

    def failed(self, chosen: Choice, now: float) -> None:
        self._failed.add(_same(chosen), now + FAILED_S, None)

    def moved(self, chosen: Choice) -> None:
        self.running, self.rather, self._since_s = chosen, None, None


def _parts(choice: Choice) -> list[tuple[LayerRange, float]]:
    """Return each stage's layers, and the speed of its rank (0 without ranks)."""
    return [(stage.layers, 0.0 if stage.rank is None else stage.rank.speed) for stage in choice.stages]


def is_same(one: Choice, other: Choice) -> bool:
    """Return whether two choices use the same machines in the same way. Measurements, and the layers of each machine, don't count."""
    return _same(one) == _same(other)


def _same(choice: Choice) -> _Same:
    return choice.way, tuple(choice.node_ids)


def _better(chosen: Choice, running: Choice | None) -> Choice | None:
    if running is chosen:
        return None
    if running is None or running.estimate.total_s >= BETTER * chosen.estimate.total_s:
        return chosen
    return None
