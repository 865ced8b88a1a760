"""What a request would take: seconds, from measured numbers alone.

    P, A       tokens of prompt and answer                  N, l    layers of the model, of a stage
    1/d, 1/p   decode and prefill rates on a card, tok/s    w, e    bytes of a layer, of embedding + norm + head
    M, R, B    memory bytes/s; link RTT s, bytes/s          v       KV bytes of a token in a layer
    h          2 x hidden bytes: one row of bf16 on the wire    u       v / (M KV_READ_SHARE): reading a token's KV

    machine    layer = d w / (N w + e) + u (P + A / 2)          edge = d e / (N w + e)
               prompt layer = p / N + u PROMPT_KV max(0, P - 512) / 2
    alone      ttft = P N prompt layer                          token = N layer + edge
    pipeline   token = edge + sum(l layer) + sum(hops: R / 2 + h / B), the hop back to the first stage included
               ttft  = edge + sum(one chunk's stages, transfers, R / 2) + (chunks - 1) x the slowest of stages and transfers
    S streams  b = S / min(S, stages) rows in a batch, so that every stage has one. Each row beyond a batch's first adds a prompt row, its
               sequence's KV, and e / (N w p) in the head. token = max(b's token as above, S / b x the slowest stage); S times the chunks
    draft      token = (k / rate of the proposer + R + 4 k / B + N layer + edge + k N prompt layer) / (1 + a + ... + a^k)
    all        total = ttft + (A - 1) token

d and p of a machine that never ran the model: d = (N w + e) / (M DECODE_SHARE), p = d / PREFILL_PER_DECODE; the estimate is then called not
measured. Drafted rows cost what prompt rows do; k is the best of 3, 7, 15; a is the acceptance, assumed until it was measured.
Sources: rates from `machine.speed`, M from `machine.devices`, R and B from `fleet.links`; the formulas against the engine: bench/placement.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from paceline.fleet.card import Link
from paceline.fleet.machines import Machine
from paceline.fleet.plan import Estimate, PlanRequest

CHUNK = 512
"""Prompt rows that enter a pipeline together: the engine's default."""
ROW_BYTES = 2
"""Of a hidden value on the wire: bf16."""
DRAFT_LENGTHS = (3, 7, 15)
"""Tokens proposed at a time: with the row before them they fill kernels' tiles of four rows."""
MODEL_ACCEPTANCE = 0.6
"""Of a draft model's tokens, assumed until it was measured."""
LOOKUP_ACCEPTANCE = 0.2
"""Of tokens looked up in the text so far, assumed until it was measured: high in code and in quotes, near nothing elsewhere."""
LOOKUP_RATE = 1e5
"""Tokens a second of a proposer without weights."""


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


@dataclass(frozen=True, slots=True)
class Bill:
    """What of a pipeline's cost depends on how its layers are split, seconds: sum(n x each) + waits x max(transfer, n x busy)."""

    each: tuple[float, ...]
    """What a layer adds to the request, by machine."""
    busy: tuple[float, ...]
    """How long a layer is at work on a chunk of the prompt, by machine."""
    waits: int
    """Chunks that wait for the slowest stage or transfer."""
    transfer: float


@dataclass(frozen=True, slots=True)
class Work:
    """What keeps each machine busy while all streams are served, seconds: n x layer + edge."""

    layer: tuple[float, ...]
    edge: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PricedProposer:
    """Who drafts, as the cost model sees it."""

    tokens_per_s: float
    acceptance: float
    measured: bool


def alone(machine: Machine, request: PlanRequest) -> Estimate:
    """One machine, all layers."""
    streams = request.abreast
    token = machine.layer_batch_s(streams) * machine.shape.n_layers + machine.edge_batch_s(streams)
    return estimate(_first_token_alone(machine, request), Seconds(token), request, measured=machine.measured)


def draft(machine: Machine, proposer: PricedProposer, link: Link | None, request: PlanRequest) -> tuple[Estimate, int]:
    """One machine, all layers, with another that proposes. And the best length of a draft.

    Args:
        link: between them; None: they are one machine.
    """
    options = [(_drafted_token(machine, proposer, link, length, request.abreast), length) for length in DRAFT_LENGTHS]
    token, length = min(options, key=lambda option: (option[0].all, option[1]))
    measured = machine.measured and proposer.measured
    return estimate(_first_token_alone(machine, request), token, request, measured=measured), length


def bill(machines: Sequence[Machine], links: Sequence[Link], request: PlanRequest) -> Bill:
    """The part of `pipeline` that a split decides; arguments as there."""
    chunks, rows = _chunks(request)
    transfers = [rows * ROW_BYTES * machines[0].shape.hidden / link.bytes_per_s for link in links[:-1]]
    busy = tuple(machine.prompt_layer_s * rows for machine in machines)
    each = tuple(machine.layer_s * (request.answer_tokens - 1) + at_work for machine, at_work in zip(machines, busy, strict=True))
    return Bill(each, busy, chunks - 1, max(transfers))


def work(machines: Sequence[Machine], request: PlanRequest) -> Work:
    """What a split decides of how long all streams take together; arguments as for `pipeline`."""
    batches = micro_batches(request.abreast, len(machines))
    rows = request.abreast / batches
    prompts, tokens = request.abreast * request.prompt_tokens, batches * (request.answer_tokens - 1)
    layer = tuple(machine.prompt_layer_s * prompts + machine.layer_batch_s(rows) * tokens for machine in machines)
    return Work(layer, (machines[0].edge_batch_s(rows) * (tokens + 1), *(0.0 for _ in machines[1:])))


def pipeline(machines: Sequence[Machine], layers: Sequence[int], links: Sequence[Link], request: PlanRequest) -> Estimate:
    """Several machines, each a range of layers.

    Args:
        layers: how many each has.
        links: from each machine to the next, and from the last to the first.
    """
    first = machines[0]
    row_bytes = ROW_BYTES * first.shape.hidden
    batches = micro_batches(request.abreast, len(machines))
    rows = request.abreast / batches
    edge = Seconds(first.edge_batch_s(rows))
    hops = [Seconds(0.0, link.rtt_s / 2, rows * row_bytes / link.bytes_per_s) for link in links]
    stages = [Seconds(machine.layer_batch_s(rows) * n) for machine, n in zip(machines, layers, strict=True)]
    loop = _sum([edge, *stages, *hops])
    busiest = max([edge + stages[0], *stages[1:]], key=lambda stage: stage.all) * batches
    token = loop if loop.all >= busiest.all else busiest

    chunks, rows = _chunks(request)
    at_work = [Seconds(machine.prompt_layer_s * n * rows) for machine, n in zip(machines, layers, strict=True)]
    transfers = [Seconds(bandwidth=rows * row_bytes / link.bytes_per_s) for link in links[:-1]]
    slowest = max([*at_work, *transfers], key=lambda part: part.all)
    waits = Seconds(latency=fsum(link.rtt_s / 2 for link in links))
    way_back = Seconds(bandwidth=row_bytes / links[-1].bytes_per_s)
    ttft = _sum([edge, *at_work, *transfers, slowest * (request.abreast * chunks - 1), waits, way_back])
    return estimate(ttft, token, request, measured=all(machine.measured for machine in machines))


def micro_batches(streams: int, stages: int) -> int:
    """Into how many batches sequences are split, so that no stage waits for another's."""
    return min(streams, stages)


def estimate(ttft: Seconds, token: Seconds, request: PlanRequest, *, measured: bool) -> Estimate:
    """A whole request, from its first token and each later one."""
    total = ttft + token * (request.answer_tokens - 1)
    return Estimate(request.abreast / token.all, ttft.all, total.all, total.compute, total.latency, total.bandwidth, measured)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens a round of verification yields: those accepted before the first that is not, and the verifier's own."""
    share, expected = 1.0, 1.0
    for _ in range(length):  # not acceptance ** n: powers differ in the last digit from system to system
        share *= acceptance
        expected += share
    return expected


def _chunks(request: PlanRequest) -> tuple[int, float]:
    """How many chunks the prompt takes, and how many rows each has."""
    chunks = -(-request.prompt_tokens // CHUNK)
    return chunks, request.prompt_tokens / chunks


def _first_token_alone(machine: Machine, request: PlanRequest) -> Seconds:
    return Seconds(machine.prompt_layer_s * machine.shape.n_layers * request.prompt_tokens * request.abreast)


def _drafted_token(machine: Machine, proposer: PricedProposer, link: Link | None, length: int, streams: int) -> Seconds:
    batch = machine.layer_batch_s(streams) * machine.shape.n_layers + machine.edge_batch_s(streams)
    verify = batch + streams * length * machine.prompt_layer_s * machine.shape.n_layers
    busy = Seconds(streams * length / proposer.tokens_per_s + verify)
    wire = Seconds() if link is None else Seconds(0.0, link.rtt_s, 4 * streams * length / link.bytes_per_s)
    return (busy + wire) * (1 / expected_tokens(proposer.acceptance, length))


def _sum(parts: Sequence[Seconds]) -> Seconds:
    """Exactly rounded, so that no version of Python adds them otherwise."""
    return Seconds(fsum(part.compute for part in parts), fsum(part.latency for part in parts), fsum(part.bandwidth for part in parts))
