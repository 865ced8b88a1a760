"""The engine in a thread of this process: its kernels run without the interpreter lock, so the event loop goes on beside it.

It takes commands, steps and reports; it sleeps when there is nothing to do, and checks itself before it does.
Law: whatever ends the loop, the last thing said is why.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats
from paceline.node.commands import Abort, Add, Command, Died, Report, Stop

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from another that waits for it. Python's 5 ms is a whole decode step of a small model."""


class StepEngine(Protocol):
    """What this needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def submit(self) -> None: ...
    def collect(self) -> list[GenerationChunk]: ...
    def stats(self) -> EngineStats: ...
    def check_invariants(self) -> None: ...


class EngineThread:
    """Owns an engine until `close`."""

    def __init__(self, engine: StepEngine, release: Callable[[], None], tell: Callable[[Report | Died], None]) -> None:
        """Take over an engine, and start.

        Args:
            engine: nobody else may touch it any more.
            release: frees what the engine ran on; called in the engine's thread, last.
            tell: called in that thread once a step, when the next one is under way, and whenever the engine comes to rest; must not wait.
        """
        self._engine = engine
        self._release = release
        self._tell = tell
        self._commands: list[Command] = []
        self._arrived = threading.Condition()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # A daemon, so that a step which never ends can't keep the process alive against its owner's will.
        self._thread = threading.Thread(target=self._live, name="paceline-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hand over a command. Never waits for the engine: the lock is held for an append."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def close(self, timeout_s: float) -> bool:
        """Stop after the step in progress. False if that took longer than `timeout_s`."""
        self.send(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            logger.exception("the engine failed")
            self._tell(Died(f"{type(error).__name__}: {error}"))
        finally:
            self._release()

    def _run(self) -> None:
        engine, taken = self._engine, 0
        chunks = list[GenerationChunk]()
        while True:
            if not engine.has_work:
                engine.check_invariants()
                self._tell(Report(taken, engine.has_work, chunks, [], engine.stats()))
                chunks = []
            commands = self._take(wait=not engine.has_work)
            taken += len(commands)
            refused = self._apply(commands)
            try:
                engine.submit()
            finally:
                # Said now, so that the event loop hands it out while kernels run without the interpreter lock, and not while
                # this thread wants it to plan the next batch.
                self._tell(Report(taken, engine.has_work, chunks, refused, engine.stats()))
            if Stop() in commands:
                return
            chunks = engine.collect() if engine.has_work else []

    def _take(self, *, wait: bool) -> list[Command]:
        """All commands that are there; with `wait`, sleep until there is one."""
        if not wait and not self._commands:
            return []
        with self._arrived:
            while wait and not self._commands:
                self._arrived.wait()
            taken, self._commands = self._commands, []
        return taken

    def _apply(self, commands: list[Command]) -> list[tuple[RequestId, PacelineError]]:
        refused: list[tuple[RequestId, PacelineError]] = []
        for command in commands:
            match command:
                case Add(request):
                    try:
                        self._engine.add(request)
                    except PacelineError as error:
                        refused.append((request.request_id, error))
                case Abort(request_id):
                    self._engine.abort(request_id)
                case Stop():
                    pass
        return refused
