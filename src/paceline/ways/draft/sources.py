"""The sources of drafts of one engine, from when it is built, and the fleet they draw on, from when this node is in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.core.background import TaskSet
from paceline.core.clock import Clock
from paceline.core.ids import NodeId, SequenceId
from paceline.core.stats import EngineStats
from paceline.engine.drafts import AUTO, DRAFTS
from paceline.fleet.card import MeasuredDraft, ModelOffer
from paceline.fleet.eligibility import MayDraft
from paceline.ways.draft.finding import Drafter, Key, OpenConnection, OwnProposers, Verifier, drafters, fitting_models
from paceline.ways.draft.names import FLEET
from paceline.ways.draft.pool import ProposerPool
from paceline.ways.draft.remote import DraftMeter, RemoteDrafts

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""After the start, for drafters to be seen, before it is said that there is none."""

MOST_NAMED = 8
"""Sources at once, unless sequences that go on have more. Raising it: more streams stay open, for models that no request may name again."""
SEEN = 64
"""Drafted tokens of a node that came true or not, before its share counts. Raising it: one that is always wrong drafts for longer."""
HALVED = 4096
"""Of as many, half are forgotten. Raising it: the share follows other texts more slowly."""
TRIED_AGAIN_S = 1800.0
"""After which the share of a node that drafts no more is forgotten. Raising it: one whose drafts did not pay is tried again later."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """The drafters, from where this node is."""

    loop: asyncio.AbstractEventLoop
    find: Callable[[str, Collection[Key]], Sequence[Drafter]]
    """Those with a model (empty: any), but for some."""
    models: Callable[[], frozenset[str]]
    open_connection: OpenConnection
    vocabulary_size: int


@dataclass(slots=True)
class _Seen:
    """Of one node's drafts with one model."""

    compared: float = 0.0
    came_true: float = 0.0
    at_s: float = 0.0


class NodeDrafts:
    """Made with the engine, attached later. Implements `engine.drafts.MoreSources`: a request may name any model that drafts in the fleet.

    Args:
        draft: as the person asked: "auto", "off", "ngram", or a draft model's id.
        in_fleet: whether others may draft.
        on: the node that drafts; None: whichever the plan finds best.
    """

    def __init__(self, draft: str, clock: Clock, *, in_fleet: bool, on: NodeId | None = None) -> None:
        self._on = on
        self.meter = DraftMeter()
        self._clock = clock
        self._in_fleet = in_fleet
        self._asked = (draft,) if draft not in DRAFTS else (FLEET,) if draft == AUTO and in_fleet else ()
        """From the start, and for as long as the engine lives."""
        self.sources: Mapping[str, RemoteDrafts] = {name: RemoteDrafts(name, self.meter, clock) for name in self._asked}
        """By what a request's `draft` says, the one named last at the end. Replaced, never changed: both threads look at it."""
        self._reach: _Reach | None = None
        self._models: frozenset[str] = frozenset()
        """Those that have a drafter."""
        self._ending = TaskSet()
        self._grace: asyncio.TimerHandle | None = None
        self._seen: dict[tuple[NodeId, str], _Seen] = {}
        self._counted: dict[str, tuple[tuple[NodeId, str] | None, int, int]] = {}
        """By source: whose drafts it had when it was looked at last, and what the engine had counted."""

    @property
    def has_drafter(self) -> bool:
        """Whether a model drafts for it now. Any thread may look."""
        return any(source.drafter is not None for source in self.sources.values())

    def measured(self, stats: EngineStats) -> tuple[MeasuredDraft, ...]:
        """What became of drafts, by the nodes that made them. For one thread at a time."""
        now = self._clock.monotonic()
        for name, source in self.sources.items():
            drafter = source.drafter
            who = None if drafter is None else (drafter.node_id, drafter.model_id)
            counted = (stats.compared_tokens.get(name, 0), stats.true_tokens.get(name, 0))
            last, *before = self._counted.get(name, (who, 0, 0))
            self._counted[name] = (who, *counted)
            compared, came_true = (count - then for count, then in zip(counted, before, strict=True))
            if who is None or who != last or compared <= 0:
                continue  # what changed hands meanwhile is nobody's in particular
            seen = self._seen.setdefault(who, _Seen())
            if seen.compared + compared > HALVED:
                seen.compared, seen.came_true = seen.compared / 2, seen.came_true / 2
            seen.compared, seen.came_true, seen.at_s = seen.compared + compared, seen.came_true + came_true, now
        self._seen = {who: seen for who, seen in self._seen.items() if now - seen.at_s < TRIED_AGAIN_S}
        shares = {who: seen.came_true / seen.compared for who, seen in sorted(self._seen.items()) if seen.compared >= SEEN}
        return tuple(MeasuredDraft(*who, share) for who, share in shares.items())

    # ------------------------------------------------------------------------------------------------------ for the engine's thread

    def names(self) -> Collection[str]:
        return {*self._asked, *self._models, *((FLEET,) if self._models or self._in_fleet else ())}

    def find(self, name: str, sequence: SequenceId) -> RemoteDrafts | None:
        if name in self._asked:
            return self.sources[name]
        reach, sources = self._reach, dict(self.sources)
        if reach is None or name not in self.names():
            return None
        source = sources.pop(name, None)
        try:
            if source is None:
                source = RemoteDrafts(name, self.meter, self._clock)
                reach.loop.call_soon_threadsafe(self._attach, source)
            many = len(sources) + 1 - MOST_NAMED
            for idle in [one for one in sources.values() if self._may_go(one)][: max(0, many)]:
                del sources[idle.name]
                reach.loop.call_soon_threadsafe(self._end, idle)
        except RuntimeError:  # the loop is closed: the process ends
            return None
        source.expect(sequence)
        self.sources = {**sources, name: source}
        return source

    def _may_go(self, source: RemoteDrafts) -> bool:
        return source.name not in self._asked and source.idle

    # ----------------------------------------------------------------------------------------------------------- on the event loop

    def attach(self, verifier: Verifier, vocabulary_size: int, seen: Callable[[], MayDraft], open_connection: OpenConnection) -> None:
        """Draw on those of the fleet that may draft."""

        def find(model_id: str, left_out: Collection[Key]) -> Sequence[Drafter]:
            return drafters(seen(), verifier, model_id, left_out, self._on)

        def models() -> frozenset[str]:
            return fitting_models(seen(), verifier)

        loop = asyncio.get_running_loop()
        self._begin(_Reach(loop, find, models, open_connection, vocabulary_size))
        self._grace = loop.call_later(GRACE_S, self.complain)

    def attach_alone(self, pool: ProposerPool, offers: Mapping[str, ModelOffer], vocabulary_size: int) -> None:
        """Draw on this process alone.

        Args:
            offers: what they promise, by model.
        """
        alone = OwnProposers(pool, offers)
        self._begin(_Reach(asyncio.get_running_loop(), alone.find, lambda: frozenset(offers), alone.open, vocabulary_size))

    def look(self) -> None:
        if self._reach is not None:
            self._models = self._reach.models()
            for source in self.sources.values():
                source.look()

    def complain(self) -> None:
        """Say which models that were asked for have no drafter."""
        for name in self._asked:
            source = self.sources[name]
            if name != FLEET and source.drafter is None and source.trouble is not None:
                logger.warning("answers come without drafts of %s, until a node drafts with it: %s", name, source.trouble)

    async def detach(self) -> None:
        """End. Idempotent."""
        self._reach = None
        if self._grace is not None:
            self._grace.cancel()
        await asyncio.gather(*(source.detach() for source in self.sources.values()), *self._ending)

    def _begin(self, reach: _Reach) -> None:
        self._reach, self._models = reach, reach.models()
        for source in self.sources.values():
            self._attach(source)

    def _attach(self, source: RemoteDrafts) -> None:
        reach = self._reach
        if reach is not None:
            source.attach(partial(reach.find, "" if source.name == FLEET else source.name), reach.open_connection, reach.vocabulary_size)

    def _end(self, source: RemoteDrafts) -> None:
        self._ending.start(source.detach())
