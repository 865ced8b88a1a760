"""What an engine knows of drafts: who may guess for a sequence, what they guessed, and how much of it to verify.

Each maker of drafts has a *tape* a sequence: tokens for the next positions. Whatever is drawn is compared with all tapes, verified or not, so
it is known at any time how well each would do, and drafts come back by themselves when the text has changed.

Laws:
- Nothing here changes a token. What comes from elsewhere is checked for being token ids, and for nothing else.
- Nothing here waits, but for an answer that is due within less time than it promises to save.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from paceline.core.clock import Clock
from paceline.core.errors import ConfigError
from paceline.core.ids import BatchId
from paceline.core.shown import printable
from paceline.engine.acceptance import Acceptance, length_ahead, lengths, likely_length
from paceline.engine.drafts import AUTO, DRAFTS, NGRAM, OFF, DraftAnswer, DraftAsk, DraftSource
from paceline.engine.executor import StepBatch
from paceline.engine.prompt_lookup import NGramIndex
from paceline.engine.sequence import SequenceState
from paceline.engine.step_costs import StepCosts

TAPE = 64
"""Tokens looked up at once."""
PATIENCE = 1.5
"""Times the usual wait for an answer. Raising it: a late one is waited for longer, for nothing if it does not come."""
WORTH_A_WAIT = 0.5
"""Of a step's time: how long an answer may take to be waited for. Raising it: more is won where it is right, and lost where it is wrong."""
INDEXED = 4096
"""Tokens of prompts that are indexed in one step; about a millisecond."""


@dataclass(frozen=True, slots=True)
class DraftingConfig:
    """What an engine guesses with."""

    default: str = AUTO
    """For requests that don't say: "off", "auto", "ngram", or a key of `sources`."""
    sources: Mapping[str, DraftSource] = field(default_factory=dict[str, DraftSource])
    """Beside prompt lookup, which is always there. Closed by whoever made them."""
    longest: int = 15
    """Tokens of one sequence verified in one step. Raising it: more of a step may be wasted, where costs are not yet known."""

    def __post_init__(self) -> None:
        """Raises ConfigError: nothing of the default's name drafts."""
        if self.default not in {*DRAFTS, *self.sources}:
            there = ", ".join((*DRAFTS, *self.sources))
            raise ConfigError(f"nobody proposes with {printable(self.default, 200)!r}", f"There are: {there}.")


@dataclass(slots=True)
class _Tape:
    """What one maker guesses."""

    ids: Sequence[int]
    start: int
    """Position of the first."""
    run: int
    """See `acceptance`."""
    came_true: int = 0
    resumes: bool = False
    """It was wrong, and goes on behind the wrong token: for want of a better one, which takes its place."""


@dataclass(slots=True)
class _Asked:
    """What a source was told of a sequence."""

    right: int = 0
    """Leading tokens that it knows and that are still right."""
    told: int = 0
    """Tokens it knows."""
    since: float | None = None
    """When it was asked what it has not answered; None: it has."""


@dataclass(slots=True)
class _Drafts:
    """Of one sequence."""

    makers: Sequence[str]
    rates: Mapping[str, Acceptance]
    index: NGramIndex | None
    tapes: dict[str, _Tape] = field(default_factory=dict[str, _Tape])
    asked: dict[str, _Asked] = field(default_factory=dict[str, _Asked])
    maker: str = NGRAM
    """Of what is in flight."""


class Drafting:
    """All drafts of one engine.

    Args:
        config: None: there are none.
        vocabulary: token ids below this are tokens.
        clock: for what steps take.
    """

    def __init__(self, config: DraftingConfig | None, vocabulary: int, clock: Clock) -> None:
        self._config = config or DraftingConfig(OFF)
        self._vocabulary, self._clock = vocabulary, clock
        self._makers = (NGRAM, *self._config.sources)
        self._common = {maker: Acceptance() for maker in self._makers}
        self._of: dict[SequenceState, _Drafts] = {}
        self._ids: dict[int, SequenceState] = {}
        self._lagging: dict[SequenceState, None] = {}
        self._costs = StepCosts()
        self._flying: deque[tuple[BatchId, int, float]] = deque()
        """Batches in flight, their rows (0: not to be measured), and when they were submitted."""
        self._collected_at = 0.0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()

    @property
    def models(self) -> Collection[str]:
        """Ids of the draft models there are."""
        return self._config.sources.keys()

    # ------------------------------------------------------------------------------------------------------- sequences come and go

    def begin(self, seq: SequenceState) -> None:
        """A sequence will be generated."""
        chosen = seq.request.draft or self._config.default
        if chosen == OFF or seq.request.max_tokens < 2:
            return
        makers = self._makers if chosen == AUTO else (chosen,)
        looks_up = NGRAM in makers
        rates = {maker: Acceptance(self._common[maker]) for maker in makers}
        drafts = self._of[seq] = _Drafts(makers, rates, NGramIndex() if looks_up else None)
        if looks_up:
            self._lagging[seq] = None
        self._ids[seq.id] = seq
        drafts.asked = {maker: _Asked() for maker in makers if maker != NGRAM}
        for maker in drafts.asked:
            self._ask(seq, drafts, maker, 0)

    def end(self, seq: SequenceState) -> None:
        """A sequence is over."""
        drafts = self._of.pop(seq, None)
        if drafts is None:
            return
        self._lagging.pop(seq, None)
        del self._ids[seq.id]
        for maker in drafts.asked:
            self._config.sources[maker].forget(seq.id)

    # ------------------------------------------------------------------------------------------------------------------- each step

    def plan(self, sequences: Sequence[SequenceState], most: int) -> Sequence[Sequence[int]]:
        """What to verify of each sequence behind its last known token. Most times, and for most, nothing.

        Args:
            sequences: none in flight; a row of each is run anyway.
            most: guessed tokens of all.
        """
        if not self._of or not sequences:
            return [()] * len(sequences)
        self._index()
        self._hear()
        found = [self._best(seq) for seq in sequences]
        if len(sequences) == 1 and self._lacks(sequences[0], found[0]):
            self._ask_all(sequences[0])
            if self._wait_for(sequences[0]):
                found = [self._best(sequences[0])]
        chances: list[Sequence[float]] = []
        for seq, maker in zip(sequences, found, strict=True):
            chances.append(() if maker is None else self._chances(seq, maker))
        wanted = lengths(chances, self._costs.seconds, most) if any(chances) else [0] * len(sequences)
        return [self._taken(seq, maker, n) for seq, maker, n in zip(sequences, found, wanted, strict=True)]

    def plan_ahead(self, seq: SequenceState) -> Sequence[int]:
        """What to run behind the last row of a sequence that is in flight, in a pipeline that has nothing else to do."""
        drafts = self._of.get(seq)
        if drafts is None:
            return ()
        self._hear()
        # A guess on a guess is by the same maker.
        maker, done = drafts.maker if seq.guess else self._best(seq), len(seq.guess)
        if maker is None or maker not in drafts.tapes:
            return ()
        chances = self._chances(seq, maker, done + self._config.longest)
        certain = prod(chances[:done])
        return self._taken(seq, maker, length_ahead(certain, chances[done:], self._costs.seconds))

    def sent(self, seq: SequenceState, n: int) -> None:
        """So many guessed tokens of a sequence are on their way to be verified."""
        maker = self._of[seq].maker
        self.drafted[maker] += n
        self.blocks[maker] += 1

    def submitted(self, batch: StepBatch, *, decodes: bool) -> None:
        """A batch is about to be run."""
        rows = sum(len(step.token_ids) for step in batch.steps) if decodes else 0
        self._flying.append((batch.batch_id, rows, self._clock.monotonic()))

    def collected(self) -> None:
        """The oldest batch was run."""
        now = self._clock.monotonic()
        _, rows, submitted_at = self._flying.popleft()
        if rows and self._of:
            # In a pipeline that is kept busy, a batch costs what it adds.
            self._costs.took(rows, now - max(submitted_at, self._collected_at))
        self._collected_at = now

    def lost(self) -> None:
        """All batches in flight are."""
        self._flying.clear()

    def took(self, seq: SequenceState, n: int, accepted: int) -> None:
        """A sequence gained its last `n` tokens, and `accepted` guesses of it were right."""
        drafts = self._of.get(seq)
        if drafts is None:
            return
        if accepted:
            self.accepted[drafts.maker] += accepted
        for maker, tape in tuple(drafts.tapes.items()):
            self._compare(drafts, maker, tape, seq.tokens, len(seq.tokens) - n)

    # -------------------------------------------------------------------------------------------------------------------- inside

    def _compare(self, drafts: _Drafts, maker: str, tape: _Tape, tokens: Sequence[int], start: int) -> None:
        """Learn from the tokens known since position `start`; drop a tape that was wrong, or is used up."""
        rates = drafts.rates[maker]
        for position in range(max(start, tape.start), len(tokens)):
            place = position - tape.start
            if place >= len(tape.ids):
                break
            right = tape.ids[place] == tokens[position]
            rates.learn(tape.run, right)
            if not right:
                del drafts.tapes[maker]
                if not tape.resumes:
                    rates.learn_fresh(tape.came_true)
                asked = drafts.asked.get(maker)
                if asked is not None:
                    if position < asked.told:
                        # What it was asked to go on behind is wrong.
                        asked.right, asked.since = min(asked.right, position), None
                    if tape.came_true and place + 1 < len(tape.ids):
                        # One token replaced by another: until the source has said more, this is the best guess.
                        drafts.tapes[maker] = _Tape(tape.ids[place + 1 :], position + 1, 0, resumes=True)
                return
            tape.run += 1
            tape.came_true += 1
        if tape.start + len(tape.ids) <= len(tokens):
            del drafts.tapes[maker]
            rates.learn_fresh(tape.came_true)

    def _best(self, seq: SequenceState) -> str | None:
        """Who is likeliest to know the next token."""
        drafts = self._of.get(seq)
        if drafts is None:
            return None
        if drafts.index is not None and NGRAM not in drafts.tapes and seq not in self._lagging:
            self._look_up(seq, drafts, drafts.index)
        tapes, rates = drafts.tapes, drafts.rates
        return max(tapes, key=lambda maker: rates[maker].chances(tapes[maker].run, 1)[0], default=None)

    def _chances(self, seq: SequenceState, maker: str, most: int | None = None) -> Sequence[float]:
        """Of what a maker guesses behind the known tokens."""
        drafts = self._of[seq]
        tape = drafts.tapes[maker]
        n = tape.start + len(tape.ids) - len(seq.tokens)
        return drafts.rates[maker].chances(tape.run, min(n, most or self._config.longest))

    def _taken(self, seq: SequenceState, maker: str | None, n: int) -> Sequence[int]:
        """The next n tokens of a maker's tape, behind what is guessed already; and sources are asked to go on."""
        drafts = self._of.get(seq)
        if drafts is None:
            return ()
        draft: Sequence[int] = ()
        if maker is not None and n:
            tape = drafts.tapes[maker]
            start = len(seq.tokens) + len(seq.guess) - tape.start
            draft = tape.ids[start : start + n]
            drafts.maker = maker
        self._ask_all(seq, len(seq.guess) + len(draft))
        return draft

    def _look_up(self, seq: SequenceState, drafts: _Drafts, index: NGramIndex) -> None:
        index.extend(seq.tokens[len(index.ids) :])
        if index.matched:
            drafts.tapes[NGRAM] = _Tape(index.propose(TAPE), len(seq.tokens), index.matched)

    def _index(self) -> None:
        """Some of the prompts that came, so that long ones hold up nobody."""
        budget = INDEXED
        while self._lagging and budget:
            seq = next(iter(self._lagging))
            index = self._of[seq].index
            assert index is not None, "a sequence lags that looks nothing up"
            more = seq.tokens[len(index.ids) : len(index.ids) + budget]
            index.extend(more)
            budget -= len(more)
            if len(index.ids) == len(seq.tokens):
                del self._lagging[seq]

    # -------------------------------------------------------------------------------------------------------------------- sources

    def _ask_all(self, seq: SequenceState, verified: int = 0) -> None:
        """See `_ask`.

        Args:
            seq: whose tokens.
            verified: how many guesses, by whoever makes them now, are being verified.
        """
        drafts = self._of.get(seq)
        if drafts is not None:
            for maker in drafts.asked:
                self._ask(seq, drafts, maker, verified if maker == drafts.maker else 0)

    def _ask(self, seq: SequenceState, drafts: _Drafts, maker: str, verified: int) -> None:
        """Have a source go on behind what it guessed, on the guess that all of that comes true, where little of it is left.

        Args:
            seq: whose tokens.
            drafts: of that sequence.
            maker: the source's name.
            verified: how many of its tokens are being verified.
        """
        source, asked, tape = self._config.sources[maker], drafts.asked[maker], drafts.tapes.get(maker)
        if asked.since is not None or source.expected_s is None:
            return
        known = len(seq.tokens)
        if tape is not None and tape.resumes:
            tape, verified = None, 0
        guessed = () if tape is None else tape.ids[known - tape.start :]
        wanted = self._wanted(drafts.rates[maker], tape, len(guessed), verified, source.expected_s)
        if len(guessed) - verified >= wanted:
            return
        right = min(asked.right, known)
        asked.told = asked.right = known + len(guessed)
        asked.since = self._clock.monotonic()
        source.ask(DraftAsk(seq.id, right, [*seq.tokens[right:], *guessed], max(wanted, source.block)))

    def _wanted(self, rates: Acceptance, tape: _Tape | None, guessed: int, verified: int, usual_s: float) -> int:
        """Tokens that should lie ready: those likely to be used in a step, and those used up until more come."""
        if tape is None:
            return min(2 + round(2 * rates.fresh), self._config.longest + 1)
        likely = likely_length(rates.chances(tape.run + guessed, self._config.longest + 1))
        steps = usual_s / self._costs.seconds(1 + verified) if self._costs.known else 1.0
        return min(likely + ceil(steps) * (1 + verified), TAPE)

    def _hear(self, waiting: str | None = None, wait_s: float = 0.0) -> None:
        """Take what sources answered, and wait for one of them."""
        for maker, source in self._config.sources.items():
            for answer in source.answers(wait_s if maker == waiting else 0.0):
                seq = self._ids.get(answer.sequence)
                if seq is not None and maker in self._of[seq].asked:
                    self._answered(seq, self._of[seq], maker, answer)

    def _answered(self, seq: SequenceState, drafts: _Drafts, maker: str, answer: DraftAnswer) -> None:
        asked, ids = drafts.asked[maker], answer.token_ids
        if asked.since is None or answer.position != asked.told:
            return  # it goes on behind a guess that was wrong
        asked.since = None
        if not ids or not all(0 <= token < self._vocabulary for token in ids):
            return
        old = drafts.tapes.get(maker)
        if old is not None and not old.resumes:
            drafts.tapes[maker] = _Tape([*old.ids, *ids], old.start, old.run)
        else:
            tape = drafts.tapes[maker] = _Tape(ids, answer.position, 1)
            self._compare(drafts, maker, tape, seq.tokens, answer.position)

    def _lacks(self, seq: SequenceState, maker: str | None) -> bool:
        """Whether nobody has a good guess for a sequence."""
        drafts = self._of.get(seq)
        return drafts is not None and (maker is None or drafts.tapes[maker].resumes)

    def _wait_for(self, seq: SequenceState) -> bool:
        """Wait for a draft that is due sooner than a step without it would take; later ones are as good behind that step. Whether it did."""
        drafts = self._of.get(seq)
        if drafts is None or not self._costs.known:
            return False
        for maker, asked in drafts.asked.items():
            usual_s = self._config.sources[maker].expected_s
            if asked.since is None or usual_s is None:
                continue
            late_s = asked.since + PATIENCE * usual_s - self._clock.monotonic()
            if late_s > 0 and usual_s < WORTH_A_WAIT * min(1.0, drafts.rates[maker].fresh) * self._costs.seconds(1):
                self._hear(maker, late_s)
                return True
        return False
