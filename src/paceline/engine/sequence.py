"""One generated sequence: its tokens, what of them is computed, the blocks that hold them; and its text.

The scheduler owns what concerns rows and blocks; the engine owns the tokens, the draw state and the text.
Law: however the tokens are cut, what is emitted in all is the decoded text up to the first stop string (the one that is complete
first; of two complete at once, the longer). Nothing that may yet turn out to belong to a stop string is emitted, nor half a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId, SequenceId
from paceline.core.text import Vocabulary
from paceline.engine.sampling import DrawRow, DrawState


class TextStream:
    """The text of one sequence."""

    __slots__ = ("_decode", "_held", "_stop", "_token_bytes", "stopped", "stopped_by")

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()) -> None:
        """Start empty. Empty stop strings end nothing and are ignored."""
        self._token_bytes = vocabulary.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False
        """A stop string was found; the text is over."""
        self.stopped_by: str | None = None
        """That string."""

    def push(self, token_id: int) -> str:
        """Text that is certain, now that this token follows."""
        text = self._decode(self._token_bytes(token_id))
        return self._pass_on(text) if self._stop else text

    def flush(self) -> str:
        """The rest, at the end of the sequence. Half a character becomes U+FFFD."""
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
            return text[:at]
        kept = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[kept:]
        return text[:kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Phase(Enum):
    """Where a sequence stands. Ended is for good; running and waiting alternate when it is preempted."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class SequenceState:
    """A live sequence. Compared by identity."""

    id: SequenceId
    """Also its place in the order of arrival."""
    request: GenerationRequest
    index: int
    """Which of the request's sequences."""
    draws: DrawState
    text: TextStream
    stop_ids: frozenset[int]
    """Tokens that end it."""
    tokens: list[int] = field(init=False)
    """Prompt and answer."""
    n_prompt: int = field(init=False)
    most_tokens: int = 0
    """Of prompt and answer, by the request and by the KV memory there is now."""
    phase: Phase = Phase.WAITING
    passed: int = 0
    """Later ones that were let in before it."""
    epoch: int = 0
    computed: int = 0
    """Tokens, guessed ones included, whose rows were submitted. Those of a sequence that is not in flight were collected too."""
    guess: list[int] = field(default_factory=list[int])
    """Guessed tokens behind the known ones, their rows submitted. Empty where nothing is in flight."""
    flights: int = 0
    """Batches in flight that it is in."""
    void: int = 0
    """The first of them that run on a guess that was wrong."""
    preempt_when_collected: bool = False
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    n_sent: int = 0
    """Blocks of the table that the executor has."""
    is_settled: bool = False
    """A batch with its table was collected: every part of the executor has one."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Of its full blocks; empty without a prefix cache."""
    n_published: int = 0
    """Blocks, from the first on, that were offered to the prefix cache or came from it."""
    n_publishable: int = 0
    """How many may ever be; 0 without a prefix cache."""
    n_scored: int = 1
    """Tokens of the prompt that need no score any more: nothing comes before the first."""
    cached_tokens: int | None = None
    """Prompt tokens the prefix cache held when it was first admitted; None until then."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.n_prompt = len(self.tokens)

    @property
    def is_scored(self) -> bool:
        """Nothing in the prompt waits for its log probability."""
        return not self.request.scores_prompt or self.n_scored >= self.n_prompt

    @property
    def ends_with_prompt(self) -> bool:
        """No token is to be drawn."""
        return self.request.max_tokens == 0

    @property
    def turn(self) -> tuple[bool, SequenceId]:
        """Its place among those that wait: other nodes' come last, until they have begun."""
        return bool(self.request.caller) and self.cached_tokens is None, self.id

    @property
    def is_live(self) -> bool:
        return self.phase is not Phase.ENDED

    @property
    def is_awaited(self) -> bool:
        """A batch in flight tells its next token."""
        return self.flights > self.void

    @property
    def in_flight(self) -> bool:
        return self.flights > 0

    @property
    def left(self) -> int:
        """Known tokens whose rows were not submitted."""
        return len(self.tokens) - self.computed

    @property
    def left_of_path(self) -> int:
        """Those of them that are of the next one's path."""
        return (self.n_prompt if self.computed < self.n_prompt else len(self.tokens)) - self.computed

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def guesses_left(self) -> int:
        """Rows that may still be guessed: the last token of an answer needs none, as nothing is drawn from it."""
        return self.most_tokens - 1 - len(self.tokens) - len(self.guess)

    def draw_row(self, logits_row: int, ahead: int) -> DrawRow:
        """The draw of the token so many places behind the next one, if all that is guessed before it comes true.

        Args:
            ahead: places.
        """
        return self.draws.row(logits_row, len(self.tokens) + ahead, self.guess[:ahead])

    def take(self, token: int) -> bool:
        """A token was drawn. Whether it is what was guessed for its place; if it is not, what was computed behind it is void."""
        self.tokens.append(token)
        if not self.guess:
            return False
        if self.guess[0] == token:
            del self.guess[0]
            return True
        self.forget_guess()
        return False

    def forget_guess(self) -> None:
        """Rows of guessed tokens are void, those in flight too."""
        self.guess.clear()
        self.epoch += 1
        self.void = self.flights
        self.computed = len(self.tokens) - 1
