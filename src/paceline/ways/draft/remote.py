"""Drafts from the node that the plan names: the engine's thread asks and goes on (`AskQueue`); on the event loop one proposer at a time drafts
(`client`), and is counted.

Law: the engine is never held up but for the wait it names. Every ask is answered once: with a draft, or, where its proposer failed, is late or is not
to be had, with an empty one. A drafter that failed is left out for a while (`Backoff`), and the next takes over, told everything anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.background import TaskSet
from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, RemoteProposerError, VocabularyMismatch
from paceline.core.ids import SequenceId
from paceline.core.stats import Histogram
from paceline.engine.drafts import BlockProposal, DraftAnswer, DraftAsk, ProposerStats
from paceline.ways.draft.client import AskQueue, ProposerClient
from paceline.ways.draft.finding import Drafter, Find, Key, OpenConnection

HOP_BOUNDS_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class DraftMeter:
    """Of all sources of one node."""

    hop: Histogram = field(default_factory=lambda: Histogram(HOP_BOUNDS_S))
    """From the engine's ask until its answer is there: queues, wire and drafting."""
    stats: dict[str, ProposerStats] = field(default_factory=dict[str, ProposerStats])
    """By source."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By node and gRPC's name for what went wrong."""
    changes: int = 0
    """Times that another proposer took over."""

    def of(self, name: str) -> ProposerStats:
        return self.stats.setdefault(name, ProposerStats())


LEFT_OUT_S, LEFT_OUT_MOST_S = 2.0, 300.0
"""How long a drafter that failed is left out: doubled each time. Raising them: one that was only restarted is missed for longer."""
FORGIVEN = 64
"""Blocks after which old failures no longer count."""


logger = logging.getLogger(__name__)

GAIN = 0.1
"""Of one answer's time, in what answers are expected to take."""


class RemoteDrafts:
    """Implements `engine.drafts.DraftSource`.

    Args:
        name: that metrics know it by; mostly the proposer's model id.
    """

    def __init__(self, name: str, meter: DraftMeter, clock: Clock) -> None:
        self.name = name
        self._meter, self._clock = meter, clock
        self._queue = AskQueue()
        self._failed: dict[Key, Backoff] = {}
        self._good: Counter[Key] = Counter()
        """Blocks of each since it failed last."""
        self.expected_s: float | None = None
        self._find: Find | None = None
        self._open: OpenConnection | None = None
        self._vocabulary_size = 0
        self._client: ProposerClient | None = None
        self._again: asyncio.TimerHandle | None = None
        self._ending = TaskSet()
        self.trouble: PacelineError | None = None
        """Why there is no drafter at present."""
        self.failure: RemoteProposerError | None = None
        """Of a proposer, the last one there was."""

    # ------------------------------------------------------------------------------------------------------ for the engine's thread

    @property
    def block(self) -> int:
        drafter = self.drafter
        return 1 if drafter is None else drafter.block

    def ask(self, ask: DraftAsk) -> None:
        self._queue.ask(ask, self._clock.monotonic())

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        return self._queue.answers(wait_s)

    def forget(self, sequence: SequenceId) -> None:
        self._queue.forget(sequence)

    def expect(self, sequence: SequenceId) -> None:
        """A sequence has it for a source, until it is forgotten."""
        self._queue.expect(sequence)

    @property
    def idle(self) -> bool:
        """No sequence that goes on has it for a source."""
        return self._queue.idle

    # ------------------------------------------------------------------------------------------------------------ for its owner

    @property
    def drafter(self) -> Drafter | None:
        client = self._client
        return None if client is None else client.drafter

    def attach(self, find: Find, open_connection: OpenConnection, vocabulary_size: int) -> None:
        """Begin. On the event loop."""
        self._find, self._open, self._vocabulary_size = find, open_connection, vocabulary_size
        self._queue.open(self._read_queue)
        self.look()

    def look(self) -> None:
        """The view has changed: maybe a node can draft now, or the one that did no longer can."""
        if self._find is None:
            return
        try:
            found = self._find([key for key, backoff in self._failed.items() if backoff.until_s > self._clock.monotonic()])
        except PacelineError as error:
            if str(self.trouble) != str(error):
                level = logging.WARNING if isinstance(error, VocabularyMismatch) else logging.INFO
                logger.log(level, "no node drafts (%s): %s", self.name, error)
            self.trouble, found = error, ()
        # The present drafter goes on: another would have to be told everything.
        client = self._client
        kept = None if client is None else next((one for one in found if one.is_same(client.drafter)), None)
        if client is not None and kept is not None:
            client.drafter = kept
        else:
            self._change(found[0] if found else None)

    async def detach(self) -> None:
        """End. On the event loop; idempotent."""
        self._find = self._open = None
        self._change(None)
        if self._again is not None:
            self._again.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._queue.close()

    # ------------------------------------------------------------------------------------------------------------ on the loop

    def _read_queue(self) -> None:
        over: list[SequenceId] = []
        for item in self._queue.take():
            if not isinstance(item, tuple):
                over.append(item)
            elif self._client is None:
                self._queue.answer(item[0], ())
            else:
                self._client.ask(*item)
        if self._client is not None:
            self._client.leave(over)

    def _on_good(self, block: BlockProposal, took_s: float, whole: bool) -> None:
        self._meter.of(self.name).count(block)
        self._meter.hop.observe(took_s)
        if self._client is not None:
            self._forgive(self._client.drafter.key)
        if self.expected_s is not None and not whole:
            self.expected_s += GAIN * (took_s - self.expected_s)

    def _fail(self, client: ProposerClient, error: RemoteProposerError) -> None:
        """Leave a proposer out for a while, and go on with another."""
        if client is not self._client:
            return
        node_id = client.drafter.node_id
        self._meter.of(self.name).failures += 1
        self._meter.failures[node_id, error.status] += 1
        now, key = self._clock.monotonic(), client.drafter.key
        left_out_s = self._failed.setdefault(key, Backoff(LEFT_OUT_S, LEFT_OUT_MOST_S)).fail(now)
        self._good[key] = 0
        logger.warning("%s drafts with %s no more for %g s: %s", node_id, client.drafter.model_id, left_out_s, error)
        self.failure = error
        self._change(None)
        if self._again is not None:
            self._again.cancel()
        next_s = min(backoff.until_s - now for backoff in self._failed.values() if backoff.until_s > now)
        self._again = asyncio.get_running_loop().call_later(next_s, self.look)
        self.look()

    def _forgive(self, key: Key) -> None:
        """Count a good block of a drafter that failed."""
        if key in self._failed:
            self._good[key] += 1
            if self._good[key] == FORGIVEN:
                del self._failed[key], self._good[key]

    def _change(self, drafter: Drafter | None) -> None:
        """Let another node draft, or none."""
        client, self._client, self.expected_s = self._client, None, None
        if client is not None and (connection := client.end()) is not None:
            self._ending.start(connection.close())
        if drafter is None or self._open is None:
            return
        client = self._client = ProposerClient(drafter, self._queue, self._vocabulary_size, self._clock, self._on_good, self._fail)
        try:
            client.begin(self._open)
        except PacelineError as error:
            self._fail(client, RemoteProposerError(error.message, error.hint, status="UNAVAILABLE"))
            return
        self._meter.changes += 1
        self.trouble = None
        logger.info("%s drafts with %s", drafter.node_id, drafter.model_id)
        self.expected_s = drafter.takes_s(1, 8)
