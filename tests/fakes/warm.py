"""A Python that has imported what the program imports, and forks it: half of what a start costs.

Law: what is forked is a process like any other, with its own command, environment, folder, input and output, and it runs the whole program. No more than
imports lies behind it, and this process has one thread. Every forked process must have ended before it is closed.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
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

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stderr: int = subprocess.STDOUT,
    ) -> Forked:
        """Run a command of this Python's.

        Args:
            command: begins with the executable, or with what puts it into a network namespace.
            folder: where it is started; None: in this process's.
            stdin: as of `subprocess.Popen`: DEVNULL, PIPE or a descriptor.
            stderr: STDOUT or PIPE.
        """
        namespace = command[len(INSIDE)] if tuple(command[: len(INSIDE)]) == INSIDE else ""
        command = command[len(INSIDE) + 1 :] if namespace else command
        request = {"run": command[1:], "namespace": namespace, "environment": dict(environment), "folder": str(folder or Path.cwd())}
        typed: IO[str] | None = None
        with ExitStack() as theirs:

            def close_later(descriptor: int) -> int:
                theirs.callback(os.close, descriptor)
                return descriptor

            if stdin == subprocess.PIPE:
                read, write = os.pipe()
                given, typed = close_later(read), os.fdopen(write, "w", encoding="utf-8")
            else:
                given = close_later(os.open(os.devnull, os.O_RDONLY)) if stdin == subprocess.DEVNULL else stdin
            read, out = os.pipe()
            printed, close_out = os.fdopen(read, encoding="utf-8"), close_later(out)
            complained: IO[str] | None = None
            if stderr == subprocess.PIPE:
                read, out = os.pipe()
                complained = os.fdopen(read, encoding="utf-8")
                close_later(out)
            return Forked(self, self._ask(request, given, close_out, out), printed, typed, complained)

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


SHARED = Warm()
"""For tests of single commands; closed at the end of the session."""


def popen(
    *args: str, environment: Mapping[str, str], folder: Path | None = None, stdin: int = subprocess.PIPE
) -> subprocess.Popen[str] | Forked:
    """Start `paceline ARGS` with pipes: forked, but where the platform can't, or Python itself reads the environment."""
    command, env, pipe = [sys.executable, "-m", "paceline", *args], {**os.environ, **environment}, subprocess.PIPE
    if sys.platform == "linux" and not any(name.startswith("PYTHON") for name in environment):
        return SHARED.start(command, env, folder=folder, stdin=stdin, stderr=pipe)
    return subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, env=env, cwd=folder)


class Forked:
    """A process that was forked: as much of `subprocess.Popen` as tests need."""

    def __init__(self, warm: Warm, pid: int, stdout: IO[str], stdin: IO[str] | None, stderr: IO[str] | None) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
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

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write the standard input, and return all of the output and of the errors, once the process has ended."""
        with ThreadPoolExecutor(2) as readers:
            both = [readers.submit(_read_all, stream) for stream in (self.stdout, self.stderr)]
            try:
                if self.stdin is not None and not self.stdin.closed:
                    with suppress(BrokenPipeError), self.stdin:
                        self.stdin.write(text or "")
                self.wait(timeout)
            except BaseException:
                self.kill()  # the readers end with it
                raise
            out, err = (each.result() for each in both)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _read_all(stream: IO[str] | None) -> str:
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read()


def serve(asking: socket.socket) -> list[str]:
    """Answer requests. Returns in each process that is forked, with what it is to run; nothing, once nobody asks any more."""
    while True:
        data, handed, _, _ = socket.recv_fds(asking, LONGEST_REQUEST, 3)
        if not data:
            return []
        request = json.loads(data)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            asking.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
        elif pid := os.fork():
            for descriptor in handed:
                os.close(descriptor)
            asking.send(json.dumps(pid).encode())
        else:
            asking.close()
            for there, descriptor in enumerate(handed):
                os.dup2(descriptor, there)
                os.close(descriptor)
            for name, there, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
                setattr(sys, name, open(there, mode, buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115 (for good)
            os.chdir(request["folder"])
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
