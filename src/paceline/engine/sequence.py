"""One generated sequence: its tokens, how many are computed, the blocks that hold them, its text, and the changes by each batch.

The scheduler owns the state of rows and blocks; the engine owns the tokens, the draw state and the text.

Laws:
- However the tokens are cut, the emitted text is the decoded text up to the first stop string (the one that is complete first; of two complete at once, the
  longer). Text that may yet belong to a stop string is not emitted, nor half a character.
- A token is the draw of its own (seed, position). A draft token decides only whether the row after it counts.
- A prompt token is scored as a draw that can only fall on it. So the sampler that draws answers reports its log probability, with the same bytes as for a drawn
  token. The row before a token scores it, so the first token has no score.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from paceline.core.errors import DrawFailed, FormFailed, InvalidRequest
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from paceline.core.ids import BlockId, NodeId, SequenceId
from paceline.core.text import Vocabulary
from paceline.engine.executor import SequenceStep, StepBatch
from paceline.engine.sampling import TOO_COMPLEX, Drawn, DrawRow, DrawState
from paceline.engine.step_costs import StepLoad

if TYPE_CHECKING:
    from paceline.engine.kv_fetch import KvFetch
    from paceline.engine.matcher import Matcher


class TextStream:
    """The text of one sequence, decoded token by token and cut at stop strings."""

    __slots__ = ("_decode", "_held", "_n_undecoded", "_stop", "_token_bytes", "n_cut", "stopped", "stopped_by")

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()) -> None:
        """Start empty. Empty stop strings are ignored."""
        self._token_bytes = vocabulary.token_bytes
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode, self._n_undecoded = decoder.decode, lambda: len(decoder.getstate()[0])
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False
        """A stop string was found; the text is over."""
        self.stopped_by: str | None = None
        """The stop string that was found."""
        self.n_cut = 0
        """Bytes from the start of the stop string on, which are not part of the text."""

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that is now certain."""
        text = self._decode(self._token_bytes(token_id))
        return self._pass_on(text) if self._stop else text

    def flush(self) -> str:
        """Return the rest at the end of the sequence. Half a character becomes U+FFFD."""
        text = self._decode(b"", final=True)
        if not self._stop:
            return text
        text = self._pass_on(text)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _pass_on(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.stopped_by = min(ends)
            self.stopped = True
            self._held = ""
            self.n_cut = len(text[at:].encode()) + self._n_undecoded()
            return text[:at]
        kept = len(text) - max(overlap(text, stop) for stop in self._stop)
        self._held = text[kept:]
        return text[:kept]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Phase(Enum):
    """Lifecycle of a sequence. Running and waiting alternate when it is preempted; ended is final."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class BlockCheck:
    """Blocks from a peer that are computed again before the sequence goes on. Each is set aside while another block takes its place."""

    alike: Callable[[Sequence[BlockId]], KvFetch]
    places: Sequence[int]
    """Indices in the sequence's table of the blocks still to be checked."""
    resume: int
    """Number of computed tokens once the check is over."""
    place: int
    aside: BlockId
    stop: int
    """Number of tokens up to the end of the block that is computed again."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """A live sequence. Compared by identity."""

    id: SequenceId
    """Unique id; ids also give the order of arrival."""
    request: GenerationRequest
    index: int
    """Index among the request's sequences."""
    draws: DrawState
    text: TextStream
    stop_ids: frozenset[int]
    """Tokens that end the sequence."""
    tokens: list[int] = field(init=False)
    """Tokens of prompt and answer."""
    n_prompt: int = field(init=False)
    most_tokens: int = 0
    """Maximum tokens of prompt and answer, by the request and by the KV memory there is now."""
    phase: Phase = Phase.WAITING
    passed: int = 0
    """Number of later sequences that were admitted before this one."""
    epoch: int = 0
    computed: int = 0
    """Tokens, draft tokens included, with submitted rows. If the sequence is not in flight, their rows were collected too."""
    guess: list[int] = field(default_factory=list[int])
    """Draft tokens after the known ones, with submitted rows. Empty if nothing is in flight."""
    flights: int = 0
    """Number of batches in flight with rows of this sequence."""
    void: int = 0
    """How many of these batches, from the first on, run on a wrong guess."""
    preempt_when_collected: bool = False
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    n_sent: int = 0
    """Number of the table's blocks that the executor has."""
    is_settled: bool = False
    """A batch with the sequence's table was collected, so every part of the executor has a table."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Keys of the full blocks; empty without a prefix cache."""
    n_published: int = 0
    """Leading blocks that were offered to the prefix cache or came from it."""
    n_publishable: int = 0
    """Leading blocks that may ever be offered; 0 without a prefix cache."""
    n_scored: int = 1
    """Leading prompt tokens that need no score any more. The first token never has one."""
    givers: frozenset[NodeId] = frozenset()
    """Peers that sent blocks which the sequence depends on."""
    distrusted: bool = False
    """One of these peers sent wrong KV: the sequence must run again, and none of its blocks are shared."""
    check: BlockCheck | None = None
    cached_tokens: int | None = None
    """Prompt tokens the prefix cache held when the sequence was first admitted; None until then."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.n_prompt = len(self.tokens)

    @property
    def is_scored(self) -> bool:
        """True if no prompt token waits for its log probability."""
        return not self.request.scores_prompt or self.n_scored >= self.n_prompt

    @property
    def ends_with_prompt(self) -> bool:
        """True if no token is to be drawn."""
        return self.request.max_tokens == 0

    @property
    def turn(self) -> tuple[bool, SequenceId]:
        """Sort key among waiting sequences: those of other nodes come last, until they have begun."""
        return bool(self.request.caller) and self.cached_tokens is None, self.id

    @property
    def is_live(self) -> bool:
        return self.phase is not Phase.ENDED

    @property
    def is_awaited(self) -> bool:
        """True if a batch in flight gives the next token."""
        return self.flights > self.void

    @property
    def in_flight(self) -> bool:
        return self.flights > 0

    @property
    def left(self) -> int:
        """Number of known tokens with rows not yet submitted."""
        return len(self.tokens) - self.computed

    @property
    def left_of_path(self) -> int:
        """Number of these tokens that have the next one's path and may run now."""
        stop = self.n_prompt if self.computed < self.n_prompt else len(self.tokens)
        return (stop if self.check is None else min(stop, self.check.stop)) - self.computed

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def guesses_left(self) -> int:
        """Number of draft rows still allowed. The last token of an answer needs no row, because nothing is drawn from it."""
        return self.most_tokens - 1 - len(self.tokens) - len(self.guess)

    def put_back(self) -> Sequence[BlockId]:
        """End a check and put the block set aside back in its place. Returns the block that stood there meanwhile."""
        check, self.check = self.check, None
        if check is None:
            return ()
        self.n_sent, self.is_settled = 0, False  # the table has another block there
        again, self.blocks[check.place] = self.blocks[check.place], check.aside
        return (again,)

    def draw_row(self, logits_row: int, ahead: int) -> DrawRow:
        """Return the draw of a token after the next one, valid if all draft tokens before it are right.

        Args:
            logits_row: index of the row in the batch's logits.
            ahead: number of draft tokens before the drawn one.
        """
        return self.draws.row(logits_row, len(self.tokens) + ahead, self.guess[:ahead])

    def take(self, token: int) -> bool:
        """Append a drawn token. If it differs from the draft token in its place, rows computed after it become void.

        Returns:
            Whether it equals the draft token.
        """
        self.tokens.append(token)
        if not self.guess:
            return False
        if self.guess[0] == token:
            del self.guess[0]
            return True
        self.forget_guess()
        return False

    def forget_guess(self) -> None:
        """Void the rows of draft tokens, including those in flight."""
        self.guess.clear()
        self.epoch += 1
        self.void = self.flights
        self.computed = len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch, and the sequences of its steps."""

    batch: StepBatch
    sequences: list[SequenceState]
    load: StepLoad
    may_recall: bool = False
    """The batch has only prompts, runs on this machine, and follows a batch that ran to its end."""


def oldest(prompts: Sequence[SequenceState], most: int) -> Sequence[SequenceState]:
    """Return the oldest prompt, and those after it that fit in a step of `most` rows."""
    for place, seq in enumerate(prompts):
        most -= seq.left
        if most <= 0:
            return prompts[: place + 1]
    return prompts


CERTAIN: Final = 1e30
"""A bias that outweighs every logit and is finite."""


def score_rows(seq: SequenceState, step: SequenceStep, first: int) -> list[DrawRow]:
    """Return the draws that score the prompt tokens of a step.

    Args:
        first: the step's first row in the batch's logits.
    """
    if seq.is_scored:
        return []
    positions = [step.first_position + row for row in step.logits_rows if step.first_position + row + 1 < seq.n_prompt]
    return [_forced(seq, first + place, position + 1) for place, position in enumerate(positions)]


def _forced(seq: SequenceState, logits_row: int, position: int) -> DrawRow:
    params = SamplingParams(temperature=0, logprobs=seq.request.sampling.logprobs or 0, logit_bias={seq.tokens[position]: CERTAIN})
    return DrawState(params, 0, ()).row(logits_row, position)


@dataclass(slots=True)
class Gain:
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    accepted: int = 0
    """Number of tokens that the draft had right."""
    finish_reason: FinishReason | None = None
    error: DrawFailed | None = None


def gain_of(seq: SequenceState, drawn: Iterable[Drawn | DrawFailed]) -> Gain:
    """Take a sequence's next tokens, row by row for as long as the draft is right."""
    gain = Gain()
    for one in drawn:
        if isinstance(one, DrawFailed):
            gain.finish_reason, gain.error = FinishReason.ERROR, one
            gain.text += seq.text.flush()
            break
        token = one.token
        gain.token_ids.append(token)
        if one.logprob is not None and token not in seq.stop_ids:  # a token that only ends the answer is not part of it
            gain.logprobs.append(one.logprob)
        guessed = seq.take(token)
        gain.accepted += guessed
        matcher = seq.draws.matcher
        # An end token is not part of the answer: check for completeness before the matcher takes it.
        is_whole = matcher is None or (token in seq.stop_ids and matcher.is_accepting)
        seq.draws.count(token)
        text, gain.finish_reason = _say(seq, token)
        gain.text += text
        if gain.finish_reason is FinishReason.STOP and matcher is not None and seq.text.stopped:
            is_whole = matcher.accepts_without(seq.tokens[seq.n_prompt :], seq.text.n_cut)
        if gain.finish_reason is FinishReason.STOP and not is_whole:
            assert matcher is not None, "without a form every answer is whole"
            gain.finish_reason, gain.error = FinishReason.ERROR, _cut_short(matcher)
        if gain.finish_reason is not None or not guessed:
            break
    return gain


def _cut_short(matcher: Matcher) -> FormFailed:
    """Return the failure of an answer that ended before its grammar was complete."""
    if matcher.error is not None:
        return FormFailed(TOO_COMPLEX, "Ask for a simpler form.")
    return FormFailed("The answer ends before its form does: it was stopped by stop or stop_token_ids", "Ask for it without them.")


def carry_on(seq: SequenceState, token_ids: Iterable[int]) -> None:
    """Place a new sequence after tokens that another node already drew and sent.

    Raises:
        InvalidRequest: the answer ended with one of these tokens.
    """
    for token in token_ids:
        seq.tokens.append(token)
        seq.draws.count(token)
        seq.text.push(token)
        if token in seq.stop_ids or seq.text.stopped:
            raise InvalidRequest("The answer to go on with has ended already", "Ask for it from its beginning.", field="so_far")


def _say(seq: SequenceState, token: int) -> tuple[str, FinishReason | None]:
    """Return the text that a token adds, and the finish reason if the answer ends with it."""
    if token in seq.stop_ids:
        return seq.text.flush(), FinishReason.STOP
    text = seq.text.push(token)
    if seq.text.stopped:
        return text, FinishReason.STOP
    if len(seq.tokens) >= seq.most_tokens:
        text += seq.text.flush()
        return text, FinishReason.STOP if seq.text.stopped else FinishReason.LENGTH
    return text, None
