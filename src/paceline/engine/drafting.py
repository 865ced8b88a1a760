"""The engine's use of drafts: which sources may draft for a sequence, and how much to verify in each step.

Prompt lookup runs here; every other source is a `DraftSource`, asked ahead by `Asking`. Draft tokens are kept in buffers (`DraftBuffer`). Every buffer is
compared with all drawn tokens, so drafting resumes automatically when the text becomes predictable again.

Sources are asked for the next draft while their last one is being verified, which hides their work and the network's latency.

Laws:
- Nothing here changes a token.
- Nothing here waits, except for an answer that is due sooner than a step without it would take. Answers are checked for valid token ids only.
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
"""Maximum draft tokens held ready beyond those being verified. Raising it: a slow source keeps up; more tokens are drafted in vain where one is wrong."""
PATIENCE = 1.5
"""How long an answer is waited for, as a multiple of its usual time. Raising it: a late answer is waited for longer, for nothing if it does not come."""
UNUSED = 8
"""Unused drafts in a row before a source is asked less often. Raising it: a source that never helps costs more; one that begins to help is found sooner."""
LONGEST_PAUSE = 16
"""Tokens between two requests to a source that never helps, at most. Raising it: such a source costs less, and is found later once it helps."""
WORTH_A_WAIT = 0.25
"""Longest usual time of an answer that is waited for, as a share of a step. Raising it: more is won where the draft is right, more lost where it is wrong."""


class Asking:
    """All draft requests of one engine.

    Args:
        longest: tokens of one sequence verified in one step, at most.
        vocabulary: token ids below this are valid.
        clock: measures how long an answer has been due.
    """

    def __init__(self, longest: int, vocabulary: int, costs: StepCosts, clock: Clock) -> None:
        self._longest, self._vocabulary = longest, vocabulary
        self._costs, self._clock = costs, clock
        self._live: dict[int, tuple[SequenceState, SequenceDrafts]] = {}
        self._sources: dict[DraftSource, str] = {}
        """Names of the sources of live sequences."""

    def begin(self, seq: SequenceState, drafts: SequenceDrafts) -> None:
        """Register a sequence; its sources may read its prompt at once."""
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
        """Ask sources to continue their drafts, assuming that all of the draft so far is right. Sources with enough tokens ready are left alone.

        Args:
            verified: number of draft tokens of the current maker that are being verified.
        """
        for maker in drafts.states:
            self._ask(seq, drafts, maker, verified if maker == drafts.maker else 0)

    def hear(self, waiting: DraftSource | None = None, wait_s: float = 0.0) -> None:
        """Take the answers of all sources. Wait up to `wait_s` seconds for an answer of `waiting`."""
        for source, maker in self._sources.items():
            for answer in source.answers(wait_s if source is waiting else 0.0):
                found = self._live.get(answer.sequence)
                if found is not None and (state := found[1].states.get(maker)) is not None and state.source is source:
                    self._answered(*found, maker, answer)

    def wait_for(self, drafts: SequenceDrafts) -> bool:
        """Wait for a draft that is due soon. A later one is not worth it: it can follow a step that runs without it.

        Returns:
            Whether it waited.
        """
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
            # None of its drafts is worth verifying, or they come too late: this source may be the one that slows the machine down.
            state.pause_until = known + min(2 ** (state.unused - UNUSED), LONGEST_PAUSE)
        source.ask(DraftAsk(seq.id, right, [*seq.tokens[right:], *guessed], max(wanted, source.block)))

    def _wanted(self, rates: Acceptance, buffer: DraftBuffer | None, guessed: int, verified: int, usual_s: float) -> int:
        """Return how many tokens should be ready: those likely to be used in a step, and those used up until the next answer."""
        if buffer is None:
            return min(2 + round(2 * rates.fresh), self._longest + 1)
        likely = likely_length(rates.chances(buffer.run + guessed, self._longest + 1))
        steps = usual_s / self._costs.seconds(1 + verified) if self._costs.known else 1.0
        return min(likely + ceil(steps) * (1 + verified), MOST_READY)

    def _answered(self, seq: SequenceState, drafts: SequenceDrafts, maker: str, answer: DraftAnswer) -> None:
        state, ids = drafts.states[maker], answer.token_ids
        if state.since is None or answer.position != state.end:
            return  # the answer continues a wrong guess
        state.since = None
        if not ids or not all(0 <= token < self._vocabulary for token in ids):
            drafts.rates[maker].learn_fresh(0)  # so that no step waits in vain
            return
        old, known = drafts.buffers.get(maker), len(seq.tokens)
        if old is not None and not old.resumes:
            drafts.buffers[maker] = DraftBuffer([*old.ids[known - old.start :], *ids], known, old.run, old.came_true)
        else:
            drafts.buffers[maker] = DraftBuffer(ids, answer.position, 1)
            drafts.compare_with(maker, seq.tokens, answer.position)


LOOKUP_TOKENS = 64
"""Tokens taken from prompt lookup at once."""
CERTAIN = 14
"""The run of tokens forced by a grammar, as of a draft with a long accepted run."""
INDEXED = 4096
"""Prompt tokens indexed in one step; about a millisecond. Raising it: prompts are ready for lookup sooner, and each step pauses for longer."""


@dataclass(frozen=True, slots=True)
class DraftingConfig:
    """The sources of draft tokens of an engine."""

    default: str = AUTO
    """Source for requests that don't name one: "off", "auto", "ngram", or a key of `sources`."""
    sources: Mapping[str, DraftSource] = field(default_factory=dict[str, DraftSource])
    """Sources that "auto" uses in addition to prompt lookup. Their creator closes them."""
    more: MoreSources | None = None
    """Finds sources for requests that name another draft model; None: there are no more."""
    longest: int = 15
    """Draft tokens of one sequence verified in one step, at most. Raising it: more of a step may be wasted while costs are not yet known."""

    def __post_init__(self) -> None:
        """Check the default.

        Raises:
            ConfigError: the named source does not exist.
        """
        if self.default not in {*DRAFTS, *self.sources}:
            there = ", ".join((*DRAFTS, *self.sources))
            raise ConfigError(f"No node drafts with {printable(self.default, 200)!r}", f"There are: {there}.")


class Drafting:
    """All drafts of one engine.

    Args:
        config: None: drafting is off, whatever requests say, for example because a backend gives other bytes for other batches.
        vocabulary: token ids below this are valid.
        costs: cost of a step by its rows.
        clock: measures how long a source's answer has been due.
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
        """Sequences with tokens that are not indexed yet."""
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()

    @property
    def compared(self) -> dict[str, tuple[int, int]]:
        """By maker: draft tokens compared with drawn tokens, and how many were right."""
        return {maker: (rates.compared, rates.came_true) for maker, rates in tuple(self._common.items())}

    @property
    def names(self) -> Collection[str]:
        """Names that a request's `draft` may use in addition to `DRAFTS`."""
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
        """Return the draft tokens to verify for each sequence after its last known token. Mostly, and for most sequences, none.

        Args:
            sequences: sequences that are not in flight; a row of each runs anyway.
            rooms: maximum draft tokens of each sequence.
            most: maximum draft tokens of all sequences.
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
        """Return up to `room` draft tokens to run after the last row of a sequence in flight, in a pipeline that has nothing else to do."""
        drafts = self._of.get(seq)
        if drafts is None:
            return ()
        self._asking.hear()
        # A guess on a guess must come from the same maker.
        maker, done = drafts.maker if seq.guess else self._best(seq), len(seq.guess)
        if maker is None or maker not in drafts.buffers:
            return ()
        chances = drafts.chances(maker, len(seq.tokens), done + min(self._config.longest, room))
        certain = prod(chances[:done])
        return self._taken(seq, maker, length_ahead(certain, chances[done:], self._costs.seconds))

    def sent(self, seq: SequenceState, n: int) -> None:
        """Count n draft tokens of a sequence that were sent to be verified."""
        maker = self._of[seq].maker
        self.drafted[maker] += n
        self.blocks[maker] += 1

    def took(self, seq: SequenceState, n: int, accepted: int) -> None:
        """Learn from the last `n` tokens that a sequence gained, of which `accepted` came from a draft."""
        drafts = self._of.get(seq)
        if drafts is not None:
            if accepted:
                self.accepted[drafts.maker] += accepted
            drafts.compare(seq.tokens, len(seq.tokens) - n)

    # -------------------------------------------------------------------------------------------------------------------- inside

    def _source(self, name: str, seq: SequenceState) -> DraftSource | None:
        """Return the named source, other than prompt lookup, if it exists."""
        config = self._config
        return config.sources.get(name) or (None if config.more is None else config.more.find(name, seq.id))

    def _best(self, seq: SequenceState) -> str | None:
        """Return the maker most likely to know the next token."""
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
        """Wait for a draft if no buffer has a good guess and one is due soon. Returns whether it waited."""
        drafts = self._of.get(seq)
        if drafts is None or not (maker is None or drafts.buffers[maker].resumes):
            return False
        self._asking.ask(seq, drafts)
        return self._asking.wait_for(drafts)

    def _taken(self, seq: SequenceState, maker: str | None, n: int) -> Sequence[int]:
        """Return the next n tokens of a maker's buffer, after those in flight, and ask sources to continue."""
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
        """Index up to `INDEXED` tokens of new prompts, so that a long prompt delays no answer."""
        budget = INDEXED
        while budget:
            # Waiting sequences may be many, and may wait for long.
            found = next((one for one in self._lagging.items() if one[0].phase is not Phase.WAITING), None)
            if found is None:
                return
            seq, index = found
            more = seq.tokens[len(index.ids) : len(index.ids) + budget]
            index.extend(more)
            budget -= len(more)
            if len(index.ids) == len(seq.tokens):
                del self._lagging[seq]
