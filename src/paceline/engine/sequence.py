"""One generated sequence: its tokens, what of them is computed, and the blocks that hold them.

The scheduler owns what concerns rows and blocks; the engine owns the tokens, the draw state and the text.
"""

from __future__ import annotations

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


class SequenceState:
    """A live sequence. Compared by identity."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "draws",
        "epoch",
        "id",
        "in_flight",
        "index",
        "keys",
        "n_prompt",
        "n_publishable",
        "n_published",
        "n_sent",
        "phase",
        "preempt_when_collected",
        "request",
        "stop_ids",
        "text",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: SequenceId,
        request: GenerationRequest,
        index: int,
        draws: DrawState,
        text: TextStream,
        stop_ids: frozenset[int],
    ) -> None:
        """A sequence that waits.

        Args:
            sequence_id: also its place in the order of arrival.
            request: it belongs to.
            index: which of the request's sequences.
            draws: how its tokens are drawn.
            text: its text.
            stop_ids: tokens that end it.
        """
        self.id = sequence_id
        self.request = request
        self.index = index
        self.draws = draws
        self.text = text
        self.stop_ids = stop_ids
        self.tokens: list[int] = list(request.prompt_ids)
        self.n_prompt = len(request.prompt_ids)
        self.phase = Phase.WAITING
        self.epoch = 0
        self.computed = 0
        """Tokens whose rows were submitted. Those of a sequence that is not in flight were collected too."""
        self.in_flight = False
        self.preempt_when_collected = False
        self.blocks: list[BlockId] = []
        self.n_sent = 0
        """Blocks the executor was told of."""
        self.keys: list[bytes] = []
        """Of its full blocks; empty where the prefix cache is not for it."""
        self.n_published = 0
        """Blocks, from the first on, that were offered to the prefix cache or came from it."""
        self.n_publishable = 0
        """How many may ever be; 0 where the prefix cache is not for it."""
        self.cached_tokens: int | None = None
        """Prompt tokens the prefix cache held when it was first admitted; None until then."""

    @property
    def is_live(self) -> bool:
        return self.phase is not Phase.ENDED

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt
