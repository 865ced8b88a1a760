"""One text at a time, decoded on this machine with drafts of the machine that a plan names.

Law: it is the engine that serves, with one source of drafts: the same tokens as without, greedy or sampled. A proposer that fails is told once, as
`RemoteProposerError`; what was decoded is intact, and decoding goes on without drafts, or with those of another placement.

Source: `DistributedSpeculativeDecoder.from_placement` of seeds 000 and 001.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, PlacementError, RemoteProposerError
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats
from paceline.core.text import Vocabulary
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.drafts import Proposer
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.fleet.plan import Choice, Draft
from paceline.node.drafts.fleet_lines import FleetLines
from paceline.node.drafts.local import LocalDrafts
from paceline.node.fleet import FleetNode
from paceline.transport.remote_proposer import RemoteProposer

SOURCE = "placed"
"""What its one source is called."""
GREEDY = SamplingParams(temperature=0.0)

Reach = Callable[[Draft], Proposer]
"""The proposer that a plan names."""


class DistributedSpeculativeDecoder:
    """Runs the model in its caller's thread; close it when done. Close the executor yourself.

    Args:
        executor: runs the model.
        vocabulary: of the model.
        config: of its engine.
        proposer: drafts.
        reach: finds the proposers of later placements.
        clock: all time.
    """

    def __init__(
        self, executor: Executor, vocabulary: Vocabulary, config: EngineConfig, proposer: Proposer, reach: Reach, clock: Clock
    ) -> None:
        self._source, self._reach = LocalDrafts(proposer, clock), reach
        self._engine = Engine(executor, vocabulary, config, clock, drafting=DraftingConfig(SOURCE, {SOURCE: self._source}))
        self._told: Exception | None = None
        self._begun = 0
        self.token_ids: list[int] = []
        """Of the answer so far."""

    @classmethod
    def from_placement(
        cls, placement: Choice, executor: Executor, vocabulary: Vocabulary, config: EngineConfig, reach: Reach, clock: Clock
    ) -> DistributedSpeculativeDecoder:
        """With the proposer that a plan chose.

        Raises:
            PlacementError: the plan has none.
        """
        return cls(executor, vocabulary, config, reach(_draft_of(placement)), reach, clock)

    def begin(self, prompt_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> None:
        """Start an answer. The last one must have ended."""
        if self.has_work:
            raise RuntimeError("an answer is under way")
        self._begun += 1
        self.token_ids = []
        self._engine.add(GenerationRequest(RequestId(str(self._begun)), tuple(prompt_ids), max_tokens, sampling))

    @property
    def has_work(self) -> bool:
        """Whether the answer goes on."""
        return self._engine.has_work

    @property
    def stats(self) -> EngineStats:
        """What was drafted, accepted, and in how many steps."""
        return self._engine.stats()

    def step(self) -> Sequence[int]:
        """Decode on, and return the tokens gained.

        Raises:
            RemoteProposerError: the proposer failed since the last step. Said once; step again to go on.
            PacelineError: the model could not be run.
        """
        error = self._source.error
        if error is not None and error is not self._told:
            self._told = error
            raise error if isinstance(error, RemoteProposerError) else RemoteProposerError(str(error), status="INTERNAL") from error
        gained: list[int] = []
        for chunk in self._engine.step():
            gained += chunk.token_ids
            if chunk.error is not None:
                raise PacelineError(f"Decoding failed: {chunk.error}")
        self.token_ids += gained
        return gained

    def place(self, placement: Choice) -> None:
        """Have drafts of another plan's proposer from now on, within an answer or between two.

        Raises:
            PlacementError: the plan has none.
        """
        self._source.replace(self._reach(_draft_of(placement)))

    def close(self) -> None:
        """Stop drafting. Idempotent."""
        self._source.close()


def through(fleet: FleetNode, vocabulary_size: int) -> Reach:
    """Proposers over a node's channels. On its event loop; they are then for other threads.

    Args:
        fleet: the node.
        vocabulary_size: of the model drafted for.
    """
    lines, loop = FleetLines(fleet), asyncio.get_running_loop()

    def reach(draft: Draft) -> RemoteProposer:
        return RemoteProposer(loop, lambda: lines.channel(draft.node_id), draft.node_id, draft.model_id, vocabulary_size)

    return reach


def _draft_of(placement: Choice) -> Draft:
    if placement.draft is None:
        raise PlacementError(
            f"The plan is to run {placement.model_id} {placement.way}, without drafts", "Ask for a plan with the way draft."
        )
    return placement.draft
