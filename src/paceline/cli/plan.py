"""`paceline plan MODEL`: which machines would run it, what else there is, and what stands in the way of better."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from paceline.cli.loaded import loaded_here, shared_here
from paceline.cli.running import fleet_homes, running
from paceline.cli.terminal import Terminal, print_json, print_lines, table_of
from paceline.core.background import run_interruptibly
from paceline.core.errors import MembershipError
from paceline.core.ids import NodeId, Trust
from paceline.fleet.choices import seconds
from paceline.fleet.placement import basis, headline, parts
from paceline.fleet.plan import Estimate, PlanRequest
from paceline.node.ways import Explained, View, explained
from paceline.store.home import Home

Seen = tuple[View | None, Collection[NodeId] | None, Sequence[tuple[str, str]], Mapping[NodeId, Trust]]
"""The live cards of nodes that may answer, which of them may share KV, how models are served that run here, and each node's trust level. None stands
where only this machine is looked at."""


MEANINGS: Final = {
    " [": "[0..9]: the layers that a machine runs, counted from 0; what it computes of a token goes on to the next machine (->)",
    "[embedding": "[embedding and head]: it runs no layers; a token begins and ends there",
    "ranks on": "ranks: each machine has its share of every layer, and all compute a token at the same time",
    "drafting": "drafting: it guesses tokens ahead, with a smaller model; a right guess saves a step",
}
"""Explanations of the words in the first column."""


def run_plan(request: PlanRequest, seen: Seen, *, as_json: bool) -> None:
    """Plan, then print it for a person or as JSON; raises PlacementError where no machine can run it."""
    view, sharers, runs, trust = seen
    loaded, shared = (loaded_here(), shared_here()) if view is None else ((), ())
    made = explained(request, view, sharers, loaded, trust, shared)
    if as_json:
        print_json(made.as_json())
    else:
        show(Terminal(), made)
        for words in (words for name, words in runs if made.plan is not None and name == made.plan.chosen.model_id):
            print_lines(Terminal(), f"it runs now, as planned then: {words}")


def show(console: Console, made: Explained) -> None:
    """Print a plan for a person: what was chosen on top, the others below it, then why."""
    plan, request = made.plan, made.request
    lengths = f"{request.prompt_tokens} tokens of prompt, {request.answer_tokens} of answer"
    name = made.engines[0].model_id if plan is None else plan.chosen.model_id
    weights = f", {plan.chosen.weights} weights" if plan is not None and plan.chosen.weights else ""
    console.print(Text.assemble((name, "bold"), f"{weights}, {lengths}"))
    table = table_of("plan", "tokens/s", "first token", "whole answer", "", left=("plan", ""))
    choices = () if plan is None else (plan.chosen, *plan.runners_up)
    rows = [
        *(_row(headline(choice), choice.estimate) for choice in choices),
        *(_row(each.headline, each.estimate) for each in made.engines),
    ]
    for place, row in enumerate(rows):
        table.add_row(*(Text(cell, "bold" if place == 0 else "dim") for cell in row))
    console.print(table)
    for meaning in (meaning for word, meaning in MEANINGS.items() if any(word in row[0] for row in rows[: len(choices)])):
        console.print(Text(meaning, "dim"))
    if plan is not None:
        for line in parts(plan.chosen):
            console.print(Text(f"- {line}"))
        console.print(Text.assemble("limited by ", (str(plan.constraint), "bold"), f": {plan.because}"))
    for line in made.lines:
        if line.startswith("note: "):
            console.print(Text(line, "yellow"))
        elif line.startswith("prompts: "):
            console.print(Text(line))
    for each in () if plan is None else plan.excluded:
        console.print(Text(f"can't run it alone: {each.node_id} {each.why}", "dim"))


def _row(what: str, estimate: Estimate | None) -> tuple[str, str, str, str, str]:
    if estimate is None:
        return what, "", "", "", "not measured yet"
    return what, f"{estimate.tokens_per_s:.3g}", seconds(estimate.ttft_s), seconds(estimate.total_s), basis(estimate.measured)


def fleet_view() -> Seen:
    """Return the fleet as a node that runs here sees it."""
    home = Home.from_environment()
    missing: MembershipError | None = None
    for each in fleet_homes(home, running(home)):
        try:
            return _seen(each)
        except MembershipError as error:
            missing = missing or error
    if missing is not None:
        print(f"note: {missing.message}, so this is about this machine alone", file=sys.stderr)
    return None, None, (), {}


def _seen(home: Home) -> Seen:

    from paceline.fleet.eligibility import Use
    from paceline.machine.config_file import read_trust_policy
    from paceline.net.member.state import look
    from paceline.net.trust.folder import FleetFolder

    policy, sight = read_trust_policy(home), run_interruptibly(look(FleetFolder(home.fleet))).sight
    cards = policy.eligible(sight.view, Use.ANSWER).cards
    trust = {live.card.node_id: live.trust for live in sight.view.nodes}
    return lambda: cards, {card.node_id for card in policy.eligible(sight.view, Use.SHARE_KV).cards}, sight.plans, trust
