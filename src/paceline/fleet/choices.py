"""Choices of a plan: what they would take, how they are made of machines and layers, and their order.

Law of the order: weights that are there before weights that must travel; one machine before several whose speed is a guess; then the whole request's
time with its part of the time to load, to two digits, so that a hair's breadth moves nothing, and a tenth longer where several machines run layers,
since estimates are rough; then fewer machines; then the time exactly; then more memory, then the higher id.

    P, A       tokens of prompt and answer                  N       layers of the model
    1/d, 1/p   decode and prefill rates on a card, tok/s    w, e    bytes of a layer, of embedding + norm + head
    M          memory bytes/s                               u       KV bytes of a token in a layer / (M KV_READ_SHARE): reading them

    machine    layer = d w / (N w + e) + u (P + A / 2)          edge = d e / (N w + e)
               prompt layer = p / N + u PROMPT_KV max(0, P - 512) / 2
    alone      ttft = P N prompt layer                          token = N layer + edge
    all        total = ttft + (A - 1) token

Each way that spreads work adds formulas of its own, in its room. d and p of a machine that never ran the model: d = (N w + e) / (M DECODE_SHARE),
p = d / PREFILL_PER_DECODE; the estimate is then called not measured. Sources: rates from `machine.speed`, M from `machine.devices`; the formulas
against the engine: bench/placement.py.

A node leaves the way it serves a model for another with hysteresis, so that what flaps in a view moves nothing: once that was the first choice, and better
by `BETTER`, at each look for `HELD_S`; or once what runs was no choice at all for as long. One look that says otherwise begins the wait anew.
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
    """Why a machine can't run all of the model; None where it can."""
    tokens = request.prompt_tokens + request.answer_tokens
    if not machine.runs_whole:
        return Excluded(machine.node_id, "offers layers of the model only", Constraint.NO_CANDIDATE)
    if tokens > machine.shape.max_context:
        why = f"holds a context of {machine.shape.max_context} tokens, and the request has {tokens}"
        return Excluded(machine.node_id, why, Constraint.NO_CANDIDATE)
    # What is warm has its memory already.
    needed = machine.needs(machine.shape.n_layers, edges=True)
    if needed > machine.room_bytes and not machine.offer.warm:
        why = f"needs {gib(needed)} for weights and KV, and has {gib(machine.room_bytes)} to give"
        return Excluded(machine.node_id, why, Constraint.MEMORY)
    return None


LOAD_BYTES_PER_S = 5e8
"""Of weights read from a disk and packed, at the least. Raising it: layers that are loaded already are left sooner for a faster set of machines."""
WORTH_SPREADING = 1.1
"""Several machines must be faster than one by so much."""


def ranked(choices: Iterable[Choice], cards: Mapping[NodeId, NodeCard], request: PlanRequest) -> list[Choice]:
    """Best first."""
    by_id = sorted(choices, key=lambda choice: (choice.node_ids, repr(choice)), reverse=True)
    return sorted(by_id, key=lambda choice: _rank(choice, cards, request))


def gib(n_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.0f} MiB"


def rate(choice: Choice) -> str:
    """Tokens a second, as a person reads them."""
    return f"{choice.estimate.tokens_per_s:.3g} tokens/s"


def seconds(duration_s: float) -> str:
    """A duration as a person reads it."""
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
    """A choice: so many layers on each machine, in this order."""
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
    """Whether a shard on that node has these layers."""
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
    """Time, by what it is spent on."""

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
    """A whole request, from its first token and each later one."""
    total = ttft + token * (request.answer_tokens - 1)
    return Estimate(request.abreast / token.all, ttft.all, total.all, total.compute, total.latency, total.bandwidth, measured)


def first_token_s(machine: Machine, request: PlanRequest) -> Seconds:
    return Seconds(machine.prompt_layer_s * machine.shape.n_layers * request.prompt_tokens * request.abreast)


def sum_of(parts: Sequence[Seconds]) -> Seconds:
    """Exactly rounded, so that no version of Python adds them otherwise."""
    return Seconds(fsum(part.compute for part in parts), fsum(part.latency for part in parts), fsum(part.bandwidth for part in parts))


BETTER = 1.25
"""How many times longer a typical request must take as the model is served now. Raising it: a faster way is left unused; lowering it: models are
loaded anew for gains that estimates can't tell."""
HELD_S = 60.0
"""For how long that must hold. Raising it: a machine that came is used later, and one that left is missed for longer; lowering it: a machine that
comes and goes has models loaded anew each time."""
FAILED_S = 3600.0
"""For how long a way that could not be had after all is not tried again. Raising it: a passing fault costs its gain for longer; lowering it: a model
is taken away and brought back for nothing more often."""


_Same = tuple[Way, tuple[NodeId, ...]]


class Standing:
    """What serves a model, and for how long something else would have been better."""

    def __init__(self, running: Choice) -> None:
        self.running = running
        """As it was priced last."""
        self.rather: Choice | None = None
        """What the last plan would have in its place."""
        self._since_s: float | None = None
        self._failed: LeftOut[_Same, None] = LeftOut()
        """What could not be had."""

    def look(self, made: Plan | None, now: float, *, is_whole: bool = True) -> Choice | None:
        """What to move to, if to anything.

        Args:
            made: the plan as the view is now; None: there is none, so that there is nothing to move to.
            is_whole: whether what runs is what was built: a machine may have been lost, and be there again.
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
    """What each of its machines has."""
    return [(stage.layers, 0.0 if stage.rank is None else stage.rank.speed) for stage in choice.stages]


def is_same(one: Choice, other: Choice) -> bool:
    """Whether two choices are the same machines doing the same, whatever was measured meanwhile. Which layers each has is the pipeline's."""
    return _same(one) == _same(other)


def _same(choice: Choice) -> _Same:
    return choice.way, tuple(choice.node_ids)


def _better(chosen: Choice, running: Choice | None) -> Choice | None:
    if running is chosen:
        return None
    if running is None or running.estimate.total_s >= BETTER * chosen.estimate.total_s:
        return chosen
    return None
