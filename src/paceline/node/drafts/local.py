"""Drafts by a proposer of this process, in a thread of their own: for benches, tests and `DistributedSpeculativeDecoder`.

Law: as any `DraftSource`, it never holds the engine up. A proposer that raised is asked no more; what it raised is kept for whoever wants to know,
and another may take its place.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk, Proposer
from paceline.engine.proposers.session import DraftSession, open_session, retell

logger = logging.getLogger(__name__)

GAIN = 0.1
"""Of one answer's time, in what answers are expected to take."""
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Successor:
    proposer: Proposer


class LocalDrafts:
    """Implements `engine.drafts.DraftSource`.

    Args:
        proposer: may block.
        clock: for what answers take.
        num_steps: K, for proposers that refine.
        block: tokens that take it hardly longer than one.
    """

    def __init__(self, proposer: Proposer, clock: Clock, *, num_steps: int = 0, block: int = 1) -> None:
        self.block = block
        self._proposer, self._clock, self._num_steps = proposer, clock, num_steps
        self._texts: dict[SequenceId, list[int]] = {}
        """As the engine told them. The thread's own, as are the sessions."""
        self._sessions: dict[SequenceId, DraftSession] = {}
        self._changed = threading.Condition()
        self._asks: deque[DraftAsk | SequenceId | _Successor | None] = deque()
        self._answers: list[DraftAnswer] = []
        self._expected_s: float | None = 0.0
        self.error: Exception | None = None
        """What the proposer raised."""
        self._thread = threading.Thread(target=self._live, name="paceline-drafts", daemon=True)
        self._thread.start()

    @property
    def expected_s(self) -> float | None:
        """As `DraftSource`; 0 until something was drafted."""
        return self._expected_s

    def ask(self, ask: DraftAsk) -> None:
        """As `DraftSource`."""
        self._post(DraftAsk(ask.sequence, ask.first_position, tuple(ask.token_ids), ask.length))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        """As `DraftSource`."""
        if not self._answers and wait_s <= 0:
            return ()
        with self._changed:
            if not self._answers:
                self._changed.wait_for(lambda: self._answers, wait_s)
            taken, self._answers = self._answers, []
        return taken

    def forget(self, sequence: SequenceId) -> None:
        """As `DraftSource`."""
        self._post(sequence)

    def replace(self, proposer: Proposer) -> None:
        """Let another proposer draft from now on. It is told everything anew."""
        self.error, self._expected_s = None, 0.0
        self._post(_Successor(proposer))

    def close(self) -> None:
        """Stop after the block in progress, which is waited for, but not for long. Idempotent."""
        self._expected_s = None
        self._post(None)
        self._thread.join(CLOSE_S)

    def _post(self, item: DraftAsk | SequenceId | _Successor | None) -> None:
        with self._changed:
            self._asks.append(item)
            self._changed.notify_all()

    def _live(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asks)
                item = self._asks.popleft()
                # A later ask of the same sequence says that this one's answer is of no use any more; but it has to be told.
                later = isinstance(item, DraftAsk) and any(
                    isinstance(one, DraftAsk) and one.sequence == item.sequence for one in self._asks
                )
            match item:
                case None:
                    break
                case DraftAsk():
                    answer = DraftAnswer(
                        item.sequence, item.first_position + len(item.token_ids), self._draft(item, 0 if later else item.length)
                    )
                    with self._changed:
                        self._answers.append(answer)
                        self._changed.notify_all()
                case _Successor(proposer):
                    self._proposer = proposer
                    self._close_sessions()
                case sequence:
                    self._texts.pop(sequence, None)
                    if (session := self._sessions.pop(sequence, None)) is not None:
                        session.close()
        self._close_sessions()

    def _close_sessions(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _draft(self, ask: DraftAsk, length: int) -> Sequence[int]:
        text = self._texts.setdefault(ask.sequence, [])
        retell(text, ask.first_position, ask.token_ids)
        if self.error is not None:
            return ()
        began_s = self._clock.monotonic()
        first, tokens = ask.first_position, ask.token_ids
        try:
            session = self._sessions.get(ask.sequence)
            if session is None:
                session = self._sessions[ask.sequence] = open_session(self._proposer)
                first, tokens = 0, text
            block = session.propose(first, tokens, length, self._num_steps)
        except Exception as error:  # noqa: BLE001 - whatever it was, there are no drafts
            logger.warning("nothing is drafted any more: %s: %s", type(error).__name__, error)
            self.error, self._expected_s = error, None
            return ()
        expected_s = self._expected_s
        if expected_s is not None:  # closed meanwhile
            took_s = self._clock.monotonic() - began_s
            self._expected_s = expected_s + (took_s - expected_s) * (GAIN if expected_s else 1.0)
        return block.token_ids
