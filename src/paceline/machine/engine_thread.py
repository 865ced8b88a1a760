"""The engine in a thread of this process: its kernels run without the interpreter lock, so the event loop goes on beside it.

It takes commands, steps and reports; it sleeps when there is nothing to do, and checks itself before it does.
Law: whatever ends the loop, the last thing said is why. An engine that fails is replaced by a new one, if its owner has one.

What goes between the event loop and it are plain values: commands go in and are counted; a report comes out after each step, for all requests at once,
and says how many commands it has seen.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, if it has not ended."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the engine's loop after the step in progress."""


Command = Add | Abort | StopEngine


@dataclass(frozen=True, slots=True)
class StepReport:
    """What changed since the last one."""

    taken: int
    """Commands taken, since the start."""
    has_work: bool
    chunks: list[GenerationChunk]
    refused: list[tuple[RequestId, PacelineError]]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Died:
    """The engine ended by an error. What it ran is lost."""

    reason: str
    is_long: bool
    """None takes its place for now; else one does at once."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Another engine took its place."""


logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from another that waits for it. Python's 5 ms is a whole decode step of a small model."""


AGAIN_S = 30.0
"""Between attempts to have another engine, where there was none at once. Raising it: what failed for a passing cause stays down for longer."""

News = StepReport | Died | Rebuilt


class StepEngine(Protocol):
    """What this needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def recall(self, gone: Collection[RequestId], shortest: int | None, *, stops: bool) -> None: ...
    @property
    def advanced(self) -> int: ...
    def submit(self) -> None: ...
    def collect(self) -> list[GenerationChunk]: ...
    def stats(self) -> EngineStats: ...
    def check_invariants(self) -> None: ...


class EngineThread:
    """Owns an engine until `close`, and the one that takes its place when it fails."""

    def __init__(
        self,
        engine: StepEngine,
        release: Callable[[], None],
        tell: Callable[[News], None],
        rebuild: Callable[[], StepEngine | None],
    ) -> None:
        """Take over an engine, and start.

        Args:
            engine: no other thread may touch it any more, but for what any thread may.
            release: frees what the engine ran on; called in the engine's thread, last.
            tell: called in that thread once a step, when the next one is under way, and whenever the engine comes to rest; must not wait.
            rebuild: makes another, once one failed; None: not now. Called in that thread, and again later.
        """
        self._engine = engine
        self._release = release
        self._tell = tell
        self._rebuild = rebuild
        self._taken = 0
        """Commands, since the start."""
        self._stops = False
        self._commands: list[Command] = []
        self._arrived = threading.Condition()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # A daemon, so that a step which never ends can't keep the process alive against its owner's will.
        self._thread = threading.Thread(target=self._live, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def advanced(self) -> int:
        """Grows with every part of a step, as long as the engine is the same."""
        return self._engine.advanced

    def send(self, command: Command) -> None:
        """Hand over a command. Never waits for the engine: the lock is held for an append."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()
            self._recall()

    def wake(self) -> None:
        """Have it look whether the engine has work that no command brought. Any thread may."""
        with self._arrived:
            self._arrived.notify()

    def close(self, timeout_s: float) -> bool:
        """Stop after the step in progress. False if that took longer than `timeout_s`."""
        self.send(StopEngine())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            while self._fails() and not self._stops:
                pass
        finally:
            self._release()

    def _fails(self) -> bool:
        """Run an engine until it is stopped; or fails, and another was put in its place."""
        try:
            self._run()
        except BaseException as error:  # compiled libraries raise a panic as one
            logger.exception("the engine failed")
            reason = f"{type(error).__name__}: {error}"
            engine, why = self._another()
            self._tell(Died(reason + why, is_long=engine is None))
            while engine is None:
                if self._is_stopped_within(AGAIN_S):
                    return False
                engine, _ = self._another()
            self._engine = engine
            self._tell(Rebuilt())
            return True
        return False

    def _another(self) -> tuple[StepEngine | None, str]:
        """An engine in place of one that failed, or why it could not be built."""
        try:
            return self._rebuild(), ""
        except BaseException as error:
            logger.exception("the engine could not be rebuilt")
            return None, f"; rebuilding it failed: {type(error).__name__}: {error}"

    def _is_stopped_within(self, seconds: float) -> bool:
        """With no engine."""
        with self._arrived:
            return self._arrived.wait_for(lambda: StopEngine() in self._commands, seconds)

    def _run(self) -> None:
        engine = self._engine
        chunks = list[GenerationChunk]()
        while True:
            if not engine.has_work:
                engine.check_invariants()
                self._tell(StepReport(self._taken, engine.has_work, chunks, [], engine.stats()))
                chunks = []
            commands = self._take(wait=not engine.has_work)
            self._taken += len(commands)
            refused = self._apply(commands)
            try:
                engine.submit()
            finally:
                # Said now, so that the event loop hands it out while kernels run without the interpreter lock, and not while
                # this thread wants it to plan the next batch.
                self._tell(StepReport(self._taken, engine.has_work, chunks, refused, engine.stats()))
            if self._stops:
                return
            if self._commands:
                with self._arrived:
                    self._recall()  # for those that came since they were last taken
            chunks = engine.collect() if engine.has_work else []

    def _recall(self) -> None:
        """End the step in progress early, if those who wait to be heard are better served so. With the lock."""
        gone = {command.request_id for command in self._commands if isinstance(command, Abort)}
        came = [len(command.request.prompt_ids) for command in self._commands if isinstance(command, Add)]
        self._engine.recall(gone, min(came, default=None), stops=StopEngine() in self._commands)

    def _take(self, *, wait: bool) -> list[Command]:
        """All commands that are there; with `wait`, sleep until there is one, or other work."""
        if not wait and not self._commands:
            return []
        with self._arrived:
            while wait and not self._commands and not self._engine.has_work:
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
                case StopEngine():
                    self._stops = True
        return refused
