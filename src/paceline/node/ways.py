"""Every way of spreading work that this program knows, and the plan over all of them: what the fleet would do with a request, and why. A new way is a folder
beside these and a line here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import ConfigError, ModelNotFound, PacelineError, PlacementError
from paceline.core.following import Holding, may_follow
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, ModelRef, WeightsFormat
from paceline.fleet import engines, placement
from paceline.fleet.card import ModelOffer, NodeCard
from paceline.fleet.engines import PROMISE, PricedEngine
from paceline.fleet.placement import explain
from paceline.fleet.plan import WORTH_A_HOP, Choice, Pin, Plan, PlanRequest, Way
from paceline.fleet.ways import Alone, PricesWay
from paceline.store.home import Home
from paceline.store.selection import is_path
from paceline.ways.draft.price import Drafted
from paceline.ways.pipeline.order import PipelineOrder, request_of
from paceline.ways.pipeline.price import Pipelined
from paceline.ways.pipeline.splits import PIPELINE
from paceline.ways.tensor.price import TENSOR, Shared

if TYPE_CHECKING:
    from paceline.store.catalog import ModelLocation

WAYS: Final[tuple[PricesWay, ...]] = (Alone(), Drafted(), Pipelined(), Shared())


def plan(view: Iterable[NodeCard], request: PlanRequest, trust: Mapping[NodeId, Trust] | None = None) -> Plan:
    """As `fleet.placement.plan`, over all ways."""
    return placement.plan(view, request, WAYS, trust)


SPREAD: Final = frozenset({PIPELINE, TENSOR})
"""Ways in which other machines run layers, or parts of them."""


def plan_request(
    order: PipelineOrder,
    model: str,
    weights: str = "",
    *,
    own: NodeId | None = None,
    lengths: tuple[int, int],
    ways: frozenset[Way] | None = None,
    proposer: NodeId | None = None,
    ranks_on: Sequence[str | None] = (),
    **fields: Any,
) -> PlanRequest:
    """Return what a plan is asked. `plan`, `up`, `status` and every replanning make their requests here, so that they agree.

    Args:
        order: config.toml with the flags that override it, pins, and layers of this machine.
        model, weights: as `PlanRequest` has them.
        own: the node that serves the model; None: any may.
        lengths: tokens of a typical prompt and answer.
        ways: those allowed; None: all.
        proposer: as `PlanRequest` has it.
        ranks_on: the machines that were named for tensor ranks, None for a rank of this machine. They are a constraint, as pins are.
        fields: other fields of the request.

    Raises:
        ConfigError: no way is left.
    """
    others = tuple(NodeId(name) for name in ranks_on if name is not None)
    if others and len(ranks_on) == len(others) + 1:  # several ranks on one machine are in no plan: they stay a matter of this machine
        request = request_of(replace(order, pins=tuple(map(Pin, others)), own_layers=None), model, weights, own, lengths)
        return replace(request, ways=frozenset({TENSOR}), **fields)
    ways = frozenset(each.way for each in WAYS) if ways is None else ways
    allowed = ways if order.settings.enabled else ways - SPREAD
    if ways and not allowed:
        from paceline.machine.config_file import CONFIG_FILE

        raise ConfigError(
            f"{CONFIG_FILE} switches off {' and '.join(sorted(ways))}", "Set enabled = true in its table [pipeline], or allow other ways."
        )
    return replace(request_of(order, model, weights, own, lengths), ways=allowed, proposer=proposer, **fields)


View = Callable[[], Sequence[NodeCard]]
"""The live cards, as a node of the fleet sees them."""


@dataclass(frozen=True, slots=True)
class Explained:
    plan: Plan | None
    """None: only engines of other makers have the model."""
    lines: tuple[str, ...]
    request: PlanRequest
    engines: tuple[PricedEngine, ...] = ()
    """Engines of other makers that could answer, best first."""

    def as_json(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"request": asdict(self.request), "chosen": None, "runners_up": []}
        made = nothing if self.plan is None else asdict(self.plan)
        engines = [asdict(each) | {"promise": PROMISE} for each in self.engines]
        return plain(made | {"engines": engines}) | {"explanation": list(self.lines)}


def explained(
    request: PlanRequest,
    view: View | None = None,
    sharers: Collection[NodeId] | None = None,
    loaded: Collection[str] = (),
    trust: Mapping[NodeId, Trust] | None = None,
    shared: Sequence[ModelOffer] = (),
) -> Explained:
    """Plan a request and say why.

    Args:
        request: what for. Its model may be named as on this machine (an alias, a path).
        view: the fleet; default: this machine alone, as it sees itself.
        sharers: nodes that may share KV with one another; None: all.
        loaded: models that run on this machine now, where there is no view.
        trust: what certificates say of nodes; those left out are members.
        shared: models of engines that this machine shares now, where there is no view.

    Raises:
        PlacementError, UnsupportedModel: no machine and no engine can answer; only this machine has the model, and can't run it.
        ModelNotFound, ModelFileError: its model is a path, of which there is no model.
    """
    found = _known_here(request.model)
    cards = this_machine(None if isinstance(found, PacelineError) else found, loaded, shared) if view is None else view()
    named = {offer.model_id for card in cards for offer in card.models}
    if request.model not in named:
        if not isinstance(found, PacelineError):  # this machine may call it otherwise: an alias, a path
            request = replace(request, model=found.name)
            if found.name not in named:  # it may be that it can't run here, which raises why
                from paceline.backends import table
                from paceline.store.catalog import open_weights
                from paceline.store.digests import DigestCache

                table.choose(open_weights(found.path, DigestCache(Home.from_environment())).spec, WeightsFormat.STORED)
        elif not isinstance(found, ModelNotFound) or is_path(request.model):
            raise found
    able = engines.holders(cards, request)
    try:
        made = plan(cards, request, trust)
    except PlacementError:
        if request.exact and engines.holders(cards, replace(request, exact=False)):
            raise PlacementError(
                f"No machine that is seen here promises the bytes of {request.title}: only engines of other makers have it",
                "Leave out --exact.",
            ) from None
        if not able:
            raise
        return _by_engines(request, able)
    lines = [*explain(made), *(f"in an engine of another maker: {line}" for line in engines.explain(able))]
    if sooner := _sooner(able, made.chosen):
        lines.append(f"note: requests that are not exact go first to {sooner.headline}: {sooner.figures}; {engines.NO_PROMISE}")
    if len(made.chosen.stages) == 1:
        from paceline.ways.kv.price import explain_prompts

        sharing = {card.node_id: card for card in cards if sharers is None or card.node_id in sharers}
        at, model = made.chosen.stages[0].node_id, ModelRef(made.chosen.digest, made.chosen.weights)
        lines += [f"prompts: {line}" for line in explain_prompts(sharing, at, model, request.prompt_tokens)]
    elif made.chosen.way == PIPELINE:
        at = made.chosen.stages[0].node_id
        lines.append(f"prompts: the log of {at} says whether others compute them, which depends on all of its machines' links")
    if len(cards) == 1:
        is_member = Home.from_environment().is_in_fleet
        alone = "no other machine of the fleet is seen" if is_member else "this machine is alone; `paceline join` makes it part of a fleet"
        lines.append(f"note: {alone}")
    return Explained(made, tuple(lines), request, able)


def _by_engines(request: PlanRequest, able: tuple[PricedEngine, ...]) -> Explained:
    """Explain a plan for a model that only engines of other makers have."""
    first, *others = able
    lines = [
        f"{first.model_id}, {request.prompt_tokens} tokens of prompt, {request.answer_tokens} of answer",
        f"plan: {first.headline}: {first.figures}",
        *(f"otherwise: {line}" for line in engines.explain(others)),
        f"note: {engines.NO_PROMISE}",
    ]
    if first.estimate is None:
        lines.append("note: speeds are measured with the first answers; an engine is never made to work for a measurement")
    return Explained(None, tuple(lines), request, able)


def _sooner(able: Sequence[PricedEngine], chosen: Choice) -> PricedEngine | None:
    """Return the engine that requests go to before the plan's choice; None if there is none. Other weights never answer for it."""
    planned = Holding(ModelRef(chosen.digest, chosen.weights, chosen.model_id))
    fast = (
        each
        for each in able
        if each.estimate is not None and each.estimate.total_s * WORTH_A_HOP < chosen.estimate.total_s and not each.engine.leaves_network
    )
    return next((each for each in fast if may_follow(planned, Holding(each.model), exact=False).is_allowed), None)


def this_machine(
    beside: ModelLocation | None = None, loaded: Collection[str] = (), shared: Sequence[ModelOffer] = ()
) -> Sequence[NodeCard]:
    """A fleet of one: this machine's own card, with a model that lies elsewhere than in its home, those that run now, and those of shared engines."""
    from paceline.machine.capability import CapabilityReport, own_name

    portrait = CapabilityReport(NodeId(own_name()), Home.from_environment())
    portrait.look(beside=() if beside is None else (beside,))
    card = portrait.card()
    own = tuple(replace(offer, warm=offer.warm or offer.model_id in loaded) for offer in card.models)
    return (replace(card, models=(*own, *shared)),)


def parse_ways(text: str) -> frozenset[Way] | None:
    """Ways by their names, with commas between; None where the text is empty: all.

    Raises:
        ConfigError: there is none of such a name.
    """
    if not text:
        return None
    known, named = {each.way for each in WAYS}, {Way(part.strip()) for part in text.split(",")}
    if not named <= known:
        raise ConfigError(f"--ways {text!r} names no way of running a model", f"Choose of {', '.join(each.way for each in WAYS)}.")
    return frozenset(named)


def parse_pin(text: str) -> Pin:
    """`NODE`, or `NODE:FIRST-LAST`, both layers included.

    Raises:
        ConfigError: it is neither.
    """
    name, _, span = text.rpartition(":") if ":" in text else (text, "", "")
    if not span:
        if name and ":" not in text:
            return Pin(NodeId(name))
    else:
        first, dash, last = span.partition("-")
        if name and dash and all(part.isascii() and part.isdigit() and len(part) < 7 for part in (first, last)):
            return Pin(NodeId(name), LayerRange(int(first), int(last) + 1))
    raise ConfigError(f"--pin {text!r} is no machine", "Write it like desktop, or desktop:0-15 for its layers, counted from 0.")


def _known_here(model: str) -> ModelLocation | PacelineError:
    """A model that this machine has, by any of its names, or why it has none. A bundled model's alias and its file are that model."""
    from paceline.store.catalog import locations, open_weights, resolve
    from paceline.store.digests import DigestCache

    home = Home.from_environment()
    try:
        found = resolve(model, home)
        known = next((location for location in locations(home) if location.path == found.path), None)
        if known is None:
            open_weights(found.path, DigestCache(home))
    except PacelineError as error:
        return error
    return known or found


def plain(value: Any) -> Any:
    """JSON's values: ways and ids as text, bytes as hex, sets in order; null where a number can't be had."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case frozenset():
            return sorted(map(str, value))
        case bytes():
            return value.hex()
        case _:
            return value
