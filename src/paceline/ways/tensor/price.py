"""Tensor ranks, for the plan: two or three machines that share every layer, and what a request over them would take.

Law: only machines that compute the same bytes, compiled, and have the weights. A share is what `deal` makes of the ranks' speeds, so that it is what runs;
the speeds are those of decoding, of prompts or of the whole request, whichever ends sooner, lowered where a share would not fit a machine.

Symbols as in `fleet.choices`; besides a, f, v: a rank's parts of attention, feed-forward and head; c: the part of a layer's weights that is attention's;
w, k: what a layer's weights and one row's KV take; R, B: a link's round trip, of the network alone, and bytes a second.

    half       R / 2 + EXCHANGE_S + bytes / B; bytes: 4 x hidden x rows for each partial sum. Three ranks meet at the first: two ways instead of one
    layer      max(a (c w + k)) + max(f (1 - c) w) + 2 half: ranks wait for one another at the end of each
    token      N layer + max(v edge) + the command's way, the head's, and that of its outputs: 3/2 R + 4 x vocab / B
    ttft       the same for each chunk of a prompt
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, permutations
from typing import Final

from paceline.backends.cpu.shares import LANES, RANK_BYTES, Share, deal, segment_bounds, subtrees
from paceline.core.errors import ImpossiblePin
from paceline.core.weights import GROUP
from paceline.fleet import choices
from paceline.fleet.card import DividedShape, Link, two_digits
from paceline.fleet.choices import Seconds, estimate, sum_of
from paceline.fleet.machines import Machine, alike, stage_machines
from paceline.fleet.plan import Choice, PlannedRank, PlanRequest, Way
from paceline.fleet.ways import PricedFleet, PricesWay

TENSOR: Final = Way("tensor")
"""Each machine has a part of every layer."""
ONLY = frozenset({TENSOR})
EXCHANGE_S = 1e-4
"""What both ends of an exchange take beside its way. Measured: 73 us on hosts of one core that read weights, too, beside other work (bench/RESULTS.md)."""
CALL_S = 5e-4
"""Of a link's round trip, what the RPC takes that measured it, where a card does not say what the network takes. Below what cards say of loopback, 0.84 ms
on a busy machine: a way is rather called slow."""
CHUNK = 512
"""Prompt rows of a step: the engine's default."""
SUM_BYTES, LOGIT_BYTES, ROW_BYTES = 4, 4, 2
"""Of each value on the wire: of a partial sum, of the head's outputs, of the residual."""
MOST_RANKS = 3
MOST_HOSTS = 6
"""For each first machine, the quickest beside it are looked at. Raising it makes plans slower to compute."""
_TRIES, _LESS = 16, 0.8
"""How often a machine's share is made smaller where it does not fit, and by how much."""
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's."""

    kv_heads: int
    attention: float
    feed_forward: float
    head: float
    sums: tuple[int, int]
    """Partial sums that it hands on at the end of attention and of the feed-forward."""


def _way_s(link: Link) -> float:
    """One way, without what a call takes beside it."""
    return (max(0.0, link.rtt_s - CALL_S) if link.network_s is None else link.network_s) / 2


@lru_cache(4096)
def _dealt(divided: DividedShape, speeds: tuple[float, ...]) -> tuple[_Part, ...]:
    out, down = (len(segment_bounds(units)) - 1 for units in (divided.n_kv_heads, divided.ffn // GROUP))

    def part(share: Share) -> _Part:
        inner = share.inner(divided)
        return _Part(
            len(share.kv_heads),
            len(share.kv_heads) / divided.n_kv_heads,
            len(inner) / (divided.ffn // GROUP * GROUP),
            len(share.vocab) * LANES / divided.vocab,
            (len(subtrees(share.out, out)), len(subtrees(share.down, down))),
        )

    return tuple(map(part, deal(divided, speeds)))


@dataclass(frozen=True, slots=True)
class _Group:
    """Machines with a measured way from the first to each other one."""

    machines: tuple[Machine, ...]
    links: tuple[Link, ...]
    """One fewer."""

    @property
    def divided(self) -> DividedShape:
        divided = self.machines[0].shape.divided
        assert divided is not None, "it was looked at"
        return divided

    @property
    def attention(self) -> float:
        """Of a layer's weights, what is attention's."""
        return min(1.0, self.divided.attention_bytes / self.machines[0].shape.layer_bytes)

    @property
    def hop_s(self) -> float:
        """From a rank to the one it waits for longest."""
        return sum(sorted(map(_way_s, self.links), reverse=True)[:2])

    def weights(self, part: _Part) -> float:
        """Of a layer's, a rank's part."""
        return part.attention * self.attention + part.feed_forward * (1 - self.attention)

    def needs(self, place: int, part: _Part) -> int:
        """Bytes of a share."""
        machine = self.machines[place]
        layer = machine.shape.layer_bytes * self.weights(part)
        edges = machine.shape.edge_bytes * (1.0 if place == 0 else part.head)
        process = RANK_BYTES if place else 0
        return int(machine.shape.n_layers * (layer + part.attention * machine.kv_layer_bytes) + edges) + machine.working_bytes + process

    def kv_tokens(self, place: int, part: _Part) -> int:
        """What a machine has room for: what was asked, and half of what is left beside it, as a machine alone takes unasked."""
        machine = self.machines[place]
        a_token = part.attention * machine.shape.kv_bytes_per_token_per_layer * machine.shape.n_layers
        asked = machine.kv_layer_bytes // max(1, machine.shape.kv_bytes_per_token_per_layer)
        return min(_MOST_TOKENS, asked + int((machine.room_bytes - self.needs(place, part)) / 2 / max(1.0, a_token)))

    def exchange(self, parts: Sequence[_Part], half: int, rows: float) -> Seconds:
        """At the end of attention (0) or of the feed-forward (1)."""
        sizes = [part.sums[half] * rows * self.machines[0].shape.hidden * SUM_BYTES for part in parts]
        crossing = [max(sum(sizes) - own, own) / link.bytes_per_s for own, link in zip(sizes[1:], self.links, strict=True)]
        return Seconds(EXCHANGE_S, self.hop_s, max(crossing))

    def step(
        self, parts: Sequence[_Part], rows: float, layer_s: Sequence[float], kv_s: Sequence[float], edge_s: Sequence[float]
    ) -> Seconds:
        """One batch.

        Args:
            layer_s: what a layer's weights take with these rows, by machine.
            kv_s: what a layer's KV takes.
            edge_s: what the head takes.
        """
        c, shape = self.attention, self.machines[0].shape
        attention = max(part.attention * (c * w + k) for part, w, k in zip(parts, layer_s, kv_s, strict=True))
        feed_forward = max(part.feed_forward * (1 - c) * w for part, w in zip(parts, layer_s, strict=True))
        head = max(part.head * edge for part, edge in zip(parts, edge_s, strict=True))
        halves = self.exchange(parts, 0, rows) + self.exchange(parts, 1, rows) + Seconds(attention + feed_forward)
        slowest = min(link.bytes_per_s for link in self.links)
        command = Seconds(2 * EXCHANGE_S, 3 * self.hop_s, rows * shape.hidden * ROW_BYTES / slowest)
        return sum_of([halves * shape.n_layers, Seconds(head), command])

    def estimated(self, parts: Sequence[_Part], request: PlanRequest) -> tuple[Seconds, Seconds]:
        """A request's first token, and each later one."""
        machines, streams = self.machines, request.abreast
        slowest = min(link.bytes_per_s for link in self.links)
        logits = Seconds(bandwidth=max(part.head for part in parts[1:]) * self.divided.vocab * LOGIT_BYTES / slowest)
        kv_s = [streams * machine.kv_layer_s for machine in machines]
        layer_s = [machine.layer_batch_s(streams) - kv for machine, kv in zip(machines, kv_s, strict=True)]
        token = self.step(parts, streams, layer_s, kv_s, [machine.edge_batch_s(streams) for machine in machines]) + logits * streams
        chunks = -(-request.prompt_tokens // CHUNK)
        rows = request.prompt_tokens / chunks
        chunk = self.step(
            parts, rows, [machine.prompt_layer_s * rows for machine in machines], [0.0] * len(machines), [0.0] * len(machines)
        )
        head = Seconds(max(part.head * machine.edge_s for part, machine in zip(parts, machines, strict=True)))
        return chunk * (chunks * streams) + head + logits, token


def _speeds(group: _Group, request: PlanRequest) -> Iterator[tuple[float, ...]]:
    """Ranks' speeds to deal by: decoding's, prompts', and those of the whole request."""
    answer, prompt = request.answer_tokens - 1, request.prompt_tokens
    for tokens, rows in ((1, 0), (0, 1), (answer, prompt)):
        seconds = [tokens * machine.layer_s + rows * machine.prompt_layer_s for machine in group.machines]
        yield tuple(two_digits(min(100.0, max(0.01, seconds[0] / own))) for own in seconds)


def _fitting(group: _Group, speeds: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[_Part, ...]] | None:
    """These speeds, or lower ones of machines whose shares don't fit; None: they don't fit together."""
    for _ in range(_TRIES):
        parts = _dealt(group.divided, speeds)
        short = [
            group.needs(place, part) > machine.room_bytes for place, (machine, part) in enumerate(zip(group.machines, parts, strict=True))
        ]
        if not any(short):
            return speeds, parts
        if all(short):
            return None
        speeds = tuple(two_digits(max(0.01, speed * (_LESS if is_short else 1.0))) for speed, is_short in zip(speeds, short, strict=True))
    return None


def _best(group: _Group, request: PlanRequest) -> Choice | None:
    """The quickest of its splits. A rank without any part is none."""
    found = [fitting for speeds in dict.fromkeys(_speeds(group, request)) if (fitting := _fitting(group, speeds)) is not None]
    whole = [(speeds, parts) for speeds, parts in found if all(part.attention or part.feed_forward for part in parts)]
    priced = [
        (estimate(*group.estimated(parts, request), request, measured=all(machine.measured for machine in group.machines)), speeds, parts)
        for speeds, parts in whole
    ]
    if not priced:
        return None
    expected, speeds, parts = min(priced, key=lambda each: (each[0].total_s, each[1]))
    made = [choices.choice(TENSOR, [machine], [machine.shape.n_layers], None, expected) for machine in group.machines]
    stages = tuple(
        replace(
            each.stages[0],
            load_bytes=group.needs(place, part),
            rank=PlannedRank(
                speed, part.kv_heads, part.feed_forward, group.weights(part), group.needs(place, part), group.kv_tokens(place, part)
            ),
        )
        for place, (each, speed, part) in enumerate(zip(made, speeds, parts, strict=True))
    )
    return replace(made[0], stages=stages)


class Shared(PricesWay):
    """Every layer is shared among machines."""

    way = TENSOR
    spreads = True

    def takes_pins(self, request: PlanRequest) -> bool:
        """Return whether only ranks are allowed; otherwise machines are pinned for a pipeline."""
        return request.ways == ONLY

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        request = fleet.request
        if request.proposer is not None or request.last_route or (request.pins and not self.takes_pins(request)):
            return []
        if request.pins and (not request.is_spread_by_pins or any(pin.layers is not None for pin in request.pins)):
            raise ImpossiblePin("Tensor ranks have a part of every layer, on two or three machines", "Pin those, without layers.")
        found: list[Choice] = []
        whole = [machine for machine in machines if machine.fetch_from is None]
        for group in alike([machine for machine in whole if (cut := machine.shape.divided) is not None and cut.ffn >= GROUP]):
            able = stage_machines(group, request, fleet.barred)
            if max((machine.shape.max_context for machine in able), default=0) < request.prompt_tokens + request.answer_tokens:
                continue
            found += [choice for each in _groups(fleet, able) if (choice := _best(each, request)) is not None]
        if request.pins and not found:
            names = ", ".join(pin.node_id for pin in request.pins)
            raise ImpossiblePin(
                f"{names} can't share the layers of {request.title}", "They must be alike, have its weights, and serve shards."
            )
        return list(dict.fromkeys(found))


def _groups(fleet: PricedFleet, able: Sequence[Machine]) -> Iterator[_Group]:
    """Sets of machines, the first of each in all roles that it may have."""
    request, by_id = fleet.request, {machine.node_id: machine for machine in able}
    pins = {pin.node_id for pin in request.pins} | ({request.orchestrator} if request.pins and request.orchestrator is not None else set())
    if pins:
        orders = [order for order in permutations(sorted(pins)) if order[1:] == tuple(sorted(order[1:]))] if len(pins) <= MOST_RANKS else []
        sets = [[by_id[node_id] for node_id in order] for order in orders if by_id.keys() >= pins]
    else:
        sets = [[first, *others] for first in able for others in _companies(fleet, first, able)]
    for first, *others in sets:
        links = [fleet.link(first.node_id, other.node_id) for other in others]
        measured = [link for link in links if link is not None]
        hosts = all(other.card.serves_shards for other in others)
        if (
            first.runs_whole
            and request.orchestrator in {None, first.node_id}
            and hosts
            and len(others) <= request.max_shards
            and len(measured) == len(links)
        ):
            yield _Group((first, *others), tuple(measured))


def _companies(fleet: PricedFleet, first: Machine, able: Sequence[Machine]) -> Iterator[tuple[Machine, ...]]:
    """One or two others, of those whose way is quick enough that exchanges alone don't take what the first takes for a token, the quickest first."""
    halves = 2 * first.shape.n_layers

    def is_near(link: Link | None) -> bool:
        return link is not None and halves * (_way_s(link) + EXCHANGE_S) < first.token_s

    near = [
        other for other in able if other is not first and (fleet.request.ways == ONLY or is_near(fleet.link(first.node_id, other.node_id)))
    ]
    near = sorted(near, key=lambda machine: (machine.token_s, machine.node_id))[:MOST_HOSTS]
    for count in range(1, MOST_RANKS):
        for others in combinations(near, count):
            yield tuple(sorted(others, key=lambda machine: machine.node_id))
