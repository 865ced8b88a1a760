"""Engines of other makers that `paceline up` starts for models that own kernels can't run, or that a person asked for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from paceline.cli.terminal import print_lines
from paceline.core.background import TaskSet, end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import UnsupportedModel
from paceline.machine.devices import gpus_here
from paceline.store.catalog import open_weights, resolve
from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.store.selection import projectors

if TYPE_CHECKING:
    from paceline.engines.choice import Asked
    from paceline.engines.contract import Door
    from paceline.engines.process import EngineExit, EngineProcess
    from paceline.machine.engine_start import Decision
    from paceline.machine.foreign.engines import ForeignEngines, WatchedEngine


def engine_for(name: str, asked: Asked | None, home: Home, console: Console) -> Decision | None:
    """Decide whether an engine runs a model. None: own kernels do. Prints what is slower or missing then.

    Raises:
        UserError: nothing can run it, or not the engine that was asked for.
    """
    if asked is None and not gpus_here():
        try:
            path = resolve(name, home).path
            open_weights(path, DigestCache(home))
            if not path.is_file() or not projectors(path):
                return None  # own kernels are the fastest on processors
        except UnsupportedModel:
            pass
    from paceline.machine.engine_start import decide

    decision = decide(name, home, asked)
    if decision.choice.engine is not None:
        return decision
    _print_note(decision, console)
    return None


def _print_note(decision: Decision, console: Console) -> None:
    if decision.choice.note:
        console.print(f"[yellow]note:[/] {escape(decision.choice.note)}", soft_wrap=True)


class Children:
    """The engines that this process started. They end with it."""

    def __init__(self, engines: ForeignEngines, home: Home, clock: Clock, console: Console) -> None:
        self._engines, self._home, self._clock, self._console = engines, home, clock, console
        self._running: list[EngineProcess] = []
        self._looks = TaskSet()

    async def start(self, decision: Decision, context: int | None, threads: int | None) -> None:
        """Start the engine of a decision, wait until its model is loaded, and offer it.

        Raises:
            UserError: it can't be started, or does not load the model.
        """
        from paceline.engines.table import open_engine
        from paceline.machine.engine_start import start_child
        from paceline.machine.foreign.watched import Offering

        engine, say = decision.choice.engine, partial(print_lines, self._console)
        assert engine is not None
        say(f"{decision.location.name} runs in {engine.name}: {decision.choice.reason}")
        _print_note(decision, self._console)
        offered: list[WatchedEngine] = []

        def look(_: EngineExit | None = None) -> None:
            for watched in offered:
                self._looks.start(watched.look(), f"look at {watched.url}")

        async def move(door: Door) -> None:
            await opened.http.move(door)
            look()

        child = await start_child(decision, self._home, self._clock, context=context, threads=threads, on_exit=look)
        self._running.append(child)
        opened = await open_engine(child.door, name=child.identity.name)
        child.on_ready = move
        try:
            await child.wait_ready(say)
        except BaseException:
            await opened.close()
            await child.stop()
            raise
        offered.append(await self._engines.add(opened, child.identity, Offering(decision.location.name), revive=child.restart))

    async def stop(self) -> None:
        """End all of them. Idempotent."""
        await end_tasks(*self._looks)
        await asyncio.gather(*(child.stop() for child in self._running))
        self._running.clear()

    def kill(self) -> None:
        """Kill what still runs of them, before this process ends itself. From any thread."""
        for child in tuple(self._running):
            child.kill()
