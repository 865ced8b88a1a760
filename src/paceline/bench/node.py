"""A node of a fleet inside this process, for benches: they step the engine of its pipeline themselves, without a server.

Law: the node's event loop has a thread of its own, as beside an engine that serves; `close` ends it and everything on it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from paceline.core.clock import Clock
from paceline.core.errors import ExecutorUnavailable, PipelineError, PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import NodeCard
from paceline.machine.config_file import PipelineSettings
from paceline.machine.engine_thread import SWITCH_INTERVAL_S
from paceline.machine.settings import NodeSettings
from paceline.net.member.settings import FleetSettings
from paceline.node.serving import FleetServing
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.pipeline.client import open_stage
from paceline.ways.pipeline.executor.route import SESSION_ID_BYTES, StageRequest
from paceline.ways.pipeline.host.ends import tensor_ends
from paceline.ways.pipeline.routes.build import BuiltPipeline, PipelineOrder, build_engine_over
from paceline.ways.pipeline.routes.fleet_access import NodeFleetAccess

Answer = TypeVar("Answer")


class LoopThread:
    """Runs from the start; close it when nothing is left on it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do it there, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Stop. Not from its own thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


SEEN_S = 60.0
"""How long machines may take to come into view."""
LINKS_S = 20.0
"""How long the ways between them may take to be measured."""


class BenchNode:
    """A member that orchestrates.

    Args:
        beside: models that lie elsewhere than in the home.

    Raises:
        UserError: it can't be one.
    """

    def __init__(self, settings: FleetSettings, home: Home, clock: Clock, beside: Sequence[ModelLocation] = ()) -> None:
        self._clock, self._beside = clock, beside
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = LoopThread("paceline-node")
        self._whole: FleetServing | None = None
        try:
            self._whole, self._access = self._loop.run(self._start(settings, home))
        except BaseException:
            self._loop.close()
            raise

    @property
    def cards(self) -> Sequence[NodeCard]:
        """The live ones."""
        return self._access.cards()

    @property
    def node_id(self) -> NodeId:
        return self._access.node_id

    @property
    def trust(self) -> dict[NodeId, Trust]:
        """What certificates say."""
        return self._access.trust()

    def wait_for_links(self, stages: Sequence[NodeId]) -> bool:
        """Until the ways of a pipeline from here through these were measured. False where they are not in time."""
        way = [self.node_id, *stages, self.node_id]
        until = self._clock.monotonic() + LINKS_S
        while self._clock.monotonic() < until:
            known = {(card.node_id, link.to) for card in self.cards for link in card.links}
            if all(pair in known or pair[::-1] in known for pair in pairwise(way)):
                return True
            self._access.wait_for_change(0.2)
        return False

    def wait_for(self, names: Iterable[str], beside: Iterable[bytes] = ()) -> None:
        """Until machines are seen that run layers for others.

        Args:
            beside: instances that are known to be gone.

        Raises:
            PlacementError: they don't come.
        """
        missing, gone = set(names), set(beside)
        until = self._clock.monotonic() + SEEN_S
        while missing:
            missing -= {str(card.node_id) for card in self.cards if card.serves_shards and card.instance not in gone}
            if missing and self._clock.monotonic() >= until:
                raise PlacementError(f"{', '.join(sorted(missing))} did not come into view", "Their logs may say why.")
            if missing:
                self._access.wait_for_change(0.2)

    def build(self, settings: NodeSettings, order: PipelineOrder) -> BuiltPipeline:
        """An engine over the fleet; close its executor before this node.

        Raises:
            UserError: it can't be had, and why.
        """
        assert self._whole is not None, "a closed node builds nothing"
        try:
            return build_engine_over(settings, order, self._access, tensor_ends(self._whole.fleet), self._loop.loop, self._clock)
        except (ExecutorUnavailable, PipelineError) as error:
            raise PlacementError(error.message, error.hint) from error

    def warm(self, node_id: NodeId, like: StageRequest) -> None:
        """Have a machine load layers, as for a session that then is not used.

        Raises:
            FleetError: it refuses.
        """

        async def open_and_close() -> None:
            request = replace(like, session_id=os.urandom(SESSION_ID_BYTES))
            await (await open_stage(self._access.channel(node_id), node_id, request)).close()

        self._loop.run(open_and_close())

    def close(self) -> None:
        """Say goodbye and end. Idempotent."""
        whole, self._whole = self._whole, None
        if whole is not None:
            try:
                self._loop.run(whole.stop())
            finally:
                self._loop.close()

    async def _start(self, settings: FleetSettings, home: Home) -> tuple[FleetServing, NodeFleetAccess]:
        whole = FleetServing(None, settings, home, self._clock, beside=self._beside)
        await whole.start()
        return whole, NodeFleetAccess(whole.fleet, PipelineSettings().shard_age_s)
