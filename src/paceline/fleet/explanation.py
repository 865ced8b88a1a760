"""A plan in plain words: what was chosen, what else there was, and what stands in the way of better. Pure text, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.fleet.choices import gib, rate, seconds
from paceline.fleet.plan import Choice, Objective, Plan, Stage


def explain(plan: Plan) -> Iterator[str]:
    """Lines for a person."""
    best, request = plan.chosen, plan.request
    weights = f", {best.weights} weights" if best.weights else ""
    streams = f", {request.abreast} streams side by side" if request.objective is Objective.THROUGHPUT else ""
    yield f"{best.model_id}{weights}, {request.prompt_tokens} tokens of prompt, {request.answer_tokens} of answer{streams}"
    yield f"plan: {headline(best)}: {figures(best)}"
    yield from (f"  {line}" for line in parts(best))
    yield from (f"  {spare.node_id} is spare for layers {spare.layers.words}" for spare in plan.spares)
    yield f"bound by {plan.constraint}: {plan.because}"
    yield from (f"note: {note}" for note in plan.notes)
    if plan.runners_up:
        yield "otherwise:"
        yield from (f"  {headline(choice)}: {figures(choice)}" for choice in plan.runners_up)
    if plan.excluded:
        yield "not alone:"
        yield from (f"  {each.node_id} {each.why}" for each in plan.excluded)


def headline(choice: Choice) -> str:
    """Who does what, in one line."""
    first = choice.stages[0]
    if len(choice.stages) > 1:
        return " -> ".join(f"{stage.node_id} {_layers(stage)}" for stage in choice.stages)
    if choice.draft is None:
        return f"{first.node_id} alone"
    if choice.draft.node_id == first.node_id:
        return f"{first.node_id}, drafting for itself with {choice.draft.model_id}"
    return f"{first.node_id}, {choice.draft.node_id} drafting with {choice.draft.model_id}"


def figures(choice: Choice) -> str:
    """What it would take, in one line."""
    sure = "" if choice.estimate.measured else "about "
    return f"{sure}{rate(choice)}, first token after {seconds(choice.estimate.ttft_s)}, all after {seconds(choice.estimate.total_s)}"


def parts(choice: Choice) -> Iterator[str]:
    """Each machine's share, where there is more to say than the headline does."""
    for stage in choice.stages:
        if stage.fetch_from is not None:
            yield f"{stage.node_id} fetches {gib(stage.fetch_bytes)} from {stage.fetch_from} first"
        elif not stage.warm:
            yield f"{stage.node_id} loads the model first"
    if choice.draft is not None:
        yield f"{choice.draft.node_id} proposes {choice.draft.length} tokens at a time, {choice.draft.acceptance:.0%} accepted"


def _layers(stage: Stage) -> str:
    return f"[{stage.layers.start}..{stage.layers.stop - 1}]" if len(stage.layers) else "[no layers]"
