"""Models that are loaded side by side, and which of them make way for another: arithmetic on what each was given.

Memory is counted by plan: weights, working memory and KV, whether KV was written to or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.backends.options import DeviceKind
from paceline.core.errors import NoRoom, OutOfMemory
from paceline.core.inference import ServedModel
from paceline.core.model import LayerRange
from paceline.machine.capability import WarmModel
from paceline.machine.host import EngineHost
from paceline.machine.settings import MemoryBound, NodeSettings
from paceline.machine.setup import set_up
from paceline.machine.sizing import KvPlan
from paceline.store.catalog import ModelLocation

ENOUGH_CONTEXT = 8192
"""Tokens. Idle models make way until one that is loaded has so long a context, or its own. Raising it: more of them go for it."""


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model that is loaded, with its engine behind its host."""

    host: EngineHost
    model: ServedModel
    notes: tuple[str, ...]
    summary: str
    warm: WarmModel | None
    """What the node's card says of it; None on a machine in no fleet."""
    location: ModelLocation | None = None
    """Where it lies."""
    kv: KvPlan | None = None
    """What it was given of memory; of a pipeline, what this machine's part was."""

    def close(self) -> bool:
        """Stop; see `EngineHost.close`."""
        return self.host.close()

    def use(self) -> ModelUse:
        """What it takes and does now."""
        host, kv, stats, facts = self.host, self.kv, self.host.stats(), self.model.facts
        touched = (stats.blocks_in_use + stats.blocks_cached) / stats.blocks_total if stats.blocks_total else 1.0
        return ModelUse(
            self.model.name,
            "" if self.location is None else str(self.location.path),
            "loaded" if host.is_up else "failed",
            stored_as=facts.stored_as,
            weights_bytes=0 if kv is None else kv.weights_bytes,
            kv_bytes=0 if kv is None else kv.kv_bytes,
            memory_bytes=0 if kv is None else kv.weights_bytes + kv.working_bytes + kv.kv_bytes,
            untouched_bytes=0 if kv is None or facts.on_gpu else int(kv.kv_bytes * max(0.0, 1.0 - touched)),
            on_gpu=facts.on_gpu,
            context=host.models()[0].max_context,
            live=host.live,
            idle_s=round(host.idle_s, 1),
        )


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What a model takes and does here now."""

    name: str
    path: str = ""
    """Where it lies."""
    state: str = "loaded"
    """Or `loading`, `unloading`, `failed`."""
    percent: int = 100
    """Of its weights that are read."""
    stored_as: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    memory_bytes: int = 0
    """In all that it was given: weights, working memory and KV."""
    untouched_bytes: int = 0
    """Of its KV, what was never written to: the system still calls it free."""
    on_gpu: bool = False
    context: int = 0
    live: int = 0
    """Requests that have not ended."""
    idle_s: float = 0.0

    @property
    def taken_bytes(self) -> int:
        """Of its memory, what the system does not call free."""
        return self.memory_bytes - self.untouched_bytes


def bound_beside(staying: Sequence[ModelUse], budget_bytes: int | None, *, gone: Sequence[ModelUse] = ()) -> MemoryBound:
    """What a load may take beside models that stay, once others are gone."""
    promised = sum(one.untouched_bytes for one in staying) - sum(one.taken_bytes for one in gone)
    return MemoryBound(None if budget_bytes is None else budget_bytes - sum(one.memory_bytes for one in staying), promised)


def make_room(
    settings: NodeSettings, idle: Sequence[ModelUse], rest: Sequence[ModelUse], budget_bytes: int | None, layers: LayerRange | None = None
) -> tuple[str | None, MemoryBound]:
    """The model that is to make way next, None where there is room; and what a load may take then. Blocks.

    Args:
        settings: of the model to be loaded.
        idle: those that may make way, in that order.
        rest: those that may not: they answer.
        budget_bytes: that all may take together; None: what is free.
        layers: that are to be loaded; None: all.

    Raises:
        NoRoom: there would be, were it not for the rest.
        OutOfMemory: it does not fit.
        UserError: it can't be opened.
    """
    setup = set_up(settings)
    layers, on_gpu = setup.opened.spec.all_layers if layers is None else layers, setup.kernels.device is not DeviceKind.CPU
    idle, rest = [one for one in idle if one.on_gpu == on_gpu], [one for one in rest if one.on_gpu == on_gpu]

    def context(bound: MemoryBound) -> int:
        return replace(setup, settings=replace(settings, bound=bound)).room(layers).context

    contexts, error = list[int](), None
    for gone in range(len(idle) + 1):
        try:
            contexts.append(context(bound_beside([*idle[gone:], *rest], budget_bytes, gone=idle[:gone])))
        except OutOfMemory as no_room:
            contexts.append(0)
            error = no_room
    enough = min(max(contexts), settings.context or ENOUGH_CONTEXT, ENOUGH_CONTEXT)
    if not enough and rest:
        context(bound_beside((), budget_bytes, gone=[*idle, *rest]))  # raises where it would not fit alone either
        busy = tuple(one.name for one in rest)
        raise NoRoom(
            f"{settings.model} does not fit in memory together with {', '.join(busy)}",
            "Try again once their answers have ended.",
            busy=busy,
        ) from error
    if error is not None and not enough:
        raise error
    fits = next(gone for gone, each in enumerate(contexts) if each >= enough)
    return (idle[0].name if fits else None), bound_beside([*idle, *rest], budget_bytes)
