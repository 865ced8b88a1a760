"""One generated sequence: its tokens, what of them is computed, and the blocks that hold them.

The scheduler owns what concerns rows and blocks; the engine owns the tokens, the draw state and the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId, SequenceId
from paceline.engine.draw_state import DrawState
from paceline.engine.stops import TextStream


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
    phase: Phase = Phase.WAITING
    epoch: int = 0
    computed: int = 0
    """Tokens whose rows were submitted. Those of a sequence that is not in flight were collected too."""
    in_flight: bool = False
    preempt_when_collected: bool = False
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    n_sent: int = 0
    """Blocks the executor was told of."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Of its full blocks; empty without a prefix cache."""
    n_published: int = 0
    """Blocks, from the first on, that were offered to the prefix cache or came from it."""
    n_publishable: int = 0
    """How many may ever be; 0 without a prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens the prefix cache held when it was first admitted; None until then."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.n_prompt = len(self.tokens)

    @property
    def is_live(self) -> bool:
        return self.phase is not Phase.ENDED

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt
