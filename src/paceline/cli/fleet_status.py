"""The fleet in `paceline status`, as this machine's node sees it: nodes, since when they are known, their resources, and the models that they run.

A machine in no fleet does not import this. What only a plan needs is imported where a plan is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.backends.memory import human
from paceline.cli.shared_engines import offer_words
from paceline.cli.terminal import counted, print_lines, table_of
from paceline.core.errors import MembershipError, PlacementError
from paceline.core.ids import NodeId
from paceline.core.stats import DraftUse
from paceline.fleet.card import Device, ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import FleetView, Use
from paceline.fleet.placement import ONE_NAME_HINT, different_models, headline
from paceline.net.member.meter import SAME_ID_HINT
from paceline.net.member.state import ENDS_SOON_S, OLD_S, Looked, Sight, look
from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home
from paceline.ways.draft.names import FLEET


async def look_at(homes: Iterable[Home]) -> tuple[list[Looked], MembershipError | None]:
    """Ask the running nodes for the state of their fleets. Returns also the error of the first node that does not answer."""
    found: list[Looked] = []
    missing: MembershipError | None = None
    for home in homes:
        try:
            found.append(await look(FleetFolder(home.fleet)))
        except MembershipError as error:
            missing = missing or error
    return found, missing


def as_json(looked: Looked) -> dict[str, Any]:
    """Return what a node sees as JSON values, for programs."""
    view = looked.sight.view
    return {
        "fleet_id": looked.fleet_id,
        "own_node_id": view.own,
        "rounds": looked.sight.rounds,
        "nodes": [
            {
                **asdict(live.card),
                "instance": live.card.instance.hex(),
                "trust": live.trust,
                "age_s": live.age_s,
            }
            for live in view.nodes
        ],
        "running": [{"model": name, "plan": line} for name, line in looked.sight.plans],
        "plans": [{"model": name, "plan": line} for name, line in _plans(looked)],
        "drafts": [asdict(use) for use in looked.sight.drafts],
        "different_models": [{"model": name, "which": words} for name, words in different_models(view.cards)],
        "clashes": [asdict(clash) for clash in view.clashes],
        "other_versions": [asdict(other) for other in looked.sight.other_versions],
        "revoked": list(view.revoked),
        "revocations_as_of": looked.sight.revocations_as_of,
        "certificate_ends": looked.sight.certificate_ends,
        "failing_peers": [
            {"address": failure.address, "error": failure.error, "since_s": round(-failure.since, 3)} for failure in looked.sight.failures
        ],
    }


def facts(looked: Looked) -> object:
    """Return the facts that make `--watch` print again if they change: everything but the passing of time."""
    return (
        looked.sight.view.cards,
        looked.sight.view.revoked,
        [(use.by, use.node_id, use.model_id, use.trouble) for use in looked.sight.drafts],
        [clash.node_id for clash in looked.sight.view.clashes],
        looked.sight.other_versions,
        [failure.address for failure in looked.sight.failures],
    )


def _memory(device: NodeCard | Device) -> str:
    return f"{human(device.memory_free_bytes)} of {human(device.memory_total_bytes)}" if device.memory_total_bytes else ""


def show(looked: Looked, console: Console) -> None:
    view, lost = looked.sight.view, _lost(looked)
    console.print(Text.assemble("fleet ", (looked.fleet_id, "bold"), f", seen by {view.own}"))
    left = ("node", "trust", "at", "backend")
    table = table_of("node", "trust", "heard", "at", "backend", "memory free", left=left, whole=("at", "node", "backend"))
    for live in view.nodes:
        card = live.card
        heard = "here" if card.node_id == view.own else f"{live.age_s:.0f} s ago"
        devices = (card, *card.devices)
        backends, memory = "\n".join(device.backend for device in devices), "\n".join(map(_memory, devices))
        if card.ring_address:
            backends += f"\nMLX ring, {card.ring_address}"
        row = (card.node_id, live.trust, heard, "\n".join(card.addresses), backends, memory)
        # As texts: in a string [fd00::1] would be taken for markup.
        table.add_row(*map(Text, row), style="red" if card.node_id in lost else None)
    console.print(table)
    for node_id in sorted(lost):
        console.print(Text(f"{node_id} does not answer now", "red"))
    for card in view.cards:
        for line in _models(card):
            console.print(Text(f"{card.node_id}: {line}"), soft_wrap=True)
    for line in _links(view):
        print_lines(console, line)
    for name, line in looked.sight.plans:
        gone = [(f"; {node_id} does not answer now", "red") for node_id in sorted(lost) if _names(line, node_id)]
        console.print(Text.assemble((name, "bold"), f" runs here as planned: {line}", *gone), soft_wrap=True)
    for name, line in _plans(looked):
        console.print(Text.assemble("plan for ", (name, "bold"), f", if it were planned now: {line}"))
    proposers = any(offer.role is Role.PROPOSER and offer.warm for card in view.cards for offer in card.models)
    for use in looked.sight.drafts:
        # Missing drafters are news only to a person who started a machine to draft, or asked for a draft model.
        if use.drafts or use.blocks or proposers or use.by != FLEET:
            print_lines(console, _drafts(use))
    for clash in view.clashes:
        where = f": here at {', '.join(clash.addresses)}, there at {', '.join(clash.other_addresses)}. {SAME_ID_HINT}"
        console.print(Text.assemble((f"{clash.node_id} runs elsewhere too", "red"), where), soft_wrap=True)
    for other in looked.sight.other_versions:
        console.print(Text.assemble((other.words, "red"), f". {other.todo}"), soft_wrap=True)
    for name, words in different_models(view.cards):
        console.print(Text(f"{name}: {words}. {ONE_NAME_HINT}", "yellow"))
    if view.revoked:
        print_lines(console, f"revoked: {', '.join(view.revoked)}")
    for text, is_bad in _trust(looked.sight, time.time()):
        console.print(Text(text, "yellow" if is_bad else "dim"))
    for failure in looked.sight.failures:
        console.print(Text(f"no answer at {failure.address} for {-failure.since:.0f} s: {failure.error}", "yellow"))


def _trust(sight: Sight, now: float) -> list[tuple[str, bool]]:
    """Describe how old this node's certificate and list of revoked nodes are. Each line comes with whether a person should act."""
    lines: list[tuple[str, bool]] = []
    if sight.revocations_as_of:
        age_s = max(0.0, now - sight.revocations_as_of)
        ago = f"{age_s / 86400:.0f} days" if age_s >= 2 * 86400 else f"{age_s / 3600:.0f} h" if age_s >= 3600 else "less than an hour"
        is_old = age_s > OLD_S
        todo = ": start paceline up on the machine with the fleet's CA" if is_old else ""
        lines.append((f"the list of revoked nodes on this machine dates from {ago} ago{todo}", is_old))
    left_s = sight.certificate_ends - now
    if sight.certificate_ends and left_s < ENDS_SOON_S:
        todo = "start paceline up on the machine with the fleet's CA, which renews it"
        lines.append((f"this machine's certificate ends in {left_s // 86400:.0f} days: {todo}", True))
    return lines


def _models(card: NodeCard) -> list[str]:
    """Describe the models that run, with their speed; of the others only the number."""
    lines = [_offer(offer) for offer in card.models if offer.warm or offer.shard is not None]
    cold = sum(offer.role is Role.VERIFIER and not offer.warm for offer in card.models)
    return [*lines, *([f"{counted(cold, 'model')} on disk, not loaded"] if cold else [])]


def _offer(offer: ModelOffer) -> str:
    if offer.engine is not None:
        return offer_words(offer)
    rate = f", {offer.tokens_per_second:g} tokens/s" if offer.tokens_per_second else ""
    if offer.role is Role.PROPOSER:
        return f"drafts with {offer.model_id} ({offer.weights}{rate})"
    if offer.role is Role.EMBEDDER:
        return f"{offer.model_id} (embeddings)"
    if offer.shard is None:
        return f"{offer.model_id} ({offer.weights}{rate})"
    layers, used = offer.shard.layers, f"{offer.shard.streams} of {offer.shard.max_streams} streams"
    if not offer.warm:
        used = f"loading, {offer.shard.loaded_percent} %"
    return f"{offer.model_id} layers {layers.words} ({offer.weights}, {used})"


def _drafts(use: DraftUse) -> str:
    """Describe the drafts for the model that runs here: the drafter, and how well its drafts did."""
    who = f"{use.model_id} on {use.node_id}" if use.node_id else use.by
    parts = ["none verified yet"]
    if use.drafts and use.drafted_tokens:
        right, each = use.accepted_tokens / use.drafted_tokens, use.accepted_tokens / use.drafts
        parts = [f"{right:.0%} right, {each:.1f} tokens a draft, {counted(use.accepted_tokens, 'step')} saved"]
    if use.blocks:
        hop_ms = use.hop_s * 1000
        parts.append(f"{counted(use.blocks, 'block')} asked for, {hop_ms:.{0 if hop_ms >= 10 else 1}f} ms from ask to answer")
    if use.failures:
        parts.append(f"{use.failures} failed")
    if use.trouble:
        parts.append(f"no drafts at present: {use.trouble}")
    return f"drafts here, {who}: {'; '.join(parts)}"


def _links(view: FleetView) -> list[str]:
    return [
        f"link {card.node_id} - {link.to}: {link.rtt_s * 1000:.2g} ms, {human(int(link.bytes_per_s))}/s at {link.address}"
        for card in view.cards
        for link in card.links
    ]


def _lost(looked: Looked) -> frozenset[NodeId]:
    """Return the nodes that have a valid card and answer at none of their addresses."""
    silent = {failure.address for failure in looked.sight.failures}
    cards = (card for card in looked.sight.view.cards if card.node_id != looked.sight.view.own)
    return frozenset(card.node_id for card in cards if card.addresses and silent.issuperset(card.addresses))


def _names(line: str, node_id: NodeId) -> bool:
    """Return whether a plan in words names a node."""
    return re.search(rf"(?<![\w.-]){re.escape(node_id)}(?![\w.-])", line) is not None


def _plans(looked: Looked) -> list[tuple[str, str]]:
    """Plan which nodes would run each model that others serve, without nodes that do not answer. Returns a line or an error for each model."""
    served = {offer.model_id for card in looked.sight.view.cards for offer in card.models if offer.warm and offer.runs_whole}
    if served <= {name for name, _ in looked.sight.plans}:
        return []
    from paceline.machine.config_file import read_settings, read_trust_policy
    from paceline.node.ways import plan, plan_request
    from paceline.ways.pipeline.order import PipelineOrder, typical_request

    eligible, lost = read_trust_policy(Home.from_environment()).eligible(looked.sight.view, Use.ANSWER), _lost(looked)
    settings, trust = read_settings(Home.from_environment()), {live.card.node_id: live.trust for live in looked.sight.view.nodes}
    cards = [card for card in eligible.cards if card.node_id not in lost]
    offers = [offer for card in cards for offer in card.models if offer.warm and offer.runs_whole]
    context = {offer.model_id: offer.shape.max_context for offer in offers if offer.shape is not None}
    lines: list[tuple[str, str]] = []
    for name in sorted(context.keys() - {name for name, _ in looked.sight.plans}):
        try:
            request = plan_request(
                PipelineOrder(settings.pipeline, exact=settings.plan.exact), name, lengths=typical_request(context[name])
            )
            lines.append((name, headline(plan(cards, request, trust).chosen)))
        except PlacementError as error:
            lines.append((name, error.message))
    return lines
