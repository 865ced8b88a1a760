"""What a person types in a chat: lines with a history, pasted text as one message, and nothing while an answer is written."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

FENCE = '"""'


class Asker:
    """Reads messages at a terminal.

    Args:
        history: the file that keeps what was typed, for this user's eyes; one that can't be written is done without.
    """

    def __init__(self, history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(history=_kept(history))
        self._interrupted = False

    def message(self) -> str | None:
        """The next message; empty where a line was given up with Ctrl-C. None: the person leaves (Ctrl-D, or Ctrl-C twice)."""
        try:
            text = read_message(self._session.prompt, ">>> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            empty = not self._session.default_buffer.text
            if empty and self._interrupted:
                return None
            self._interrupted = True
            if empty:
                print("(Ctrl-C once more, Ctrl-D or /quit leaves)")
            return ""
        self._interrupted = False
        return text


def _kept(path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def read_message(read: Callable[[str], str], prompt: str) -> str:
    """One message of one or many lines.

    Args:
        read: reads a line after showing a prompt.
        prompt: for the first line.

    Raises:
        EOFError: there is nothing more to read.
    """
    line = read(prompt)
    more = "... " if prompt else ""
    if line.lstrip().startswith(FENCE):
        lines = [line.lstrip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(read(more))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read(more))
    return "\n".join(lines)


@contextmanager
def untyped() -> Generator[None]:
    """Keep what is typed during an answer off the screen, until the next prompt shows it."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, silent)
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
