"""How `paceline up` ends: the first Ctrl-C lets live answers end or move on, within a bound; the second ends the process where it stands."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.terminal import EXIT_INTERRUPTED, EXIT_OK, end_now

if TYPE_CHECKING:
    from paceline.machine.models import Models
    from paceline.node.build import BuiltNode
    from paceline.server.app import ApiService

ORDERLY_S = 1.8
"""Longest an orderly stop may take once nothing is waited for; after it the process ends as it does at a second Ctrl-C."""
LOOK_S = 0.05
"""Between two looks whether answers are left."""


class Ending:
    """Of one process that serves. On its event loop; takes over the signals.

    Args:
        drain_s: how long live answers may go on.
    """

    def __init__(self, console: Console, drain_s: float) -> None:
        self.stop = asyncio.Event()
        """Set once everything is to end."""
        self._console, self._drain_s = console, drain_s
        self._service: ApiService | None = None
        self._models: Models[BuiltNode] | None = None
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, 128 + signal.SIGTERM)

    def wait_for(self, service: ApiService, models: Models[BuiltNode]) -> None:
        """Have a stop wait for what is being answered from now on."""
        self._service, self._models = service, models

    def _on_signal(self, code: int) -> None:
        if self._draining is not None:
            end_now(code)
        waits = "" if self._is_quiet() else f" once what is being answered has ended, in {self._drain_s:g} s at the latest"
        self._console.print(f"\nStopping{waits} (Ctrl-C again ends at once)", soft_wrap=True)
        self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        if self._service is not None:
            self._service.is_draining = True
        if self._models is not None:
            self._models.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while not self._is_quiet():  # noqa: ASYNC110 - answers of others end in another place than those of this server
                    await asyncio.sleep(LOOK_S)
        self.stop.set()
        late = threading.Timer(ORDERLY_S, end_now, (EXIT_OK,))
        late.daemon = True
        late.start()

    def _is_quiet(self) -> bool:
        return (self._service is None or self._service.is_quiet) and (self._models is None or not self._models.live)
