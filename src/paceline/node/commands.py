"""What the event loop and the engine say to each other. Plain values, so that a process may stand where a thread stands.

Commands go in and are counted; a report comes out after each step, for all requests at once, and says how many commands it has seen.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
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


class Signal(Enum):
    """Commands without content."""

    STOP = auto()


Command = Add | Abort | Signal


@dataclass(frozen=True, slots=True)
class Report:
    """What changed since the last one."""

    taken: int
    """Commands taken, since the start."""
    has_work: bool
    chunks: list[GenerationChunk]
    refused: list[tuple[RequestId, PacelineError]]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Died:
    """The engine ended by an error; nothing follows."""

    reason: str


class Inbox(Protocol):
    """Where the engine finds its commands."""

    def take(self, *, wait: bool) -> list[Command]:
        """All commands that are there; with `wait`, sleep until there is one."""
        ...


class ThreadInbox:
    """An inbox between two threads. `put` never waits for the engine: the lock is held for an append."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()

    def put(self, command: Command) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def take(self, *, wait: bool) -> list[Command]:
        if not wait and not self._commands:
            return []
        with self._arrived:
            while wait and not self._commands:
                self._arrived.wait()
            taken = list(self._commands)
            self._commands.clear()
        return taken
