"""Grammars are tried in a process of their own, before the one that serves compiles them.

Law: a grammar that ends a compiler's process, by its stack, its memory or its time, ends no other. The library can't be interrupted, and some forms
of a few letters take it minutes or all of a stack.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache
from typing import IO, cast

from paceline.core.errors import Overloaded
from paceline.core.generation import Grammar, GrammarKind
from paceline.core.processes import python_command
from paceline.core.text import Tokenizer

SECONDS = 2.0
"""Of the processor, a grammar: the largest that are followed take half of one. Raising it: others wait longer for theirs."""
BYTES = 2 << 30
"""Of addresses, in all: the largest grammars take some 150 MB."""
STACK = 4 << 20
"""Of the thread that tries: half of what threads have that compile and follow."""


class GrammarTrial:
    """A child that compiles grammars and throws them away. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end = weakref.finalize(self, _nothing)

    def survives(self, grammar: Grammar) -> bool:
        """Whether the child outlives the compiling of a grammar, be it one or not."""
        with self._lock:
            for _ in range(2):  # a child that ended while it waited says nothing about this grammar
                fresh = self._child is None
                child = self._child = self._child or self._started()
                to, back = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
                with suppress(BrokenPipeError):
                    to.write(json.dumps([grammar.kind, grammar.text]).encode() + b"\n")
                    to.flush()
                if back.readline():
                    return True
                self._end()
                self._child = None
                if fresh:
                    return False
            return False

    def _started(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(  # noqa: S603  our own program
            python_command("-m", "paceline.engine.grammar_trial"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, child)
        return child


AT_ONCE = 3
"""Children of this process. Raising it: more forms that take seconds hold up none of the others, and take that many cores."""


MOST_WAITING = 8
"""Forms that wait for a child. Raising it: behind forms that take all their time, a new one waits longer; lowering it: bursts of new forms are refused."""
_ROOM = threading.Semaphore(AT_ONCE + MOST_WAITING)


@cache
def _trials() -> queue.LifoQueue[GrammarTrial]:
    waiting: queue.LifoQueue[GrammarTrial] = queue.LifoQueue()
    for _ in range(AT_ONCE):
        waiting.put(GrammarTrial())
    return waiting


def trial(grammar: Grammar) -> bool:
    """Return whether a grammar's compiler outlives it, in the first child that is free, whatever this process serves.

    Raises:
        Overloaded: too many others wait.
    """
    if not _ROOM.acquire(blocking=False):
        raise Overloaded("Many forms that were not seen before are being tried", "Send it again.", retry_after_s=2)
    try:
        waiting = _trials()
        one = waiting.get()
        try:
            return one.survives(grammar)
        finally:
            waiting.put(one)
    finally:
        _ROOM.release()


def _nothing() -> None:
    pass


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


class _Bytes:
    """A vocabulary that costs nothing: what compiling takes depends little on it."""

    size, eos_ids = 257, frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())


def _serve() -> None:
    from paceline.engine.grammar import Grammars

    grammars = Grammars(cast("Tokenizer", _Bytes()), tried=True)
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        grammars.attempt(Grammar(GrammarKind(kind), text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    threading.stack_size(STACK)
    threading.Thread(target=_serve).start()
