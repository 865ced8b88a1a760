"""`paceline up` as a process of the bench's own: started, found by the address it prints, paused while others run, ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quiet import prefer

START_S = 300.0
"""The first start on a machine compiles kernels."""
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Endpoint:
    """A serving process, in a process group of its own."""

    def __init__(
        self,
        *arguments: str,
        log: Path,
        nice: int = 0,
        environment: Mapping[str, str] = os.environ,
        prefix: Sequence[str] = (),
        start_s: float = START_S,
        on_started: Callable[[int], None] | None = None,
    ) -> None:
        """Start it, and wait until it serves.

        Args:
            arguments: of `paceline up`.
            log: what it prints on stderr goes here.
            nice: its priority.
            environment: which tree, which home.
            prefix: put before the command: what limits it.
            start_s: longest it may take.
            on_started: told its process id at once.
        """
        self.began_s = time.perf_counter()
        self._log = log
        self.said: list[str] = []
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "paceline", "up", "--port", "0", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**environment, "COLUMNS": "200"},
                start_new_session=True,
            )
        prefer(self._process.pid, nice)
        if on_started is not None:
            on_started(self.pid)
        watchdog = threading.Timer(start_s, self._process.kill)
        watchdog.start()
        try:
            self.port = self._find_port()
        finally:
            watchdog.cancel()

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a power cut does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it: politely, then not."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _find_port(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line)
            if match := ADDRESS.search(line):
                # What it prints from here on must not fill the pipe.
                threading.Thread(target=self.said.extend, args=(self._process.stdout,), daemon=True).start()
                return int(match[1])
        raise RuntimeError(f"paceline up ended with code {self._process.wait()} before it was ready; see {self._log}")
