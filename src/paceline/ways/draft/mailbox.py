"""Between an engine's thread, which asks and goes on, and the event loop, which carries asks out and answers back.

Law: the engine's thread waits for answers alone, and no longer than it says. What it told of a sequence is kept until the sequence is over, so that
the next drafter can be told all of it. While no talk reads the mail, asks are answered with nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from paceline.core.ids import SequenceId
from paceline.engine.drafts import Branch, DraftAnswer, DraftAsk
from paceline.engine.proposers.session import retell

Mail = tuple[DraftAsk, float] | SequenceId
"""An ask and when it was posted; or a sequence that is over."""


class Mailbox:
    """One engine's, for one source of drafts."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_mail: Callable[[], None]
        self._changed = threading.Condition()
        self._told: dict[SequenceId, list[int]] = {}
        self._mail: deque[Mail] = deque()
        self._called = False
        """The loop was told of mail that it has not taken."""
        self._answers: list[DraftAnswer] = []

    # ------------------------------------------------------------------------------------------------------ for the engine's thread

    def ask(self, ask: DraftAsk, now_s: float) -> None:
        """As `DraftSource`."""
        kept = DraftAsk(ask.sequence, ask.first_position, tuple(ask.token_ids), ask.length)
        with self._changed:
            retell(self._told.setdefault(ask.sequence, []), ask.first_position, kept.token_ids)
        self._post((kept, now_s))

    def answers(self, wait_s: float) -> Sequence[DraftAnswer]:
        """As `DraftSource`."""
        if not self._answers and wait_s <= 0:
            return ()
        with self._changed:
            if not self._answers:
                self._changed.wait(wait_s)
            taken, self._answers = self._answers, []
        return taken

    def expect(self, sequence: SequenceId) -> None:
        """It may be told of, until it is forgotten."""
        with self._changed:
            self._told.setdefault(sequence, [])

    def forget(self, sequence: SequenceId) -> None:
        """As `DraftSource`."""
        with self._changed:
            self._told.pop(sequence, None)
        self._post(sequence)

    @property
    def idle(self) -> bool:
        """No sequence that goes on was told of, or may be."""
        return not self._told

    def _post(self, item: Mail) -> None:
        self._mail.append(item)
        loop = self._loop
        if loop is None:
            self._return()
        elif not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._on_mail)
            except RuntimeError:  # it is closed: the process ends
                self._return()

    def _return(self) -> None:
        """No talk reads it."""
        for item in self.take():
            if isinstance(item, tuple):
                self.answer(item[0], ())

    # ------------------------------------------------------------------------------------------------------------ for the event loop

    def open(self, on_mail: Callable[[], None]) -> None:
        """Have the running loop told of mail from now on."""
        self._on_mail = on_mail
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Read no more of it. What was told of before is still to be taken. Idempotent."""
        self._loop = None

    def take(self) -> Iterator[Mail]:
        """All mail, in order."""
        self._called = False
        with suppress(IndexError):  # at the end both threads may take some of it
            while True:
                yield self._mail.popleft()

    def text(self, sequence: SequenceId, length: int) -> Sequence[int] | None:
        """The first tokens of a sequence; None: it is over, or shorter by now."""
        with self._changed:
            told = self._told.get(sequence, ())
            return told[:length] if len(told) >= length else None

    def answer(self, ask: DraftAsk, token_ids: Sequence[int], branches: Sequence[Branch] = ()) -> None:
        """Once for every ask taken."""
        with self._changed:
            self._answers.append(DraftAnswer(ask.sequence, ask.first_position + len(ask.token_ids), token_ids, branches))
            self._changed.notify()
