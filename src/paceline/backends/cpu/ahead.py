"""Kernels that a model needs, compiled by several processes while its weights are read.

Numba compiles under one lock and Python's, so threads would take turns. A process that ends early costs time, nothing else: what is still
missing is compiled where it is first used.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from paceline.backends import kernel_cache
from paceline.backends.cpu.kernels import compile_kernel, cost_of, is_packer, missing
from paceline.backends.instructions import Lowering
from paceline.backends.options import Compiling, compile_progress
from paceline.core.processes import python_command

logger = logging.getLogger(__name__)

WORKER_BYTES = 320 << 20
"""Memory of a process that compiles. Raising it: fewer of them where memory is short. Source: 330 MiB of one that compiled nearly everything."""


class Ahead:
    """Functions shared among processes that compile them.

    Args:
        names: of the functions, in the order to compile them.
        n_workers: processes; 0: this one compiles, where it waits.
        command: of a process (`compile_worker`).
    """

    def __init__(self, names: Sequence[str], n_workers: int, command: Sequence[str]) -> None:
        self._left = list(names)
        self._unfinished = set(names)
        self._total, self._cost = len(names), sum(map(cost_of, names))
        self._n_workers = self._n_alive = n_workers
        self._command = command
        self._progress = compile_progress.get()
        self._spent_s, self._spent_cost = 0.0, 0.0
        """Seconds that processes took, and the cost of what they compiled."""
        self._changed = threading.Condition()
        self._closed = False
        self._workers = list[subprocess.Popen[str]]()
        self._threads = [threading.Thread(target=self._serve, daemon=True, name=f"paceline-compile-{i}") for i in range(n_workers)]
        if names:
            self._tell()
        for thread in self._threads:
            thread.start()

    def wait(self, *, packers: bool = False) -> None:
        """Wait until everything is compiled, or (`packers`) what packs weights. Returns early where processes ended; compiles where there are none."""

        def lacks() -> bool:
            return any(is_packer(name) or not packers for name in self._unfinished)

        while not self._n_workers and lacks():
            began_s, name = time.monotonic(), self._left.pop(0)
            compile_kernel(name)
            self._note(name, time.monotonic() - began_s)
        with self._changed:
            self._changed.wait_for(lambda: not lacks())

    def close(self) -> None:
        """End the processes. Numba renames whole files into place, so the cache stays sound."""
        with self._changed:
            self._closed = True
            self._left.clear()
            for worker in self._workers:
                worker.terminate()  # of one that ended already, a no-op
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Have a process compile one function after the other."""
        taken: str | None = None
        try:
            with subprocess.Popen(  # noqa: S603 - a command of this program
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as worker:
                assert worker.stdin is not None
                assert worker.stdout is not None
                with self._changed:
                    self._workers.append(worker)
                    if self._closed:
                        worker.terminate()
                worker.stdout.readline()  # it has imported what compiles
                began_s = time.monotonic()
                while (taken := self._take()) is not None:
                    print(taken, file=worker.stdin, flush=True)
                    if not worker.stdout.readline():
                        break
                    now_s = time.monotonic()
                    self._note(taken, now_s - began_s)
                    began_s = now_s
        except OSError as error:
            logger.info("a process that compiles kernels ended: %s", error)
        finally:
            with self._changed:
                self._n_alive -= 1
                # Whatever is still missing is compiled where it is first used.
                if taken is not None:
                    self._unfinished.discard(taken)
                if not self._n_alive:
                    self._unfinished.clear()
                self._changed.notify_all()

    def _take(self) -> str | None:
        with self._changed:
            return self._left.pop(0) if self._left else None

    def _note(self, name: str, took_s: float) -> None:
        with self._changed:
            self._unfinished.discard(name)
            self._spent_s, self._spent_cost = self._spent_s + took_s, self._spent_cost + cost_of(name)
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            with self._changed:
                left = self._cost - self._spent_cost
                left_s = left * self._spent_s / self._spent_cost / max(1, self._n_workers) if self._spent_cost else None
                told = Compiling(self._total - len(self._unfinished), self._total, self._spent_cost / self._cost, left_s)
            self._progress(told)


@contextmanager
def compiling_ahead(names: Sequence[str], threads: int, room_bytes: int, lowering: Lowering) -> Generator[Ahead]:
    """Compile what is missing, in as many processes as `threads`, while the block runs.

    Args:
        names: `kernels_of` a model.
        room_bytes: memory that the processes may take together.
    """
    with kernel_cache.alone(wait=False) as folder:
        if folder is not None:
            lacks = missing(names, folder)
        elif kernel_cache.in_use():  # another process compiles
            lacks = []
        else:  # nothing can be kept
            lacks = list(names)
        n_workers = min(threads, len(lacks), room_bytes // WORKER_BYTES)
        command = python_command("-m", "paceline.backends.cpu.compile_worker", lowering, str(folder and folder.parent))
        # One process has none to share with.
        ahead = Ahead(lacks, n_workers if folder is not None and n_workers > 1 else 0, command)
        try:
            yield ahead
        finally:
            ahead.close()
