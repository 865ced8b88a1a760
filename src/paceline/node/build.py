"""An engine of this node behind its host, with the drafts that it may have from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock, SystemClock
from paceline.core.model import LayerSpan
from paceline.engine.drafts import DRAFTS
from paceline.fleet.plan import ALONE
from paceline.machine.build import build_engine, introduced
from paceline.machine.host import EngineHost
from paceline.machine.memory_budget import HostedModel
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home
from paceline.ways.draft.price import DRAFT
from paceline.ways.tensor.loading import load_group
from paceline.ways.tensor.price import TENSOR

if TYPE_CHECKING:
    from paceline.ways.draft.sources import NodeDrafts
    from paceline.ways.kv.source import PeerKv
    from paceline.ways.tensor.hosting import RankPlace


@dataclass(frozen=True, slots=True)
class BuiltNode(HostedModel):
    """With the drafts that others may make for it."""

    drafts: NodeDrafts | None = None
    """For the owner of the node to attach."""
    peer_kv: PeerKv | None = None
    """Likewise."""
    pipeline_id: str = ""
    """Empty where this machine alone runs it."""
    spans: Callable[[], tuple[LayerSpan, ...]] = tuple
    """The layers that others run of it now: behind this machine's own, or a part of each; from any thread."""
    is_shared: bool = False
    """It was built over several machines, so that its steps are not this one's."""


def build_node(
    settings: NodeSettings, progress: LoadProgress | None = None, clock: Clock | None = None, places: Mapping[int, RankPlace] | None = None
) -> BuiltNode:
    """`build_engine`, behind a host with the engine in a thread of its own. In a fleet, a new model's speed is measured: about a second.

    Args:
        places: of the tensor ranks that other nodes run, where the settings name any.

    Raises:
        UserError: something asked for can't be had.
    """
    clock = clock or SystemClock()
    home = Home.from_environment()
    in_fleet = home.is_in_fleet
    drafts: NodeDrafts | None = None
    peer_kv: type[PeerKv] | None = None
    # What reaches other nodes takes a third of a second to import, and a machine alone has none.
    if in_fleet or settings.draft not in DRAFTS:
        from paceline.ways.draft.sources import NodeDrafts

        drafts = NodeDrafts(settings.draft, clock, in_fleet=in_fleet, on=settings.draft_on)
    if in_fleet:
        from paceline.ways.kv.source import PeerKv

        peer_kv = PeerKv
    built = build_engine(settings, progress, clock, drafts, peer_kv, partial(load_group, places=places or {}))
    warm = introduced(built, home, clock, is_shared=bool(places)) if in_fleet else None
    kept = drafts if built.drafts is drafts else None

    def spans() -> tuple[LayerSpan, ...]:
        ranks = places or {}
        return tuple(LayerSpan(ranks[rank].node_id, built.runner.layers) for rank in built.executor.away)

    def ways() -> frozenset[str]:
        own = {TENSOR if built.executor.away else ALONE}
        return frozenset(own | {DRAFT} if kept is not None and kept.has_drafter else own)

    host = EngineHost(
        built.engine, built.close, built.model, built.config, clock, built.rebuild, built.grammars, ways, lambda: built.executor.lacks
    )
    built.loans.wake = host.wake
    peers = built.beside if peer_kv is not None and isinstance(built.beside, peer_kv) else None
    if peers is not None:
        peers.role, peers.nixl = settings.role, settings.nixl
    place = built.setup.opened.location
    return BuiltNode(host, built.model, built.notes, built.summary, warm, place, built.kv, kept, peers, spans=spans, is_shared=bool(places))
