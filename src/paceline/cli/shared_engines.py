"""Shared engines of other makers in words, for `status`, `ps` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from paceline.cli.terminal import counted
from paceline.core.encoding import Task
from paceline.core.errors import PacelineError
from paceline.core.text import printable
from paceline.fleet.card import ModelOffer
from paceline.fleet.choices import seconds
from paceline.fleet.engines import loading, marks, price
from paceline.fleet.plan import PlanRequest
from paceline.machine.foreign.state import EngineState

if TYPE_CHECKING:
    from paceline.machine.foreign.shares import EngineShare


TASKS: Final = frozenset(map(str, Task))


def read_states(said: object) -> tuple[EngineState, ...]:
    """Return the shared engines in an endpoint's answer.

    Raises:
        ValueError: it is not a list of engines.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[EngineState, ...]).validate_python(said)


async def state_at(share: EngineShare) -> EngineState:
    """Ask a shared engine for its name and version. Its models are not asked for."""
    from paceline.engines.table import identify

    try:
        engine, identity = await identify(share.door)
        await engine.close()
    except PacelineError as error:
        return EngineState(share.url, trouble=error.message)
    return EngineState(share.url, str(identity))


def offer_words(offer: ModelOffer) -> str:
    """Describe a model that an engine of another maker runs."""
    engine = offer.engine
    assert engine is not None
    load, expected = loading(offer), price(offer, PlanRequest(offer.model_id))
    first_s = 0.0 if expected is None else expected.ttft_s - load.seconds
    parts = [
        printable(engine.engine),
        printable(engine.quantisation),
        f"{engine.capacity} at once" if engine.capacity else counted(engine.slots, "slot") if engine.slots else "",
        f"{offer.under_way} busy" if offer.under_way else "",
        *(sorted(TASKS.intersection(engine.capabilities))),
        ("" if not offer.runs_whole else f"{offer.tokens_per_second:.3g} tokens/s" if offer.tokens_per_second else "not measured yet"),
        f"first token after {seconds(first_s)}" if first_s else "",
        str(load) if load.seconds else "",
        *marks(leaves_network=engine.leaves_network, plain_http=engine.plain_http),
    ]
    return f"{printable(offer.model_id)} in an engine of another maker ({', '.join(filter(None, parts))})"


def state_lines(state: EngineState) -> Iterator[str]:
    """Yield a line for each model of a shared engine, or one that says why it has none."""
    who = printable(state.engine)
    if state.trouble:
        yield f"shared: {who or 'an engine'} at {state.url} does not answer: {printable(state.trouble, 300)}"
        return
    for model in state.models:
        trouble = f"; not offered now: {model.trouble}" if model.trouble else ""
        yield f"shared: {offer_words(model.offer)}, context {model.context}, memory not counted, at {state.url}{trouble}"
    if not state.models:
        yield f"shared: {who} at {state.url} has no model that can be offered now"
