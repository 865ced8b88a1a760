"""A Python that has imported what nodes import, and forks them: half of what a start costs.

Law: each node is a process like any other, with its own command, environment and output, and it runs the whole program. No more than imports lies
behind it, and this process has one thread. It ends with its last node's test.

Requests are JSON: `run` a script or module with an environment, beside the descriptor of its output, answered by its process id; or the `pid` of one,
answered by its exit code, None while it runs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any

from tests.fleet.network import INSIDE, enter

PARTS = (
    *(
        "paceline.cli.up",
        "paceline.cli.sharing",
        "paceline.node.build",
        "paceline.node.planning",
        "paceline.node.ways",
        "paceline.server.serve",
    ),
    *(
        "paceline.ways.pipeline.routes.build",
        "uvicorn.protocols.http.httptools_impl",
        "uvloop",
        "tokenizers",
        "yaml",
        "ifaddr",
        "numpy.random",
        "numba",
    ),
)
"""Kernels are not among them: which these are, a node decides."""
MODULE = ("-m", "paceline")
LONGEST_REQUEST = 1 << 20


class Warm:
    """Forks for one fleet, from its first node on."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: socket.socket

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """Run a command of this Python's.

        Args:
            command: begins with the executable, or with what puts it into a network namespace.
        """
        namespace = command[len(INSIDE)] if tuple(command[: len(INSIDE)]) == INSIDE else ""
        command = command[len(INSIDE) + 1 :] if namespace else command
        read, write = os.pipe()
        try:
            pid = self._ask({"run": command[1:], "namespace": namespace, "environment": dict(environment)}, write)
        finally:
            os.close(write)
        return Forked(self, pid, os.fdopen(read, encoding="utf-8"))

    def ended_with(self, pid: int) -> int | None:
        return self._ask({"pid": pid})

    def close(self) -> None:
        """Every node must have ended."""
        if self._process is not None:
            self._asked.close()
            assert self._process.wait() == 0

    def _ask(self, request: dict[str, Any], *handed: int) -> Any:
        with self._lock:
            if self._process is None:
                self._asked, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with there:
                    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
                    command = [sys.executable, __file__, str(there.fileno())]
                    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
                    self._process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=environment)
            socket.send_fds(self._asked, [json.dumps(request).encode()], handed)
            return json.loads(self._asked.recv(LONGEST_REQUEST))


class Forked:
    """A process that was forked: as much of `subprocess.Popen` as nodes need."""

    def __init__(self, warm: Warm, pid: int, stdout: IO[str]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ended_with(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:  # nobody else reaps it, so that the number is still its own
            ended = os.pidfd_open(self.pid)
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("a node", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(asking: socket.socket) -> list[str]:
    """Answer requests. Returns in each process that is forked, with what it is to run; nothing, once nobody asks any more."""
    while True:
        data, handed, _, _ = socket.recv_fds(asking, LONGEST_REQUEST, 1)
        if not data:
            return []
        request = json.loads(data)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            asking.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
        elif pid := os.fork():
            os.close(handed[0])
            asking.send(json.dumps(pid).encode())
        else:
            asking.close()
            for name, there in (("stdout", 1), ("stderr", 2)):
                os.dup2(handed[0], there)
                setattr(sys, name, open(there, "w", buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115 (for good)
            os.close(handed[0])
            os.environ.clear()
            os.environ.update(request["environment"])
            if request["namespace"]:
                enter(request["namespace"])
            return request["run"]


def main(descriptor: int) -> None:
    for part in PARTS:
        importlib.import_module(part)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "another thread's locks would be held for ever in what is forked"
    gc.collect()
    gc.freeze()
    command = serve(socket.socket(fileno=descriptor))
    gc.unfreeze()
    if tuple(command[:2]) == MODULE:
        sys.argv = ["paceline", *command[2:]]
        runpy.run_module("paceline", run_name="__main__", alter_sys=True)
    elif command:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
