"""What an engine does with drafts: who may guess for a sequence, and how much of it to verify in each step.

Prompt lookup is at home here; every other guesser is a `DraftSource`, asked ahead (`Asking`). What they guess lies on buffers (`DraftBuffer`), and as
those are compared with whatever is drawn, drafts come back by themselves when the text has changed.

Law: nothing here changes a token.

Asking sources for drafts: ahead, while what they guessed last is being verified, so that their work and the way to them hide.

Law: nothing here waits, but for an answer that is due sooner than a step without it would take. What comes is checked for being token ids, and for
nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from paceline.core.clock import Clock
from paceline.core.errors import ConfigError
from paceline.core.text import printable
from paceline.engine.acceptance import Acceptance, length_ahead, lengths, likely_length
from paceline.engine.drafts import (
    AUTO,
    DRAFTS,
    FORCED,
    MODELS_DRAFT,
    NGRAM,
    OFF,
    DraftAnswer,
    DraftAsk,
    DraftBuffer,
    DraftSource,
    MoreSources,
    SequenceDrafts,
    SyncState,
)
from paceline.engine.prompt_lookup import NGramIndex
from paceline.engine.sequence import Phase, SequenceState
from paceline.engine.step_costs import StepCosts

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
        if drafts.states:
            self._live[seq.id] = seq, drafts
            self._sources |= {state.source: maker for maker, state in drafts.states.items()}
            self.ask(seq, drafts)

    def end(self, seq: SequenceState, drafts: SequenceDrafts) -> None:
        self._live.pop(seq.id, None)
        for state in drafts.states.values():
            state.source.forget(seq.id)
        asked = {state.source for _, others in self._live.values() for state in others.states.values()}
        self._sources = {source: maker for source, maker in self._sources.items() if source in asked}

    def ask(self, seq: SequenceState, drafts: SequenceDrafts, verified: int = 0) -> None:
        """Have sources go on behind what they guessed, on the guess that all of that comes true, where little of it is left.

        Args:
            verified: how many guesses, by whichever maker they have now, are being verified.
        """
        for maker in drafts.states:
            self._ask(seq, drafts, maker, verified if maker == drafts.maker else 0)

    def hear(self, waiting: DraftSource | None = None, wait_s: float = 0.0) -> None:
        """Take what sources answered, and wait for one of them."""
        for source, maker in self._sources.items():
            for answer in source.answers(wait_s if source is waiting else 0.0):
                found = self._live.get(answer.sequence)
                if found is not None and (state := found[1].states.get(maker)) is not None and state.source is source:
                    self._answered(*found, maker, answer)

    def wait_for(self, drafts: SequenceDrafts) -> bool:
        """Wait for a draft that is due soon: a later one is as good behind a step without it. Whether it did."""
        if not self._costs.known:
            return False
        for maker, state in drafts.states.items():
            usual_s = state.source.expected_s
            if state.since is None or usual_s is None:
                continue
            late_s = state.since + PATIENCE * usual_s - self._clock.monotonic()
            if late_s > 0 and usual_s < WORTH_A_WAIT * min(1.0, drafts.rates[maker].fresh) * self._costs.seconds(1):
                self.hear(state.source, late_s)
                return True
        return False

    def _ask(self, seq: SequenceState, drafts: SequenceDrafts, maker: str, verified: int) -> None:
        state, buffer = drafts.states[maker], drafts.buffers.get(maker)
        source = state.source
        if state.since is not None or source.expected_s is None:
            return
        known = len(seq.tokens)
        if known < state.pause_until:
            return
        if buffer is not None and buffer.resumes:
            buffer, verified = None, 0
        guessed = () if buffer is None else buffer.ids[known - buffer.start :]
        wanted = self._wanted(drafts.rates[maker], buffer, len(guessed), verified, source.expected_s)
        if len(guessed) - verified >= wanted:
            return
        right = min(state.right, known)
        state.end = state.right = known + len(guessed)
        state.since = self._clock.monotonic()
        state.unused += 1
        if state.unused > UNUSED:
            # Nothing of it is worth verifying, or it always comes too late: it may be the one that slows this machine down.
            state.pause_until = known + min(2 ** (state.unused - UNUSED), LONGEST_PAUSE)
        source.ask(DraftAsk(seq.id, right, [*seq.tokens[right:], *guessed], max(wanted, source.block)))

    def _wanted(self, rates: Acceptance, buffer: DraftBuffer | None, guessed: int, verified: int, usual_s: float) -> int:
        """Tokens that should lie ready: those likely to be used in a step, and those used up until more come."""
        if buffer is None:
            return min(2 + round(2 * rates.fresh), self._longest + 1)
        likely = likely_length(rates.chances(buffer.run + guessed, self._longest + 1))
        steps = usual_s / self._costs.seconds(1 + verified) if self._costs.known else 1.0
        return min(likely + ceil(steps) * (1 + verified), MOST_READY)

    def _answered(self, seq: SequenceState, drafts: SequenceDrafts, maker: str, answer: DraftAnswer) -> None:
        state, ids = drafts.states[maker], answer.token_ids
        if state.since is None or answer.position != state.end:
            return  # it goes on behind a guess that was wrong
        state.since = None
        if not ids or not all(0 <= token < self._vocabulary for token in ids):
            drafts.rates[maker].learn_fresh(0)  # so that no step waits for nothing
            return
        old, known = drafts.buffers.get(maker), len(seq.tokens)
        if old is not None and not old.resumes:
            drafts.buffers[maker] = DraftBuffer([*old.ids[known - old.start :], *ids], known, old.run, old.came_true)
        else:
            drafts.buffers[maker] = DraftBuffer(ids, answer.position, 1)
            drafts.compare_with(maker, seq.tokens, answer.position)


LOOKUP_TOKENS = 64
"""Tokens looked up at once."""
CERTAIN = 14
"""The run of what a form forces: as of a draft that came true for long."""
INDEXED = 4096
"""Tokens of prompts that are indexed in one step; about a millisecond."""


@dataclass(frozen=True, slots=True)
class DraftingConfig:
    """What an engine guesses with."""

    default: str = AUTO
    """For requests that don't say: "off", "auto", "ngram", or a key of `sources`."""
    sources: Mapping[str, DraftSource] = field(default_factory=dict[str, DraftSource])
    """Those of "auto", beside prompt lookup, which is always there. Closed by their maker."""
    more: MoreSources | None = None
    """For requests that name another."""
    longest: int = 15
    """Tokens of one sequence verified in one step. Raising it: more of a step may be wasted, where costs are not yet known."""

    def __post_init__(self) -> None:
        """Raises ConfigError: nothing of the default's name drafts."""
        if self.default not in {*DRAFTS, *self.sources}:
            there = ", ".join((*DRAFTS, *self.sources))
            raise ConfigError(f"nobody drafts with {printable(self.default, 200)!r}", f"There are: {there}.")


class Drafting:
    """All drafts of one engine.

    Args:
        config: None: there are none, whatever requests say: a backend gives other bytes for other batches, say.
        vocabulary: token ids below this are tokens.
        clock: for how long an answer of a source is due.
    """

    def __init__(self, config: DraftingConfig | None, vocabulary: int, costs: StepCosts, clock: Clock) -> None:
        self._never = config is None
        self._config = config = config or DraftingConfig(OFF)
        self._makers = (NGRAM, *config.sources)
        self._common: defaultdict[str, Acceptance] = defaultdict(Acceptance)
        self._costs = costs
        self._asking = Asking(config.longest, vocabulary, costs, clock)
        self._of: dict[SequenceState, SequenceDrafts] = {}
        self._lagging: dict[SequenceState, NGramIndex] = {}
        """Sequences whose tokens are not all indexed."""
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()

    @property
    def compared(self) -> dict[str, tuple[int, int]]:
        """By maker: guessed tokens that were held against what was drawn, and those of them that came true."""
        return {maker: (rates.compared, rates.came_true) for maker, rates in tuple(self._common.items())}

    @property
    def names(self) -> Collection[str]:
        """What a request may name beyond `DRAFTS`."""
        more = self._config.more
        return self._config.sources.keys() if more is None else {*self._config.sources, *more.names()}

    # ------------------------------------------------------------------------------------------------------- sequences come and go

    def begin(self, seq: SequenceState) -> None:
        chosen = seq.request.draft or self._config.default
        if self._never or chosen == OFF or seq.guesses_left < 1:
            return
        makers = self._makers if chosen == AUTO else (chosen,)
        if not seq.request.allows(MODELS_DRAFT):
            makers = tuple(maker for maker in makers if maker == NGRAM)
        index = NGramIndex() if NGRAM in makers else None
        forced = () if seq.draws.matcher is None else (FORCED,)
        rates = {maker: Acceptance(self._common[maker]) for maker in (*makers, *forced)}
        states = {maker: SyncState(source) for maker in makers if maker != NGRAM and (source := self._source(maker, seq)) is not None}
        drafts = self._of[seq] = SequenceDrafts(rates, index, states)
        if index is not None:
            self._lagging[seq] = index
        self._asking.begin(seq, drafts)

    def end(self, seq: SequenceState) -> None:
        drafts = self._of.pop(seq, None)
        if drafts is not None:
            self._lagging.pop(seq, None)
            self._asking.end(seq, drafts)

    # ------------------------------------------------------------------------------------------------------------------- each step

    def plan(self, sequences: Sequence[SequenceState], rooms: Sequence[int], most: int) -> Sequence[Sequence[int]]:
        """What to verify of each sequence behind its last known token. Most times, and for most, nothing.

        Args:
            sequences: none in flight; a row of each is run anyway.
            rooms: guessed tokens of each, at most.
            most: guessed tokens of all.
        """
        if self._lagging:
            self._index()
        if not self._of or not sequences:
            return [()] * len(sequences)
        self._asking.hear()
        found = [self._best(seq) for seq in sequences]
        if len(sequences) == 1 and rooms[0] and self._waited(sequences[0], found[0]):
            found = [self._best(sequences[0])]
        longest = self._config.longest
        chances: list[Sequence[float]] = []
        for seq, maker, room in zip(sequences, found, rooms, strict=True):
            chances.append(() if maker is None else self._of[seq].chances(maker, len(seq.tokens), min(longest, room)))
        wanted = lengths(chances, self._costs.seconds, most) if any(chances) else [0] * len(sequences)
        return [self._taken(seq, maker, n) for seq, maker, n in zip(sequences, found, wanted, strict=True)]

    def plan_ahead(self, seq: SequenceState, room: int) -> Sequence[int]:
        """What to run behind the last row of a sequence that is in flight, in a pipeline that has nothing else to do: `room` tokens at most."""
        drafts = self._of.get(seq)
        if drafts is None:
            return ()
        self._asking.hear()
        # A guess on a guess is by the same maker.
        maker, done = drafts.maker if seq.guess else self._best(seq), len(seq.guess)
        if maker is None or maker not in drafts.buffers:
            return ()
        chances = drafts.chances(maker, len(seq.tokens), done + min(self._config.longest, room))
        certain = prod(chances[:done])
        return self._taken(seq, maker, length_ahead(certain, chances[done:], self._costs.seconds))

    def sent(self, seq: SequenceState, n: int) -> None:
        """So many guessed tokens of a sequence are on their way to be verified."""
        maker = self._of[seq].maker
        self.drafted[maker] += n
        self.blocks[maker] += 1

    def took(self, seq: SequenceState, n: int, accepted: int) -> None:
        """A sequence gained its last `n` tokens, and `accepted` guesses of it were right."""
        drafts = self._of.get(seq)
        if drafts is not None:
            if accepted:
                self.accepted[drafts.maker] += accepted
            drafts.compare(seq.tokens, len(seq.tokens) - n)

    # -------------------------------------------------------------------------------------------------------------------- inside

    def _source(self, name: str, seq: SequenceState) -> DraftSource | None:
        """Beside prompt lookup."""
        config = self._config
        return config.sources.get(name) or (None if config.more is None else config.more.find(name, seq.id))

    def _best(self, seq: SequenceState) -> str | None:
        """The maker likeliest to know the next token."""
        drafts = self._of.get(seq)
        if drafts is None:
            return None
        index, matcher = drafts.index, seq.draws.matcher
        if matcher is not None and FORCED not in drafts.buffers and (forced := matcher.forced()):
            drafts.buffers[FORCED] = DraftBuffer(forced, len(seq.tokens), CERTAIN)
        if index is not None and NGRAM not in drafts.buffers and seq not in self._lagging:
            index.extend(seq.tokens[len(index.ids) :])
            if index.matched:
                drafts.buffers[NGRAM] = DraftBuffer(index.propose(LOOKUP_TOKENS), len(seq.tokens), index.matched)
        return drafts.best()

    def _waited(self, seq: SequenceState, maker: str | None) -> bool:
        """Whether something came that was worth a wait, as no buffer had a good guess."""
        drafts = self._of.get(seq)
        if drafts is None or not (maker is None or drafts.buffers[maker].resumes):
            return False
        self._asking.ask(seq, drafts)
        return self._asking.wait_for(drafts)

    def _taken(self, seq: SequenceState, maker: str | None, n: int) -> Sequence[int]:
        """The next n tokens of a maker's buffer, behind what is guessed already; and sources are asked to go on."""
        drafts = self._of.get(seq)
        if drafts is None:
            return ()
        draft: Sequence[int] = ()
        if maker is not None and n:
            buffer = drafts.buffers[maker]
            start = len(seq.tokens) + len(seq.guess) - buffer.start
            draft = buffer.ids[start : start + n]
            drafts.maker = maker
            if maker in drafts.states:
                drafts.states[maker].unused = 0
        self._asking.ask(seq, drafts, len(seq.guess) + len(draft))
        return draft

    def _index(self) -> None:
        """Some of the prompts that came, so that long ones hold up no answer."""
        budget = INDEXED
        while budget:
            # Those that wait may do so for long, and many may.
            found = next((one for one in self._lagging.items() if one[0].phase is not Phase.WAITING), None)
            if found is None:
                return
            seq, index = found
            more = seq.tokens[len(index.ids) : len(index.ids) + budget]
            index.extend(more)
            budget -= len(more)
            if len(index.ids) == len(seq.tokens):
                del self._lagging[seq]
