"""The engine in a thread of this process: its kernels run without the interpreter lock, so the event loop goes on beside it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from paceline.node.commands import Command, Died, Report, Signal, ThreadInbox
from paceline.node.engine_loop import StepEngine, run_engine

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from another that waits for it. Python's 5 ms is a whole decode step of a small model."""


class EngineThread:
    """Owns an engine from `start` to `close`."""

    def __init__(self, engine: StepEngine, release: Callable[[], None]) -> None:
        """Take over an engine.

        Args:
            engine: nobody else may touch it any more.
            release: frees what the engine ran on; called in the engine's thread, last.
        """
        self._engine = engine
        self._release = release
        self._inbox = ThreadInbox()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[Report | Died], None]) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # A daemon, so that a step which never ends can't keep the process alive against its owner's will.
        self._thread = threading.Thread(target=self._run, args=(tell,), name="paceline-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def close(self, timeout_s: float) -> bool:
        """Stop after the step in progress. False if that took longer than `timeout_s`."""
        if self._thread is None:
            self._release()
            return True
        self._inbox.put(Signal.STOP)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, tell: Callable[[Report | Died], None]) -> None:
        try:
            run_engine(self._engine, self._inbox, tell)
        finally:
            self._release()
