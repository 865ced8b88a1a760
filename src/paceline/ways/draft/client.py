"""Between an engine's thread, which asks for drafts and goes on, and one proposer, over one connection on the event loop: what it was told, what it was
asked, and when its answers are late.

Law: every ask is answered once, at the latest when the client ends; while no client reads the asks, with nothing. The engine's thread waits for answers
alone, and no longer than it says. Only what is new of a text is said, unless the proposer lost it; what was told of a sequence is kept until the
sequence is over, so that the next drafter can be told all of it. A proposer that breaks the contract, is late, or ends the connection has failed,
which is said once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import RemoteProposerError
from paceline.core.ids import SequenceId
from paceline.engine.drafts import BlockProposal, DraftAnswer, DraftAsk, retell
from paceline.ways.draft.connection import check_block, new_session
from paceline.ways.draft.finding import Connection, Drafter, OpenConnection
from paceline.ways.draft.pool import BlockAsk

QueueItem = tuple[DraftAsk, float] | SequenceId
"""An ask and when it was posted; or a sequence that is over."""


class AskQueue:
    """One engine's, for one source of drafts."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_item: Callable[[], None]
        self._changed = threading.Condition()
        self._told: dict[SequenceId, list[int]] = {}
        self._items: deque[QueueItem] = deque()
        self._called = False
        """The loop was told of asks that it has not taken."""
        self._answers: list[DraftAnswer] = []

    # ------------------------------------------------------------------------------------------------------ for the engine's thread

    def ask(self, ask: DraftAsk, now_s: float) -> None:
        kept = DraftAsk(ask.sequence, ask.first_position, tuple(ask.token_ids), ask.length)
        with self._changed:
            retell(self._told.setdefault(ask.sequence, []), ask.first_position, kept.token_ids)
        self._post((kept, now_s))

    def answers(self, wait_s: float) -> Sequence[DraftAnswer]:
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
        with self._changed:
            self._told.pop(sequence, None)
        self._post(sequence)

    @property
    def idle(self) -> bool:
        """No sequence that goes on was told of, or may be."""
        return not self._told

    def _post(self, item: QueueItem) -> None:
        self._items.append(item)
        loop = self._loop
        if loop is None:
            self._return()
        elif not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._on_item)
            except RuntimeError:  # it is closed: the process ends
                self._return()

    def _return(self) -> None:
        """No client reads it."""
        for item in self.take():
            if isinstance(item, tuple):
                self.answer(item[0], ())

    # ------------------------------------------------------------------------------------------------------------ for the event loop

    def open(self, on_item: Callable[[], None]) -> None:
        """Have the running loop told of asks from now on."""
        self._on_item = on_item
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Read no more of it. What was told of before is still to be taken. Idempotent."""
        self._loop = None

    def take(self) -> Iterator[QueueItem]:
        """All asks, in order."""
        self._called = False
        with suppress(IndexError):  # at the end both threads may take some of it
            while True:
                yield self._items.popleft()

    def text(self, sequence: SequenceId, length: int) -> Sequence[int] | None:
        """The first tokens of a sequence; None: it is over, or shorter by now."""
        with self._changed:
            told = self._told.get(sequence, ())
            return told[:length] if len(told) >= length else None

    def answer(self, ask: DraftAsk, token_ids: Sequence[int]) -> None:
        """Once for every ask taken."""
        with self._changed:
            self._answers.append(DraftAnswer(ask.sequence, ask.first_position + len(ask.token_ids), token_ids))
            self._changed.notify()


LATE_S, LATE_TIMES, LATEST_S = 0.5, 4.0, 30.0
"""A block is late after so long, and so many times what its proposer's speed promises for it and for those before it, or what it took lately instead;
at the latest after the last. Raising them: a proposer that hangs is noticed later, and meanwhile no proposer drafts."""
MOST_SLOWER = 20.0
"""Times that a proposer may be slower than its speed promises: it was measured with other lengths, while nothing else ran."""
FASTER_AGAIN = 0.1
"""Of one block, in how much slower it is."""
MOST_ASKED = 32
"""Blocks under way. Raising it: a proposer that many nodes ask refuses them sooner; lowering it: of many sequences some get no drafts."""


@dataclass(slots=True)
class _Waiting:
    ask: DraftAsk
    asked_s: float
    late: asyncio.TimerHandle
    takes_s: float
    """What it should take, once it is its turn."""
    promised_s: float
    """What it should take with those before it."""
    whole: bool
    """All of the text was said."""


class ProposerClient:
    """Begins with `begin`, and ends with `end`, on whichever side it failed.

    Args:
        on_good: told of each block, of the seconds that it took, and whether all of its text was said for it.
        on_fail: told why there will be no more.
    """

    def __init__(
        self,
        drafter: Drafter,
        queue: AskQueue,
        vocabulary_size: int,
        clock: Clock,
        on_good: Callable[[BlockProposal, float, bool], None],
        on_fail: Callable[[ProposerClient, RemoteProposerError], None],
    ) -> None:
        self.drafter = drafter
        """With its newest figures."""
        self._queue, self._vocabulary_size, self._clock = queue, vocabulary_size, clock
        self._on_good, self._on_fail = on_good, on_fail
        self._connection: Connection | None = None
        self._sessions: dict[SequenceId, int] = {}
        """Of sequences that it knows."""
        self._waiting: dict[int, deque[_Waiting]] = {}
        """By session, in the order of the asks, which is that of their blocks."""
        self._slower = 1.0
        """Than was promised."""

    def begin(self, open_connection: OpenConnection) -> None:
        """Reach it.

        Raises:
            PacelineError: it can't be reached.
        """
        self._connection = open_connection(self.drafter, self._on_block, self._fail)

    def ask(self, ask: DraftAsk, asked_s: float) -> None:
        """Ask for a block, unless too many are under way."""
        if sum(map(len, self._waiting.values())) < MOST_ASKED:
            self._tell(ask, asked_s, whole=ask.sequence not in self._sessions)
        else:
            # What is not said now is said later, with all before it.
            self.leave((ask.sequence,))
            self._queue.answer(ask, ())

    def leave(self, sequences: Iterable[SequenceId]) -> None:
        """It need not remember these: they are over, or told anew."""
        sessions = [session for sequence in sequences if (session := self._sessions.pop(sequence, None)) is not None]
        if sessions and self._connection is not None:
            self._connection.send(None, sessions)

    def end(self) -> Connection | None:
        """Answer all that wait, with nothing, and hear no more. The connection is the caller's to close. Idempotent."""
        connection, self._connection = self._connection, None
        waiting, self._waiting = self._waiting, {}
        for each in (each for asks in waiting.values() for each in asks):
            each.late.cancel()
            self._queue.answer(each.ask, ())
        return connection

    def _tell(self, ask: DraftAsk, asked_s: float, *, whole: bool) -> None:
        """Ask, and say what is new, or everything."""
        connection = self._connection
        assert connection is not None, "asks come neither before the beginning nor after the end"
        first, tokens = ask.first_position, ask.token_ids
        if whole:
            self.leave((ask.sequence,))
            text = self._queue.text(ask.sequence, first + len(tokens))
            if text is None:  # no sequence waits for it any more
                self._queue.answer(ask, ())
                return
            first, tokens = 0, text
            self._sessions[ask.sequence] = new_session()
        session = self._sessions[ask.sequence]
        takes_s = self.drafter.takes_s(len(tokens), ask.length)
        before_s = sum(each.takes_s for asks in self._waiting.values() for each in asks)
        late_s = min(LATE_S + LATE_TIMES * self._slower * (before_s + takes_s), LATEST_S)
        late = asyncio.get_running_loop().call_later(late_s, self._late, late_s)
        self._waiting.setdefault(session, deque()).append(_Waiting(ask, asked_s, late, takes_s, before_s + takes_s, whole))
        connection.send(BlockAsk(self.drafter.model_id, session, first, tokens, ask.length))

    def _on_block(self, session: int, block: BlockProposal | None) -> None:
        if self._connection is None:
            return
        peer, asks = self.drafter.node_id, self._waiting.get(session)
        if not asks:
            self._fail(RemoteProposerError(f"{peer} sent a draft that was not requested", status="DATA_LOSS"))
            return
        waiting = asks.popleft()
        if not asks:
            del self._waiting[session]
        waiting.late.cancel()
        ask = waiting.ask
        if block is None and self._sessions.get(ask.sequence) != session:
            self._queue.answer(ask, ())  # it is over, or told anew
        elif block is None and not waiting.whole:
            if asks:
                self.leave((ask.sequence,))  # what is asked next is told with everything
                self._queue.answer(ask, ())
            else:
                self._tell(ask, waiting.asked_s, whole=True)
        else:
            self._take(waiting, block)

    def _take(self, waiting: _Waiting, block: BlockProposal | None) -> None:
        peer, ask = self.drafter.node_id, waiting.ask
        try:
            if block is None:
                raise RemoteProposerError(f"{peer} does not remember the tokens sent to it", status="ABORTED")
            check_block(block, ask.length, self._vocabulary_size, peer)
        except RemoteProposerError as error:
            self._queue.answer(ask, ())
            self._fail(error)
        else:
            took_s = self._clock.monotonic() - waiting.asked_s
            slower = min(took_s / waiting.promised_s, MOST_SLOWER) if waiting.promised_s > 0 else 1.0
            self._slower = max(1.0, slower, self._slower + FASTER_AGAIN * (slower - self._slower))
            self._on_good(block, took_s, waiting.whole)
            self._queue.answer(ask, block.token_ids)

    def _late(self, late_s: float) -> None:
        self._fail(RemoteProposerError(f"{self.drafter.node_id} drafted nothing in {late_s:.2f} s", status="DEADLINE_EXCEEDED"))

    def _fail(self, error: RemoteProposerError) -> None:
        if self._connection is not None:
            self._on_fail(self, error)
