"""Grammars are tried in a process of their own. The serving process compiles only the grammars that were accepted there.

Laws:
- A grammar that ends a compiler's process, by its stack, memory or time, ends no other process. The library can't be interrupted, and some grammars of a few
  characters take it minutes or a whole stack.
- A refused grammar is never compiled in the serving process, neither as a whole nor in parts: the child also finds the keyword to blame, within the same
  limits.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import weakref
from contextlib import suppress
from functools import cache
from typing import IO, cast

from paceline.core.errors import Overloaded
from paceline.core.generation import Grammar
from paceline.core.processes import python_command
from paceline.engine.refusals import GrammarRefusal

SECONDS = 2.0
"""Processor seconds that one grammar may take; the largest usable ones take half a second. Raising it: other grammars wait longer."""


_TOO_COSTLY = GrammarRefusal(f"it takes more than {SECONDS:g} seconds to compile, or more memory than there is for that")


class GrammarTrial:
    """A child process that compiles grammars and discards them. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end = weakref.finalize(self, _nothing)

    def refusal(self, grammar: Grammar) -> GrammarRefusal | None:
        """Return why a grammar can't be followed. None: it can be."""
        with self._lock:
            for _ in range(2):  # a child that ended while it waited says nothing about this grammar
                fresh = self._child is None
                child = self._child = self._child or self._started()
                to, back = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
                with suppress(BrokenPipeError):
                    to.write(json.dumps([grammar.kind, grammar.text]).encode() + b"\n")
                    to.flush()
                said = back.readline()
                refusal = _read(said)
                if said and refusal is None:
                    return None
                if refusal is not None and (more := _read(back.readline())) is not None:
                    return more
                self._end()  # The child ended: on this grammar, or while it looked for the keyword to blame.
                self._child = None
                if fresh or refusal is not None:
                    return refusal or _TOO_COSTLY
            return _TOO_COSTLY

    def _started(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(  # noqa: S603  our own program
            python_command("-m", "paceline.engine.grammar_child"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, child)
        return child


AT_ONCE = 3
"""Number of children of this process. Raising it: slow grammars hold up others less, and take that many cores."""


MOST_WAITING = 8
"""Grammars that may wait for a child. Raising it: a new grammar waits longer behind slow ones; lowering it: bursts of new grammars are refused."""
_ROOM = threading.Semaphore(AT_ONCE + MOST_WAITING)


@cache
def _trials() -> queue.LifoQueue[GrammarTrial]:
    waiting: queue.LifoQueue[GrammarTrial] = queue.LifoQueue()
    for _ in range(AT_ONCE):
        waiting.put(GrammarTrial())
    return waiting


def trial(grammar: Grammar) -> GrammarRefusal | None:
    """Return why a grammar can't be followed, as the first free child finds. None: it can be.

    Raises:
        Overloaded: too many grammars wait.
    """
    if not _ROOM.acquire(blocking=False):
        raise Overloaded("Many forms that were not seen before are being tried", "Send it again.", retry_after_s=2)
    try:
        waiting = _trials()
        one = waiting.get()
        try:
            return one.refusal(grammar)
        finally:
            waiting.put(one)
    finally:
        _ROOM.release()


def _nothing() -> None:
    pass


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def _read(line: bytes) -> GrammarRefusal | None:
    """Return the refusal in a line that a child wrote. None: the child accepted the grammar, or the line is empty."""
    said = json.loads(line or b"null")
    return None if said is None else GrammarRefusal(*said)
