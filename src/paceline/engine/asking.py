"""Asking sources for drafts: ahead, while what they guessed last is being verified, so that their work and the way to them hide.

Law: nothing here waits, but for an answer that is due sooner than a step without it would take. What comes is checked for being token ids, and for
nothing else.
"""

from __future__ import annotations

from math import ceil

from paceline.core.clock import Clock
from paceline.engine.acceptance import Acceptance, likely_length
from paceline.engine.drafts import DraftAnswer, DraftAsk, DraftSource
from paceline.engine.sequence import SequenceState
from paceline.engine.step_costs import StepCosts
from paceline.engine.tapes import SequenceDrafts, Tape

MOST_READY = 64
"""Tokens guessed ahead of those verified, at most."""
PATIENCE = 1.5
"""Times the usual wait for an answer. Raising it: a late one is waited for longer, for nothing if it does not come."""
UNUSED = 8
"""Asks in a row of which nothing is used, before a source is asked less often. Raising it: who never helps costs more, who begins to is found sooner."""
LONGEST_PAUSE = 16
"""Tokens between two asks of a source that never helps."""
WORTH_A_WAIT = 0.25
"""Of a step's time: how long an answer may take to be waited for. Raising it: more is won where it is right, and lost where it is wrong."""


class Asking:
    """All asks of one engine.

    Args:
        longest: tokens of one sequence verified in one step, at most.
        vocabulary: token ids below this are tokens.
        clock: for how long an answer is due.
    """

    def __init__(self, longest: int, vocabulary: int, costs: StepCosts, clock: Clock) -> None:
        self._longest, self._vocabulary = longest, vocabulary
        self._costs, self._clock = costs, clock
        self._live: dict[int, tuple[SequenceState, SequenceDrafts]] = {}
        self._sources: dict[DraftSource, str] = {}
        """Of those that are live: their names."""

    def begin(self, seq: SequenceState, drafts: SequenceDrafts) -> None:
        """A sequence will be generated: its sources may read its prompt at once."""
        if drafts.told:
            self._live[seq.id] = seq, drafts
            self._sources |= {told.source: maker for maker, told in drafts.told.items()}
            self.ask(seq, drafts)

    def end(self, seq: SequenceState, drafts: SequenceDrafts) -> None:
        """A sequence is over."""
        self._live.pop(seq.id, None)
        for told in drafts.told.values():
            told.source.forget(seq.id)
        asked = {told.source for _, others in self._live.values() for told in others.told.values()}
        self._sources = {source: maker for source, maker in self._sources.items() if source in asked}

    def ask(self, seq: SequenceState, drafts: SequenceDrafts, verified: int = 0) -> None:
        """Have sources go on behind what they guessed, on the guess that all of that comes true, where little of it is left.

        Args:
            drafts: of that sequence.
            verified: how many guesses, by whichever maker they have now, are being verified.
        """
        for maker in drafts.told:
            self._ask(seq, drafts, maker, verified if maker == drafts.maker else 0)

    def hear(self, waiting: DraftSource | None = None, wait_s: float = 0.0) -> None:
        """Take what sources answered, and wait for one of them."""
        for source, maker in self._sources.items():
            for answer in source.answers(wait_s if source is waiting else 0.0):
                found = self._live.get(answer.sequence)
                if found is not None and (told := found[1].told.get(maker)) is not None and told.source is source:
                    self._answered(*found, maker, answer)

    def wait_for(self, drafts: SequenceDrafts) -> bool:
        """Wait for a draft that is due soon: a later one is as good behind a step without it. Whether it did."""
        if not self._costs.known:
            return False
        for maker, told in drafts.told.items():
            usual_s = told.source.expected_s
            if told.since is None or usual_s is None:
                continue
            late_s = told.since + PATIENCE * usual_s - self._clock.monotonic()
            if late_s > 0 and usual_s < WORTH_A_WAIT * min(1.0, drafts.rates[maker].fresh) * self._costs.seconds(1):
                self.hear(told.source, late_s)
                return True
        return False

    def _ask(self, seq: SequenceState, drafts: SequenceDrafts, maker: str, verified: int) -> None:
        told, tape = drafts.told[maker], drafts.tapes.get(maker)
        source = told.source
        if told.since is not None or source.expected_s is None:
            return
        known = len(seq.tokens)
        if known < told.pause_until:
            return
        if tape is not None and tape.resumes:
            tape, verified = None, 0
        guessed = () if tape is None else tape.ids[known - tape.start :]
        wanted = self._wanted(drafts.rates[maker], tape, len(guessed), verified, source.expected_s)
        if len(guessed) - verified >= wanted:
            return
        right = min(told.right, known)
        told.end = told.right = known + len(guessed)
        told.since = self._clock.monotonic()
        told.unused += 1
        if told.unused > UNUSED:
            # Nothing of it is worth verifying, or it always comes too late: it may be the one that slows this machine down.
            told.pause_until = known + min(2 ** (told.unused - UNUSED), LONGEST_PAUSE)
        source.ask(DraftAsk(seq.id, right, [*seq.tokens[right:], *guessed], max(wanted, source.block)))

    def _wanted(self, rates: Acceptance, tape: Tape | None, guessed: int, verified: int, usual_s: float) -> int:
        """Tokens that should lie ready: those likely to be used in a step, and those used up until more come."""
        if tape is None:
            return min(2 + round(2 * rates.fresh), self._longest + 1)
        likely = likely_length(rates.chances(tape.run + guessed, self._longest + 1))
        steps = usual_s / self._costs.seconds(1 + verified) if self._costs.known else 1.0
        return min(likely + ceil(steps) * (1 + verified), MOST_READY)

    def _answered(self, seq: SequenceState, drafts: SequenceDrafts, maker: str, answer: DraftAnswer) -> None:
        told, ids = drafts.told[maker], answer.token_ids
        if told.since is None or answer.position != told.end:
            return  # it goes on behind a guess that was wrong
        told.since = None
        if not ids or not all(0 <= token < self._vocabulary for token in ids):
            drafts.rates[maker].learn_fresh(0)  # so that no step waits for nothing
            return
        old, known = drafts.tapes.get(maker), len(seq.tokens)
        branches = {
            (answer.position + branch.offset, branch.token_ids[0]): branch.token_ids[1:]
            for branch in answer.branches
            if branch.token_ids and min(branch.token_ids) >= 0 and max(branch.token_ids) < self._vocabulary
        }
        if old is not None and not old.resumes:
            kept = {at: ids for at, ids in old.branches.items() if at[0] >= known}
            drafts.tapes[maker] = Tape([*old.ids[known - old.start :], *ids], known, old.run, old.came_true, branches=kept | branches)
        else:
            drafts.tapes[maker] = Tape(ids, answer.position, 1, branches=branches)
            drafts.compare_with(maker, seq.tokens, answer.position)
