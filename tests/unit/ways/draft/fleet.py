"""A fleet whose nodes draft, for all tests of a module: starting nodes takes longer than what is tested on them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import BOUND_S, make_node, until, until_seen
from tests.unit.ways.draft.cards import SMALL
from tests.unit.ways.draft.proposers import Hangs, Lookup

from paceline.core.clock import SystemClock
from paceline.core.errors import PlacementError
from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk, Proposer
from paceline.net.member.node import FleetNode
from paceline.net.member.state import Claim
from paceline.net.server import Service
from paceline.net.trust.guard import PeerGuard
from paceline.ways.draft.finding import Drafter, FleetConnections, Key
from paceline.ways.draft.pool import ProposerPool, proposer_service
from paceline.ways.draft.remote import DraftMeter, RemoteDrafts

ONE, TWO = SequenceId(1), SequenceId(2)
VOCAB = 100
LOOKUP = "lookup"
"""Every node drafts with it."""


class DraftNode(FleetNode):
    """A node of a fleet that drafts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.proposers = ProposerPool({LOOKUP: Lookup()})

    async def start(self, *services: Callable[[PeerGuard], Service], claim: Claim | None = None) -> None:
        await super().start(lambda guard: proposer_service(self.proposers, guard.peer), *services, claim=claim)

    async def stop(self) -> None:
        await super().stop()
        self.proposers.close()


class Drafting:
    """A source on node a, and the nodes that may draft for it, in the order that the plan would have."""

    def __init__(self, a: DraftNode, order: Sequence[DraftNode], model_id: str) -> None:
        self.meter = DraftMeter()
        self.source = RemoteDrafts(model_id, self.meter, SystemClock())
        self.order, self.model_id = order, model_id
        self._a = a

    def find(self, left_out: Sequence[Key]) -> list[Drafter]:
        cards = [live.card for node in self.order if (live := self._a.view().get(node.node_id)) is not None]
        found = [Drafter(card.node_id, card.instance, self.model_id, 1e5, 1e6, 0.001) for card in cards]
        if not (left := [one for one in found if one.key not in left_out]):
            raise PlacementError("nobody is left")
        return left

    async def ask(self, first: int, token_ids: Sequence[int], length: int = 4, sequence: SequenceId = ONE) -> DraftAnswer:
        self.source.ask(DraftAsk(sequence, first, token_ids, length))
        answers = await asyncio.to_thread(self.source.answers, BOUND_S)
        assert len(answers) == 1
        return answers[0]


class DraftFleet:
    """Node a, and two that draft. Lives on one event loop."""

    def __init__(self, root: Path) -> None:
        fleet = TestFleet()
        self.a = make_node(fleet, root, "a", kind=DraftNode)
        self._make = lambda name: make_node(fleet, root, name, self.a, offers=(SMALL, replace(SMALL, model_id="real")), kind=DraftNode)
        self._names = (f"m{number}" for number in count())

    async def start(self) -> None:
        await self.a.start()
        self.others = [self._make("b0"), self._make("b1")]
        for node in self.others:
            await node.start()

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in (self.a, *self.others)))

    async def replace(self, gone: DraftNode) -> None:
        """Start a node that a test stopped anew."""
        node = self.others[self.others.index(gone)] = self._make(gone.node_id)
        await node.start()

    async def seen(self) -> None:
        """Nodes may have been silent between two tests."""
        await until_seen(self.a, "a", *(node.node_id for node in self.others))

    def new_name(self) -> str:
        """Of a model that no node has."""
        return next(self._names)

    @asynccontextmanager
    async def drafting(self, *proposers: Proposer, own: Proposer | None = None) -> AsyncIterator[Drafting]:
        """A source that a model of each of these names drafts for, each on a node of its own."""
        order = [*self.others[: len(proposers)], *([] if own is None else [self.a])]
        model_id = self.new_name()
        all_proposers = [*proposers, *([] if own is None else [own])]
        for node, proposer in zip(order, all_proposers, strict=True):
            node.proposers.add(model_id, proposer)
        drafting = Drafting(self.a, order, model_id)
        drafting.source.attach(drafting.find, FleetConnections(self.a, self.a.proposers).open, VOCAB)
        try:
            yield drafting
        finally:
            await drafting.source.detach()
            for proposer in all_proposers:
                if isinstance(proposer, Hangs):
                    proposer.go.set()
            await until(lambda: all(node.proposers.sessions == 0 for node in order))


class FleetRunner:
    """A fleet, and the loop that it lives on."""

    def __init__(self, root: Path) -> None:
        self._runner = asyncio.Runner()
        self._fleet = DraftFleet(root)
        self._runner.run(self._fleet.start())

    def run(self, test: Callable[[DraftFleet], Coroutine[None, None, None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(3 * BOUND_S):
                await self._fleet.seen()
                await test(self._fleet)

        self._runner.run(bounded())

    def close(self) -> None:
        self._runner.run(self._fleet.stop())
        self._runner.close()


def on_fleet(test: Callable[[DraftFleet], Coroutine[None, None, None]]) -> Callable[[FleetRunner], None]:
    """A test that runs on its module's fleet, within a bound."""

    @functools.wraps(test)
    def run(fleet: FleetRunner) -> None:
        fleet.run(test)

    return run
