"""Drafts from wherever the plan says: the engine's thread asks and goes on; the event loop carries asks out and answers back.

Law: the engine is never held up but for the wait it names. Every ask is answered once: with a draft, or, where its proposer failed, is late or is not
to be had, with an empty one. Who failed is left out for a while, longer each time, and whoever is next takes over, told everything anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, RemoteProposerError, VocabularyMismatch
from paceline.core.ids import SequenceId
from paceline.engine.drafts import BlockProposal, DraftAnswer, DraftAsk
from paceline.engine.proposers.session import retell
from paceline.node.drafts.drafter import Drafter, Find, Key, Line, OpenLine
from paceline.node.drafts.meter import DraftMeter
from paceline.transport.draft_blocks import check_block, new_session
from paceline.transport.proposer_desk import BlockAsk

logger = logging.getLogger(__name__)

LATE_S, LATE_TIMES, LATEST_S = 0.5, 4.0, 30.0
"""A block is late after so long, and so many times what its proposer's speed promises for it and for those before it; at the latest after the last.
Raising them: a proposer that hangs is noticed later, and meanwhile nobody drafts."""
LEFT_OUT_S, LEFT_OUT_MOST_S = 2.0, 300.0
"""How long who failed is left out: doubled each time. Raising them: one that was only restarted is missed for longer."""
MOST_ASKED = 32
"""Blocks under way. Raising it: a proposer that many nodes ask refuses them sooner; lowering it: of many sequences some get no drafts."""
MOST_DOUBLED = 8
FORGIVEN = 64
"""Blocks after which old failures no longer count."""
GAIN = 0.1
"""Of one answer's time, in what answers are expected to take."""


@dataclass(slots=True)
class _Text:
    """One sequence, as the engine told it."""

    tokens: list[int] = field(default_factory=list[int])
    session: int = 0
    """With the present proposer; 0: it knows nothing of it."""


@dataclass(slots=True)
class _Waiting:
    ask: DraftAsk
    asked_s: float
    late: asyncio.TimerHandle
    takes_s: float
    """What it should take, once it is its turn."""
    whole: bool
    """All of the text was said."""


@dataclass(slots=True)
class _Failed:
    until_s: float
    times: int


class RemoteDrafts:
    """Implements `engine.drafts.DraftSource`.

    Args:
        name: that metrics know it by; mostly the proposer's model id.
        meter: counts.
        clock: all time.
    """

    def __init__(self, name: str, meter: DraftMeter, clock: Clock) -> None:
        self.name = name
        self._meter, self._clock = meter, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expected_s: float | None = None
        # Between the two threads.
        self._arrived = threading.Condition()
        self._answers: list[DraftAnswer] = []
        self._texts: dict[SequenceId, _Text] = {}
        self._mail: deque[tuple[DraftAsk, float] | SequenceId] = deque()
        self._called = False
        # The event loop's own.
        self._find: Find | None = None
        self._vocabulary_size = 0
        self._open: OpenLine | None = None
        self._drafter: Drafter | None = None
        self._key: Key | None = None
        """Of whoever drafts."""
        self._line: Line | None = None
        self._waiting: dict[int, deque[_Waiting]] = {}
        """By session, in the order of the asks, which is that of their blocks."""
        self._failed: dict[Key, _Failed] = {}
        self._again: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._good = 0
        self.trouble: PacelineError | None = None
        """Why nobody drafts at present."""

    # ------------------------------------------------------------------------------------------------------ for the engine's thread

    @property
    def expected_s(self) -> float | None:
        """As `DraftSource`."""
        return self._expected_s

    @property
    def block(self) -> int:
        """As `DraftSource`."""
        drafter = self._drafter
        return 1 if drafter is None else drafter.block

    def ask(self, ask: DraftAsk) -> None:
        """As `DraftSource`."""
        kept = DraftAsk(ask.sequence, ask.first_position, tuple(ask.token_ids), ask.length)
        with self._arrived:
            text = self._texts.setdefault(ask.sequence, _Text())
            if ask.first_position > len(text.tokens):
                raise ValueError(f"tokens of {ask.sequence} from position {ask.first_position}, and {len(text.tokens)} were told")
            retell(text.tokens, ask.first_position, kept.token_ids)
        self._post((kept, self._clock.monotonic()))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        """As `DraftSource`."""
        if not self._answers and wait_s <= 0:
            return ()
        with self._arrived:
            if not self._answers:
                self._arrived.wait(wait_s)
            taken, self._answers = self._answers, []
        return taken

    def forget(self, sequence: SequenceId) -> None:
        """As `DraftSource`."""
        self._post(sequence)

    def _post(self, item: tuple[DraftAsk, float] | SequenceId) -> None:
        loop = self._loop
        if loop is None:
            # Nobody drafts yet, or any more.
            if isinstance(item, tuple):
                self._answer(item[0], ())
            else:
                with self._arrived:
                    self._texts.pop(item, None)
            return
        self._mail.append(item)
        if not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._read_mail)
            except RuntimeError:  # it is closed: the process ends
                self._expected_s = None

    # ------------------------------------------------------------------------------------------------------------ for its owner

    @property
    def idle(self) -> bool:
        """No sequence that goes on was told to it."""
        return not self._texts

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts at present."""
        return self._drafter

    def attach(self, find: Find, open_line: OpenLine, vocabulary_size: int) -> None:
        """Begin. On the event loop.

        Args:
            find: knows who could draft.
            open_line: reaches them.
            vocabulary_size: of the model drafted for.
        """
        self._find, self._open, self._vocabulary_size = find, open_line, vocabulary_size
        self._loop = asyncio.get_running_loop()
        self.look()

    def look(self) -> None:
        """The view has changed: maybe somebody can draft now, or the one who did no longer can."""
        if self._find is None:
            return
        now = self._clock.monotonic()
        try:
            found = self._find([key for key, failed in self._failed.items() if failed.until_s > now])
        except PacelineError as error:
            if str(self.trouble) != str(error):
                level = logging.WARNING if isinstance(error, VocabularyMismatch) else logging.INFO
                logger.log(level, "nobody drafts (%s): %s", self.name, error)
            self.trouble, found = error, ()
        # Whoever drafts goes on: another would have to be told everything.
        drafter = self._drafter
        kept = None if drafter is None else next((one for one in found if (one.key, one.model_id) == (self._key, drafter.model_id)), None)
        if kept is not None:
            self._drafter = kept  # with newer figures
        else:
            self._change(found[0] if found else None)

    async def detach(self) -> None:
        """End. On the event loop; idempotent."""
        self._find = self._open = None
        self._change(None)
        if self._again is not None:
            self._again.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._loop = None

    # ------------------------------------------------------------------------------------------------------------ on the loop

    def _read_mail(self) -> None:
        self._called = False
        ended: list[int] = []
        while self._mail:
            item = self._mail.popleft()
            if isinstance(item, tuple):
                self._take(*item)
                continue
            with self._arrived:
                text = self._texts.pop(item, None)
            if text is not None and text.session:
                ended.append(text.session)
        if ended and self._line is not None:
            self._line.send(None, ended)

    def _take(self, ask: DraftAsk, asked_s: float) -> None:
        text = self._texts.get(ask.sequence)
        if self._drafter is None or text is None:
            self._answer(ask, ())
        elif sum(map(len, self._waiting.values())) >= MOST_ASKED:
            # What is not said now is said later, with all before it.
            self._leave(text)
            self._answer(ask, ())
        else:
            self._tell(ask, asked_s, text, whole=not text.session)

    def _tell(self, ask: DraftAsk, asked_s: float, text: _Text, *, whole: bool) -> None:
        """Ask, and say what is new, or everything."""
        drafter, line = self._drafter, self._line
        assert drafter is not None, "nobody is asked where there is nobody"
        assert line is not None, "a drafter has a line"
        first, tokens = ask.first_position, ask.token_ids
        if whole:
            self._leave(text)
            text.session = new_session()
            with self._arrived:
                first, tokens = 0, text.tokens[: first + len(tokens)]
        takes_s = drafter.takes_s(len(tokens), ask.length)
        before_s = sum(each.takes_s for others in self._waiting.values() for each in others)
        late_s = min(LATE_S + LATE_TIMES * (before_s + takes_s), LATEST_S)
        late = asyncio.get_running_loop().call_later(late_s, self._late, drafter, late_s)
        self._waiting.setdefault(text.session, deque()).append(_Waiting(ask, asked_s, late, takes_s, whole))
        line.send(BlockAsk(drafter.model_id, text.session, first, tokens, ask.length))

    def _leave(self, text: _Text) -> None:
        """The proposer need not remember a text any longer: it is told anew."""
        session, text.session = text.session, 0
        if session and self._line is not None:
            self._line.send(None, (session,))

    def _on_block(self, key: Key, session: int, block: BlockProposal | None) -> None:
        line = self._waiting.get(session)
        if key != self._key:
            return  # of a proposer that was given up
        if not line:
            peer = key[0]
            self._fail(key, RemoteProposerError(f"{peer} drafts what nobody asked for", status="DATA_LOSS"))
            return
        waiting = line.popleft()
        if not line:
            del self._waiting[session]
        drafter = self._drafter
        assert drafter is not None, "it has a key"
        waiting.late.cancel()
        text = self._texts.get(waiting.ask.sequence)
        if block is None and (text is None or text.session != session):
            self._answer(waiting.ask, ())  # it ended, or is told anew
            return
        if block is None and text is not None and not waiting.whole:
            if line:
                self._leave(text)  # what is asked next is told with everything
                self._answer(waiting.ask, ())
            else:
                self._tell(waiting.ask, waiting.asked_s, text, whole=True)
            return
        try:
            if block is None:
                raise RemoteProposerError(f"{drafter.node_id} forgets what it is told", status="ABORTED")
            check_block(block, waiting.ask.length, self._vocabulary_size, drafter.node_id)
        except RemoteProposerError as error:
            self._answer(waiting.ask, ())
            self._fail(key, error)
            return
        took_s = self._clock.monotonic() - waiting.asked_s
        self._meter.of(self.name).count(block)
        self._meter.hop.observe(took_s)
        self._good += 1
        if self._good == FORGIVEN:
            self._failed.pop(key, None)
        if self._expected_s is not None and not waiting.whole:
            self._expected_s += GAIN * (took_s - self._expected_s)
        self._answer(waiting.ask, block.token_ids)

    def _late(self, drafter: Drafter, late_s: float) -> None:
        error = RemoteProposerError(f"{drafter.node_id} drafted nothing in {late_s:.2f} s", status="DEADLINE_EXCEEDED")
        self._fail(drafter.key, error)

    def _fail(self, key: Key, error: RemoteProposerError) -> None:
        """Leave a proposer out for a while, and go on with another."""
        if key != self._key:
            return
        self._meter.of(self.name).failures += 1
        self._meter.failures[key[0], error.status] += 1
        before = self._failed.get(key)
        times = 0 if before is None else before.times
        left_out_s = min(LEFT_OUT_S * 2 ** min(times, MOST_DOUBLED), LEFT_OUT_MOST_S)
        now = self._clock.monotonic()
        self._failed[key] = _Failed(now + left_out_s, times + 1)
        logger.warning("%s drafts no more for %g s: %s", key[0], left_out_s, error)
        self._change(None)
        if self._again is not None:
            self._again.cancel()
        soonest = min(failed.until_s for failed in self._failed.values() if failed.until_s > now)
        self._again = asyncio.get_running_loop().call_later(soonest - now, self.look)
        self.look()

    def _change(self, drafter: Drafter | None) -> None:
        """Let somebody else draft, or nobody."""
        line, self._line = self._line, None
        if line is not None:
            task = asyncio.create_task(line.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        waiting, self._waiting = self._waiting, {}
        self._drafter, self._good, self._expected_s = drafter, 0, None
        self._key = key = None if drafter is None else drafter.key
        with self._arrived:
            for text in self._texts.values():
                text.session = 0
        for line_of_asks in waiting.values():
            for each in line_of_asks:
                each.late.cancel()
                self._answer(each.ask, ())
        if drafter is None or key is None or self._open is None:
            return
        try:
            self._line = self._open(
                drafter, lambda session, block: self._on_block(key, session, block), lambda error: self._fail(key, error)
            )
        except PacelineError as error:
            self._fail(key, RemoteProposerError(error.message, error.hint, status="UNAVAILABLE"))
            return
        self._meter.changes += 1
        self.trouble = None
        logger.info("%s drafts with %s", drafter.node_id, drafter.model_id)
        self._expected_s = drafter.takes_s(1, 8)

    def _answer(self, ask: DraftAsk, token_ids: Sequence[int]) -> None:
        with self._arrived:
            self._answers.append(DraftAnswer(ask.sequence, ask.first_position + len(ask.token_ids), token_ids))
            self._arrived.notify()
