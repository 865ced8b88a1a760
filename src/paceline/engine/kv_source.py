"""KV blocks that lie elsewhere than in the pool, by name: fetched into blocks that sequences will begin with, and kept from blocks that are known.

Law: the engine's thread is never held up, and a block that a source may still write, or read, is no other sequence's. A fetch that brings less than it
promised costs what it did not bring: those rows are computed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId
from paceline.engine.prefix_cache import BlockPool
from paceline.engine.sequence import SequenceState

MOST_UNKEPT = 1 << 14
"""Names of blocks that wait to be kept. Raising it: memory; blocks of a burst are kept that would else be forgotten."""
MOST_CHAINS = 32
"""Prefixes that are remembered as used last. Raising it: memory, and more of them are forgotten by others who are told `MOST_MARKS` of their names."""
MOST_MARKS = 64
"""Names told of them. Raising it: more prefixes are found elsewhere, with more to be told whenever one is used."""
LEAST_MARK = 4
"""Blocks of the shortest prefix that is told."""


class KvFetch(Protocol):
    """Blocks on their way."""

    @property
    def filled(self) -> int:
        """Blocks that stand, from the first on. Final once `is_over`."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no block is written any more. A source bounds how long it takes."""
        ...

    def cancel(self) -> None:
        """Have it end soon: it is wanted no more. Idempotent."""
        ...


class KvSource(Protocol):
    """Where blocks are kept. For the engine's thread; what it does takes place in others."""

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        """How many blocks of a chain it expects to have, from the first on, if to fetch them pays.

        Args:
            request: whose prompt these blocks end; None: there is none.
            n_writing: other answers that are being written here, and would be held up while these blocks are computed.
        """
        ...

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        """Begin to fill blocks."""
        ...

    def keep(self, key: bytes, block: BlockId) -> bool:
        """Begin to copy a block, which stays as it is until `kept` names it. False: there is no room for it now."""
        ...

    def kept(self) -> Sequence[BlockId]:
        """Blocks that were let go of since this was asked last."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Blocks, by what became of them."""
        ...

    @property
    def kept_bytes(self) -> int:
        """What is kept now, of all models."""
        ...

    def reset(self) -> None:
        """End all that is under way. Returns once no block is read or written any more."""
        ...


class KvTraffic:
    """Between one pool and a source: blocks that sequences wait for come in, and blocks that are known go out as the source has room for them, if they
    are still in the prefix cache by then.
    """

    def __init__(self, source: KvSource) -> None:
        self._source = source
        self.fetching: dict[SequenceState, KvFetch] = {}
        """Sequences whose next blocks are on their way. To the pool they are in flight."""
        self._waiting: deque[bytes] = deque(maxlen=MOST_UNKEPT)
        self.lent: dict[BlockId, None] = {}
        """Blocks that are being copied: each has a user more."""

    @property
    def is_keeping(self) -> bool:
        """Whether blocks are still to be copied."""
        return bool(self.lent or self._waiting)

    @property
    def n_coming(self) -> int:
        """Blocks that stand, of all that sequences wait for."""
        return sum(fetch.filled for fetch in self.fetching.values())

    def fetch(self, seq: SequenceState, keys: Sequence[bytes], blocks: Sequence[BlockId], n_writing: int) -> None:
        """Have what there is of a sequence's next blocks brought into them; `n_writing` as `KvSource.run_of` has it."""
        if n := self._source.run_of(keys, seq.request if len(seq.tokens) == seq.n_prompt else None, n_writing):
            self.fetching[seq] = self._source.fetch(keys[:n], blocks[:n])
            seq.flights += 1

    def fetched(self) -> Iterator[tuple[SequenceState, int]]:
        """Sequences that wait no more, and how many blocks came for each. What is wanted no more is cancelled."""
        for seq, fetch in tuple(self.fetching.items()):
            if not seq.is_live or seq.preempt_when_collected:
                fetch.cancel()
            if fetch.is_over:
                del self.fetching[seq]
                yield seq, fetch.filled

    def offer(self, keys: Iterable[bytes]) -> None:
        """Blocks of these names may be kept."""
        self._waiting += keys

    def lend(self, pool: BlockPool) -> None:
        """Take back what was copied, and lend what comes next. What a source has already it lets go at once: nobody would wake the engine for it."""
        self._take_back(pool, self._source.kept())
        self._lend_waiting(pool)
        self._take_back(pool, self._source.kept())

    def _lend_waiting(self, pool: BlockPool) -> None:
        while self._waiting:
            block = pool.cache.find(self._waiting[0])
            if block is not None and block not in self.lent:
                if not self._source.keep(self._waiting[0], block):
                    return
                pool.share(block)
                self.lent[block] = None
            self._waiting.popleft()

    def _take_back(self, pool: BlockPool, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            del self.lent[block]
            pool.give_back((block,))

    def reset(self, pool: BlockPool) -> Sequence[SequenceState]:
        """End all: blocks are void. Returns the sequences that waited."""
        self._source.reset()
        self._waiting.clear()
        self._take_back(pool, tuple(self.lent))
        waited = tuple(self.fetching)
        self.fetching.clear()
        return waited


@dataclass(slots=True, eq=False)
class KvLoan:
    """Blocks of a pool that another thread reads. Each has a user more until it is given back."""

    blocks: Mapping[bytes, BlockId]
    """Those that were known, of the names asked for."""
    is_void: bool = False
    """KV was lost: what was read of them may be anything."""


@dataclass(frozen=True, slots=True)
class UsedPrefixes:
    """Names of blocks that end prefixes which were used last, the latest first."""

    version: int = 0
    marks: tuple[bytes, ...] = ()


class KvLoans:
    """Blocks of one pool that other threads read, by name. Any thread asks and gives back; the engine's thread answers between two steps."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Has the engine's thread look here."""
        self.on_used: Callable[[], object] = lambda: None
        """Told, in the engine's thread, that `prefixes` changed."""
        self.prefixes = UsedPrefixes()
        self.out: dict[KvLoan, None] = {}
        """For the engine's thread alone."""
        self._asked: deque[tuple[Sequence[bytes], bool, Future[KvLoan]]] = deque()
        self._awaited: list[tuple[Sequence[bytes], bool, Future[KvLoan]]] = []
        """The first of whose blocks is not computed yet. For the engine's thread alone."""
        self._returned: deque[KvLoan] = deque()
        self._chains: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        """Marks of each prefix, by the last of them."""

    @property
    def is_waiting(self) -> bool:
        """Whether the engine's thread has something to do here."""
        return bool(self._asked or self._returned)

    def ask(self, keys: Sequence[bytes], *, when_computed: bool = False) -> Future[KvLoan]:
        """Borrow the blocks of these names that are known. What comes is to be given back.

        Args:
            when_computed: wait until the first of them is; who waits no more cancels.
        """
        future = Future[KvLoan]()
        self._asked.append((keys, when_computed, future))
        self.wake()
        return future

    def give_back(self, loan: KvLoan) -> None:
        self._returned.append(loan)
        self.wake()

    def leave(self, asked: Future[KvLoan]) -> None:
        """What was asked for is wanted no more, whether it came or not."""
        if not asked.cancel():
            asked.add_done_callback(lambda done: self.give_back(done.result()))

    def settle(self, pool: BlockPool) -> None:
        """Take back what was read, and lend what was asked for."""
        while self._returned:
            loan = self._returned.popleft()
            if self.out.pop(loan, loan) is None:
                pool.give_back(loan.blocks.values())
        asked, self._awaited = self._awaited, []
        while self._asked:
            asked.append(self._asked.popleft())
        for keys, when_computed, future in asked:
            if when_computed and not future.cancelled() and pool.cache.find(keys[0]) is None:
                self._awaited.append((keys, when_computed, future))
            elif future.set_running_or_notify_cancel():
                found = {key: block for key in keys if (block := pool.cache.find(key)) is not None}
                for block in found.values():
                    pool.share(block)
                loan = KvLoan(found)
                self.out[loan] = None
                future.set_result(loan)

    def void(self, pool: BlockPool | None) -> None:
        """KV was lost: what is lent is read for nothing.

        Args:
            pool: that goes on; None: another takes its place.
        """
        for loan in self.out:
            loan.is_void = True
            if pool is not None:
                pool.give_back(loan.blocks.values())
        self.out.clear()
        self._chains.clear()
        self._tell()

    def used(self, keys: Sequence[bytes]) -> None:
        """A sequence used blocks of these names. Prefixes that begin alike have their first marks in common."""
        if len(keys) < LEAST_MARK:
            return
        places = [1 << power for power in range(LEAST_MARK.bit_length() - 1, len(keys).bit_length())]
        marks = tuple(dict.fromkeys(keys[place - 1] for place in (len(keys), *reversed(places))))
        known = set(keys)
        for last in [last for last in self._chains if last in known]:
            del self._chains[last]  # it goes on
        self._chains[marks[0]] = marks
        if len(self._chains) > MOST_CHAINS:
            self._chains.popitem(last=False)
        self._tell()

    def _tell(self) -> None:
        marks = dict.fromkeys(mark for chain in reversed(self._chains.values()) for mark in chain)
        self.prefixes = UsedPrefixes(self.prefixes.version + 1, tuple(marks)[:MOST_MARKS])
        self.on_used()
