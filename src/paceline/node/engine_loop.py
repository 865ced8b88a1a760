"""The engine's life: take commands, step, report. Sleeps when there is nothing to do, and checks itself before it does.

Law: whatever ends the loop, the last thing said is why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats
from paceline.node.commands import Abort, Add, Command, Died, Inbox, Report, Signal

logger = logging.getLogger(__name__)


class StepEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def step(self) -> list[GenerationChunk]: ...
    def stats(self) -> EngineStats: ...
    def check_invariants(self) -> None: ...


def run_engine(engine: StepEngine, inbox: Inbox, tell: Callable[[Report | Died], None]) -> None:
    """Run until told to stop, or until the engine fails.

    Args:
        engine: touched by nobody else from here on.
        inbox: where commands arrive.
        tell: called after each step and whenever the engine comes to rest; must not wait.
    """
    taken = 0
    try:
        while True:
            if not engine.has_work:
                engine.check_invariants()
            commands = inbox.take(wait=not engine.has_work)
            taken += len(commands)
            if Signal.STOP in commands:
                return
            refused = _apply(engine, commands)
            chunks = engine.step() if engine.has_work else []
            tell(Report(taken, engine.has_work, chunks, refused, engine.stats()))
    except BaseException as error:
        logger.exception("the engine failed")
        tell(Died(f"{type(error).__name__}: {error}"))


def _apply(engine: StepEngine, commands: list[Command]) -> list[tuple[RequestId, PacelineError]]:
    refused: list[tuple[RequestId, PacelineError]] = []
    for command in commands:
        match command:
            case Add(request):
                try:
                    engine.add(request)
                except PacelineError as error:
                    refused.append((request.request_id, error))
            case Abort(request_id):
                engine.abort(request_id)
            case Signal.STOP:
                pass
    return refused
