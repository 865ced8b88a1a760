"""An engine of this node behind its host, with the drafts that it may have from others."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock, SystemClock
from paceline.core.inference import ServedModel
from paceline.machine.build import build_engine, introduced
from paceline.machine.host import EngineHost
from paceline.machine.offers import WarmModel
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.draft.sources import NodeDrafts


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """An engine behind its host."""

    host: EngineHost
    model: ServedModel
    notes: tuple[str, ...]
    summary: str
    warm: WarmModel | None
    """What the node's card says of it; None on a machine in no fleet."""
    location: ModelLocation | None = None
    """Where all of the model lies, so that members can have it."""
    drafts: NodeDrafts | None = None
    """For the owner of the node to attach."""

    def close(self) -> bool:
        """Stop; see `EngineHost.close`."""
        return self.host.close()


def build_node(settings: NodeSettings, progress: LoadProgress | None = None, clock: Clock | None = None) -> BuiltNode:
    """`build_engine`, behind a host with the engine in a thread of its own. In a fleet, a new model's speed is measured: about a second.

    Raises:
        UserError: something asked for can't be had.
    """
    clock = clock or SystemClock()
    home = Home.from_environment()
    in_fleet = home.is_in_fleet
    drafts = NodeDrafts(settings.draft, clock, in_fleet=in_fleet)
    built = build_engine(settings, progress, clock, drafts)
    warm = introduced(built, home, clock) if in_fleet else None
    host = EngineHost(built.engine, built.close, built.model, built.config, clock, built.rebuild, built.grammars)
    kept = drafts if built.drafts is drafts else None
    return BuiltNode(host, built.model, built.notes, built.summary, warm, built.setup.opened.location, kept)
