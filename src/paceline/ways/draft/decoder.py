"""One text at a time, decoded on this machine with drafts of the machine that a plan names.

Law: it is the engine that serves, with one source of drafts: the same tokens as without, greedy or sampled. A failure of a proposer is told once, as
`RemoteProposerError`; what was decoded is intact, and decoding goes on: without drafts until it may be asked again, or with those of another
placement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, PlacementError, RemoteProposerError
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats
from paceline.core.text import Vocabulary
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.fleet.eligibility import Use
from paceline.fleet.plan import Choice
from paceline.net.member.node import FleetNode
from paceline.ways.draft.finding import Drafter, FleetConnections, Key, placed
from paceline.ways.draft.remote import DraftMeter, RemoteDrafts

SOURCE = "placed"
GREEDY = SamplingParams(temperature=0.0)


class DistributedSpeculativeDecoder:
    """Made with `from_placement`, placed and closed on the event loop of its node; begun and stepped by one other thread, which runs the model.
    Close the executor yourself.

    Args:
        fleet: the node, through which drafts are had.
    """

    def __init__(self, executor: Executor, vocabulary: Vocabulary, config: EngineConfig, fleet: FleetNode, clock: Clock) -> None:
        self._fleet, self._vocabulary_size = fleet, vocabulary.size
        self._source = RemoteDrafts(SOURCE, DraftMeter(), clock)
        self._engine = Engine(executor, vocabulary, config, clock, drafting=DraftingConfig(SOURCE, {SOURCE: self._source}))
        fleet.listen(lambda _: self._source.look())
        self._told: RemoteProposerError | None = None
        self._begun = 0
        self.token_ids: list[int] = []
        """Of the answer so far."""

    @classmethod
    def from_placement(
        cls, placement: Choice, executor: Executor, vocabulary: Vocabulary, config: EngineConfig, fleet: FleetNode, clock: Clock
    ) -> DistributedSpeculativeDecoder:
        """With the proposer that a plan chose.

        Raises:
            PlacementError: the plan has none, or that one does not draft any more.
        """
        decoder = cls(executor, vocabulary, config, fleet, clock)
        decoder.place(placement)
        return decoder

    def begin(self, prompt_ids: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> None:
        """Start an answer. The last one must have ended."""
        if self.has_work:
            raise RuntimeError("an answer is under way")
        self._begun += 1
        self.token_ids = []
        self._engine.add(GenerationRequest(RequestId(str(self._begun)), tuple(prompt_ids), max_tokens, sampling))

    @property
    def has_work(self) -> bool:
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
        failure = self._source.failure
        if failure is not None and failure is not self._told:
            self._told = failure
            raise failure
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
            PlacementError: the plan has none, or that one does not draft any more.
        """
        draft, fleet = placement.draft, self._fleet
        if draft is None:
            what = f"The plan is to run {placement.model_id} {placement.way}, without drafts"
            raise PlacementError(what, "Ask for a plan with the way draft.")

        def find(left_out: Collection[Key]) -> Sequence[Drafter]:
            drafter = placed(fleet.eligible(Use.DRAFT), draft)
            if drafter.key in left_out:
                raise PlacementError(f"{draft.node_id} failed, and is left alone for a while")
            return [drafter]

        find(())
        self._source.attach(find, FleetConnections(fleet).open, self._vocabulary_size)

    async def close(self) -> None:
        """Stop drafting. Idempotent."""
        await self._source.detach()
