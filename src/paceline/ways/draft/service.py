"""A node's drafts, put together: what it drafts with for others, and whose drafts its own engine has.

Models that this node drafts with, for others and for itself: `paceline up --propose`.

`MODEL` drafts token by token, `jacobi:MODEL` refines whole blocks. Each has a runner of its own, so that an ask never waits for an answer
that this node itself is giving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from prometheus_client.registry import Collector

from paceline.backends.options import LoadProgress
from paceline.core.background import TaskSet
from paceline.core.clock import Clock
from paceline.core.errors import VocabularyMismatch
from paceline.core.stats import DraftUse, EngineStats, Metrics, Row, counter, gauge, histogram
from paceline.core.text import Tokenizer
from paceline.engine.drafts import NGRAM, Proposer, ProposerStats, open_session
from paceline.engine.local import LayerRunner
from paceline.engine.proposers import DraftModelProposer, JacobiProposer
from paceline.fleet.card import ModelOffer, Role, two_digits
from paceline.fleet.eligibility import Use
from paceline.fleet.messages import Effect
from paceline.machine.capability import WarmModel, warm_offer
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.machine.speed import PromptMaker, SpeedKey, learn_speed, vocabulary_id
from paceline.net.member.node import FleetNode
from paceline.net.server import Service
from paceline.net.trust.guard import PeerGuard
from paceline.store.home import Home
from paceline.ways.draft.finding import FleetConnections, Verifier
from paceline.ways.draft.names import JACOBI
from paceline.ways.draft.pool import ProposerPool, proposer_service
from paceline.ways.draft.sources import NodeDrafts

TEXTS = 4
"""Long texts whose KV is held at once. Raising it: memory, for a fleet that asks about more texts at a time."""
MAX_ROWS = 512
MEASURED_BLOCKS, MEASURED_LENGTH = 8, 7
"""Blocks that a proposer's speed is measured with: a fraction of a second, once it is loaded."""


@dataclass(frozen=True, slots=True)
class LoadedProposer:
    """A proposer ready to draft."""

    asked: str
    """As `--propose` has it."""
    model_id: str
    """As others know it."""
    proposer: Proposer
    offer: ModelOffer
    """What the card says of it."""
    runner: LayerRunner[Any]
    """Its own; close it once nothing is drafted any more."""


def load_proposer(name: str, threads: int | None, progress: LoadProgress | None, clock: Clock) -> LoadedProposer:
    """Load a model to draft with, and measure it.

    Args:
        name: as `--propose` has it.
        threads: None: one a physical core.

    Raises:
        UserError: it can't be had.
    """
    settings = NodeSettings(name.removeprefix(JACOBI), threads=threads, max_running=TEXTS)
    setup = set_up(settings)
    opened, layers = setup.opened, setup.opened.spec.all_layers
    kv = setup.room(layers)
    runner = setup.load(layers, kv.n_blocks, MAX_ROWS, progress)
    config = replace(setup.config(kv), max_running=1, prefill_chunk=MAX_ROWS - 1)
    key = SpeedKey(setup.digest, setup.weights, setup.threads)
    with closing(setup.sampler()) as sampler:
        speed = learn_speed(Home.from_environment(), key, runner, opened.tokenizer, config, clock, sampler)
    kind = JacobiProposer if name.startswith(JACOBI) else DraftModelProposer
    proposer = kind(
        runner,
        vocabulary_size=opened.spec.vocab,
        eos_ids=opened.tokenizer.eos_ids,
        max_rows=MAX_ROWS,
        max_context=opened.spec.max_context,
    )
    model_id = (JACOBI if kind is JacobiProposer else "") + opened.name
    rate = measure(proposer, PromptMaker(opened.tokenizer, 11).make(1, 64)[0], clock)
    offer = replace(warm_offer(setup.warm(kv, speed)), role=Role.PROPOSER, model_id=model_id, tokens_per_second=rate)
    return LoadedProposer(name, model_id, proposer, offer, runner)


def measure(proposer: Proposer, text: Sequence[int], clock: Clock) -> float:
    """Tokens a second that a proposer drafts behind a text it was told, two digits; 0 where it can't be said. Of an ordinary block: other programs slow some."""
    with closing(open_session(proposer)) as session:
        new = session.propose(0, text, MEASURED_LENGTH, 0).token_ids  # which warms up, and tells it the text
        rates = list[float]()
        for _ in range(MEASURED_BLOCKS):
            began_s = clock.monotonic()
            new = session.propose(len(session.told), new, MEASURED_LENGTH, 0).token_ids
            took_s = clock.monotonic() - began_s
            rates.append(len(new) / took_s if took_s > 0 else 0.0)
    return two_digits(median(rates))


def _each(stats: Mapping[str, ProposerStats], count: str) -> dict[str, int]:
    return {name: getattr(one, count) for name, one in stats.items()}


# fmt: off
POOL_ROWS: tuple[Row[ProposerPool], ...] = (
    counter("paceline_proposer_blocks", "Blocks drafted for whoever asked.", lambda pool: _each(pool.stats, "blocks"), "model"),
    counter("paceline_proposer_tokens", "Tokens of these blocks.", lambda pool: _each(pool.stats, "tokens"), "model"),
    counter("paceline_proposer_forward_passes", "Forward passes that they took.", lambda pool: _each(pool.stats, "forward_passes"), "model"),
    counter("paceline_proposer_diffusion_steps", "Of proposers that refine whole blocks: steps that they took.",
            lambda pool: _each(pool.stats, "diffusion_steps"), "model"),
    gauge("paceline_proposer_activation_peak_bytes", "Largest activations of one of these passes: residual in and out, logits.",
          lambda pool: _each(pool.stats, "peak_activation_bytes"), "model"),
    counter("paceline_proposer_failures", "Blocks asked for and not had.", lambda pool: _each(pool.stats, "failures"), "model"),
    gauge("paceline_proposer_sessions", "Texts that proposers here remember.", lambda pool: pool.sessions),
    gauge("paceline_proposer_session_tokens", "Tokens of these texts.", lambda pool: pool.tokens),
)
SOURCE_ROWS: tuple[Row[NodeDrafts], ...] = (
    counter("paceline_draft_source_blocks", "Blocks drafted for this node's model by proposers of the fleet.",
            lambda drafts: _each(drafts.meter.stats, "blocks"), "source"),
    counter("paceline_draft_source_tokens", "Tokens of these blocks.", lambda drafts: _each(drafts.meter.stats, "tokens"), "source"),
    counter("paceline_draft_source_forward_passes", "Forward passes that they took.",
            lambda drafts: _each(drafts.meter.stats, "forward_passes"), "source"),
    counter("paceline_draft_source_failures", "Blocks asked for and not had.", lambda drafts: _each(drafts.meter.stats, "failures"), "source"),
    histogram("paceline_draft_hop_seconds", "From asking for a draft until it is there: wire, queues and drafting.", lambda drafts: drafts.meter.hop),
    counter("paceline_draft_failures", "Drafts asked for and not had.", lambda drafts: drafts.meter.failures, "node", "status"),
    counter("paceline_draft_proposer_changes", "Times that a proposer took over.", lambda drafts: drafts.meter.changes),
    gauge("paceline_draft_source_available", "1 where a proposer drafts at present.",
            lambda drafts: {name: source.drafter is not None for name, source in drafts.sources.items()}, "source"),
)
# fmt: on


def draft_metrics(pool: ProposerPool, drafts: Callable[[], NodeDrafts | None]) -> tuple[Collector, Collector]:
    """Of one node.

    Args:
        drafts: what its engine has from others; None where it runs no model.
    """
    return Metrics(POOL_ROWS, lambda: pool), Metrics(SOURCE_ROWS, drafts)


DRAIN_S = 0.5
"""How long a block being made is waited for at the end."""


class DraftService:
    """Of one node in a fleet. Made on the event loop."""

    def __init__(self, fleet: FleetNode, proposers: Sequence[LoadedProposer]) -> None:
        self._fleet, self._proposers = fleet, proposers
        self._pool = ProposerPool({})
        self._drafts: list[NodeDrafts] = []
        """Of each engine; figures are of the first one's."""
        self._detaching = TaskSet()
        self._stats: Callable[[], EngineStats] | None = None
        self._stale = False
        self.metrics = draft_metrics(self._pool, lambda: self._first)
        for one in proposers:
            if one.model_id not in self._pool.model_ids:
                self._pool.add(one.model_id, one.proposer)
        fleet.listen(self._on_news)
        fleet.show_drafts(self._use)

    def service(self, guard: PeerGuard) -> Service:
        return proposer_service(self._pool, guard.peer)

    def attach(self, drafts: NodeDrafts | None, warm: WarmModel | None, tokenizer: Tokenizer, stats: Callable[[], EngineStats]) -> None:
        """Have drafts from the fleet for an engine of this node.

        Args:
            drafts: the engine's sources; None: it drafts by itself or not at all.
        """
        self._stats = stats
        if drafts is None or warm is None or drafts in self._drafts:
            return
        self._drafts.append(drafts)
        verifier = Verifier(self._fleet.node_id, warm.model, warm.speed.vocabulary)
        connections = FleetConnections(self._fleet, self._pool)
        drafts.attach(verifier, tokenizer.size, lambda: self._fleet.eligible(Use.DRAFT), connections.open)

    def keep(self, living: Collection[NodeDrafts]) -> None:
        for drafts in [one for one in self._drafts if one not in living]:
            self._drafts.remove(drafts)
            self._detaching.start(drafts.detach())

    async def stop(self) -> None:
        """End. Bounded; idempotent."""
        await asyncio.gather(*(drafts.detach() for drafts in self._drafts), *self._detaching)
        self._pool.close()
        await close_proposers(self._pool, self._proposers)

    def _on_news(self, effect: Effect) -> None:
        del effect
        if self._drafts and not self._stale:
            self._stale = True
            # Soon, so that all that one message brought is looked at once.
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._stale = False
        for drafts in self._drafts:
            drafts.look()

    @property
    def _first(self) -> NodeDrafts | None:
        return self._drafts[0] if self._drafts else None

    def _use(self) -> tuple[DraftUse, ...]:
        return () if self._stats is None else draft_use(self._stats(), self._first)


@asynccontextmanager
async def drafting_alone(
    drafts: NodeDrafts | None, tokenizer: Tokenizer, proposers: Sequence[LoadedProposer]
) -> AsyncGenerator[tuple[Collector, Collector]]:
    """Drafts of this process for its own engine, on a machine in no fleet, for as long as the block runs.

    Raises:
        VocabularyMismatch: a proposer has other tokens than the model.
    """
    pool = ProposerPool({one.asked: one.proposer for one in proposers})
    if drafts is not None:
        vocabulary = vocabulary_id(tokenizer)
        check_vocabulary(vocabulary, proposers, drafts.sources)
        fitting = {one.asked: one.offer for one in proposers if one.offer.vocabulary == vocabulary}
        drafts.attach_alone(pool, fitting, tokenizer.size)
    try:
        yield draft_metrics(pool, lambda: drafts)
    finally:
        if drafts is not None:
            await drafts.detach()
        pool.close()
        await close_proposers(pool, proposers)


def check_vocabulary(vocabulary: str, proposers: Sequence[LoadedProposer], wanted: Collection[str]) -> None:
    """Check that what is to draft here for this machine's own model has its tokens.

    Args:
        wanted: names that are to draft for it.

    Raises:
        VocabularyMismatch: one has others.
    """
    for one in proposers:
        if one.offer.vocabulary != vocabulary and not {one.asked, one.model_id}.isdisjoint(wanted):
            raise VocabularyMismatch(
                f"{one.asked} can't draft here: other tokens than those of the model it would draft for",
                "A draft model has the same tokenizer: mostly it is a smaller one of the same family.",
            )


async def close_proposers(pool: ProposerPool, proposers: Sequence[LoadedProposer]) -> None:
    """Free what they run on, unless one still drafts: the process ends with it then."""
    if await asyncio.to_thread(pool.drained, DRAIN_S):
        for one in proposers:
            one.runner.close()


OFF_HERE = "a machine that runs some of the layers gives other bytes for other batches, and a draft would change the answer"


def draft_use(stats: EngineStats, drafts: NodeDrafts | None) -> tuple[DraftUse, ...]:
    """What became of a node's drafts, as `paceline status` shows it, by kind: those that were verified, and those that could be.

    Args:
        drafts: its sources; None: prompt lookup alone, or nothing.
    """
    sources = {} if drafts is None else drafts.sources
    names = dict.fromkeys((*stats.draft_blocks, *sources))
    if not stats.drafts_off:
        return tuple(_use(name, stats, drafts) for name in names)
    return tuple(replace(_use(name, stats, drafts), trouble=OFF_HERE) for name in names or (NGRAM,))


def _use(name: str, stats: EngineStats, drafts: NodeDrafts | None) -> DraftUse:
    counted = DraftUse(name, stats.draft_blocks.get(name, 0), stats.drafted_tokens.get(name, 0), stats.accepted_tokens.get(name, 0))
    source = None if drafts is None else drafts.sources.get(name)
    if drafts is None or source is None:
        return counted
    drafter, asked, trouble = source.drafter, drafts.meter.of(name), source.trouble
    return replace(
        counted,
        node_id="" if drafter is None else drafter.node_id,
        model_id="" if drafter is None else drafter.model_id,
        blocks=asked.blocks,
        hop_s=drafts.meter.hop.mean_s,
        failures=asked.failures,
        trouble="" if drafter is not None or trouble is None else str(trouble),
    )
