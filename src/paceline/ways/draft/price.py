"""What a request would take on one machine that another one drafts for. Symbols as in `fleet.choices`; besides:

    R, B   link RTT s, bytes/s          k   tokens proposed at a time: the best of 3, 7, 15
    a      the acceptance: measured, or assumed until it was

    token = (k / rate of the proposer + R + 4 k / B + N layer + edge + k N prompt layer) / (1 + a + ... + a^k)

Drafted rows cost what prompt rows do, unless steps of so many rows were seen as the model was served. R and B come from `fleet.links`; a is what the
verifier's node saw of that node's drafts, once it had some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from paceline.core.errors import ImpossiblePin
from paceline.engine.drafts import MODELS_DRAFT
from paceline.fleet import choices
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role
from paceline.fleet.choices import Seconds, estimate, first_token_s
from paceline.fleet.machines import DECODE_SHARE, FREE_SHARE, Machine, memory_rate, sensible
from paceline.fleet.plan import Choice, Draft, Estimate, PlanRequest, Way
from paceline.fleet.ways import PricedFleet, PricesWay, whole_machines

DRAFT: Final = Way(MODELS_DRAFT)
"""One machine runs all of it; another proposes tokens to it."""

MOST_PROPOSERS = 16
"""Of those that could draft for a machine, the first in `speed_order` are priced."""

DRAFT_LENGTHS = (3, 7, 15)
"""Tokens proposed at a time: with the row before them they fill kernels' tiles of four rows."""
MODEL_ACCEPTANCE = 0.6
"""Of a draft model's tokens, assumed until it was measured."""


@dataclass(frozen=True, slots=True)
class PricedProposer:
    """Who drafts, as the cost model sees it."""

    tokens_per_s: float
    acceptance: float
    accepts: bool
    """The acceptance was measured."""
    measured: bool
    """And the rate."""


class Drafted(PricesWay):
    """One machine runs all of it, and one proposes tokens to it."""

    way = DRAFT
    drafts = True

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        request = fleet.request
        if request.is_spread_by_pins:
            return []
        # A machine that a person names and that would fetch the weights first is not drafted for.
        able = [machine for machine in whole_machines(fleet, machines) if machine.fetch_from is None or not request.is_pinned]
        found = [choice for machine in able for choice in _drafted(machine, fleet)]
        if found or not request.is_pinned:
            return found
        if not able:
            raise ImpossiblePin(f"{request.proposer} can draft for no machine: none can run {request.title} alone", "Pin another.")
        why = _why_not(fleet, able[0])
        if not request.pins:
            raise ImpossiblePin(f"{request.proposer} can draft for no machine{why}", "Leave the draft out, or pin another.")
        whose = "No machine can" if request.proposer is None else f"{request.proposer} can't"
        raise ImpossiblePin(f"{whose} draft for {able[0].node_id}{why}", "Leave the draft out.")


def _drafted(machine: Machine, fleet: PricedFleet) -> list[Choice]:
    """A machine with each proposer that can draft for it: others first, itself only where no other can."""
    request = fleet.request
    able = sorted(
        (
            (card, offer)
            for card in fleet.cards.values()
            if request.proposer in {None, card.node_id}
            for offer in card.models
            if can_draft(card, offer, machine, request) is None
            and (card.node_id == machine.node_id or fleet.link(machine.node_id, card.node_id) is not None)
        ),
        key=lambda pair: (_rate(*pair) or 0.0, pair[0].memory_total_bytes, pair[0].node_id, repr(pair[1])),
        reverse=True,
    )
    remote = [pair for pair in able if pair[0].node_id != machine.node_id]
    found: list[Choice] = []
    for card, offer in (remote or able)[:MOST_PROPOSERS]:
        proposer = _proposer(card, offer, machine.offer, request)
        between = None if card.node_id == machine.node_id else fleet.link(machine.node_id, card.node_id)
        expected, length = _estimate(machine, proposer, between, request)
        draft = Draft(card.node_id, card.instance, offer.model_id, offer.digest, length, proposer.acceptance, proposer.accepts)
        found.append(choices.choice(DRAFT, [machine], [machine.shape.n_layers], draft, expected))
    return found


def _why_not(fleet: PricedFleet, machine: Machine) -> str:
    request = fleet.request
    if request.proposer is None:
        return ""
    card = fleet.cards[request.proposer]
    reasons = [reason for offer in card.models if (reason := can_draft(card, offer, machine, request)) is not None]
    return f": {reasons[0]}" if reasons else ": it offers no model"


def _estimate(machine: Machine, proposer: PricedProposer, link: Link | None, request: PlanRequest) -> tuple[Estimate, int]:
    """What one machine with another that proposes would take, and the best length of a draft.

    Args:
        link: between them; None: they are one machine.
    """
    options = [(_drafted_token(machine, proposer, link, length, request.abreast), length) for length in DRAFT_LENGTHS]
    token, length = min(options, key=lambda option: (option[0].all, option[1]))
    measured = machine.measured and proposer.measured
    return estimate(first_token_s(machine, request), token, request, measured=measured), length


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens a round of verification yields: those accepted before the first that is not, and the verifier's own."""
    share, expected = 1.0, 1.0
    for _ in range(length):  # not acceptance ** n: powers differ in the last digit from system to system
        share *= acceptance
        expected += share
    return expected


def _drafted_token(machine: Machine, proposer: PricedProposer, link: Link | None, length: int, streams: int) -> Seconds:
    batch = machine.layer_batch_s(streams) * machine.shape.n_layers + machine.edge_batch_s(streams)
    verify = batch + machine.rows_s(streams * length)
    busy = Seconds(streams * length / proposer.tokens_per_s + verify)
    wire = Seconds() if link is None else Seconds(0.0, link.rtt_s, 4 * streams * length / link.bytes_per_s)
    return (busy + wire) * (1 / expected_tokens(proposer.acceptance, length))


def can_draft(card: NodeCard, offer: ModelOffer, machine: Machine, request: PlanRequest) -> str | None:
    """Why an offer can't propose tokens to a machine; None where it can."""
    if offer.role is not Role.PROPOSER:
        return f"{offer.model_id} is not offered for drafting"
    if request.draft_model not in {"", offer.model_id}:
        return f"{offer.model_id} is not the draft model asked for"
    if not offer.vocabulary or offer.vocabulary != machine.offer.vocabulary:
        return f"{offer.model_id} is not known to have the vocabulary of {machine.offer.model_id}"
    if _rate(card, offer) is None:
        return f"nothing is known of its speed with {offer.model_id}"
    shape = offer.shape
    needed = 0 if shape is None or offer.warm else shape.n_layers * shape.layer_bytes + shape.edge_bytes
    if needed > card.running(offer.weights).memory_free_bytes * FREE_SHARE:
        return f"{offer.model_id} does not fit its memory"
    return None


def _proposer(card: NodeCard, offer: ModelOffer, verifier: ModelOffer, request: PlanRequest) -> PricedProposer:
    seen = next((each.acceptance for each in verifier.drafts if (each.node_id, each.model_id) == (card.node_id, offer.model_id)), None)
    said = seen if request.acceptance is None else request.acceptance
    said = None if said is None or not isfinite(said) else min(max(said, 0.0), 1.0)
    acceptance = MODEL_ACCEPTANCE if said is None else said
    measured = sensible(offer.tokens_per_second, 1e-6, 1e9) is not None and said is not None
    return PricedProposer(_rate(card, offer) or 1e-6, acceptance, said is not None, measured)


def _rate(card: NodeCard, offer: ModelOffer) -> float | None:
    """Tokens a second that a proposer drafts; None where nothing is known."""
    measured = sensible(offer.tokens_per_second, 1e-6, 1e9)
    if measured is not None:
        return measured
    memory, shape = memory_rate(card.running(offer.weights)), offer.shape
    if memory is None or shape is None or shape.n_layers * shape.layer_bytes + shape.edge_bytes <= 0:
        return None
    return memory * DECODE_SHARE / (shape.n_layers * shape.layer_bytes + shape.edge_bytes)
