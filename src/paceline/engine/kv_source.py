"""KV blocks that lie elsewhere than in the pool, by name: fetched into blocks that sequences will begin with, and kept from blocks that are known.

Law: the engine's thread is never held up, and a block that a source may still write, or read, is no other sequence's. A fetch that brings less than it
promised costs what it did not bring: those rows are computed. What stands on a peer's blocks is kept nowhere else: it ends with the process, as the peer's word does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId, NodeId
from paceline.core.text import common_length
from paceline.engine.kv_fetch import KvFetch
from paceline.engine.prefix_cache import BlockPool, Prefixes
from paceline.engine.sequence import BlockCheck, SequenceState

MOST_UNKEPT = 1 << 14
"""Names of blocks that wait to be kept. Raising it: memory; blocks of a burst are kept that would else be forgotten."""
MOST_CHAINS = 32
"""Prefixes that are remembered as used last. Raising it: memory, and more of them are forgotten by others who are told `MOST_MARKS` of their names."""
MOST_MARKS = 64
"""Names told of them. Raising it: more prefixes are found elsewhere, with more to be told whenever one is used."""
LEAST_MARK = 4
"""Blocks of the shortest prefix that is told."""
PROMPTS_END = 4
"""Tokens that a template may add behind a prompt and leave out once the chat goes on, such as an empty thought. Raising it: conversations that part in
their last tokens count as one."""


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

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        """Begin to copy a block, that follows `parent` in its chain; it stays as it is until `kept` names it. False: there is no room for it now."""
        ...

    def lacks(self, key: bytes) -> bool:
        """Whether it keeps blocks, and is not known to have this one: then it is to be offered again, with those before it."""
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

    def __init__(self, source: KvSource, prefixes: Prefixes, check_every: int, draw: Callable[[], int]) -> None:
        self._source, self._prefixes, self._every, self._draw = source, prefixes, check_every, draw
        self._unchecked = -1
        """Blocks of peers before the next that is computed again; below 0: not drawn yet."""
        self.fetching: dict[SequenceState, KvFetch] = {}
        """Sequences whose next blocks are on their way. To the pool they are in flight."""
        self._waiting: deque[tuple[bytes, bytes | None]] = deque(maxlen=MOST_UNKEPT)
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
        """Have what there is of a sequence's next blocks brought into them; `n_writing` as `KvSource.run_of` has it. Those it begins with may be kept no more,
        or not yet: nothing behind them could be.
        """
        if seq.n_published and self._source.lacks(seq.keys[seq.n_published - 1]):
            self.offer(seq, 0)
        if n := self._source.run_of(keys, seq.request if len(seq.tokens) == seq.n_prompt else None, n_writing):
            self.fetching[seq] = self._source.fetch(keys[:n], blocks[:n])
            seq.flights += 1

    def came(self, seq: SequenceState, fetch: KvFetch, pool: BlockPool, spare: int) -> frozenset[NodeId] | None:
        """A sequence waits no more: blocks came for it, or one that was computed again is compared.

        Args:
            spare: blocks that are left to others.

        Returns:
            Whose blocks are wrong, by what was compared; None: nothing was, or it can't be known.
        """
        check = seq.check
        if check is not None:
            pool.give_back(seq.put_back())
            if fetch.filled == 1:
                return seq.givers
            self._check(seq, check.alike, check.places, check.resume, pool, spare)
            return frozenset() if fetch.filled else None
        given, n_given = fetch.given, 0
        if given is not None:
            n_given = max(0, fetch.filled - given.first)
        size = self._prefixes.block_size
        for n_blocks in (fetch.filled - n_given, n_given):
            if given is not None and n_blocks == n_given > 0:
                seq.givers |= {given.giver}
            seq.computed += n_blocks * size
            self._prefixes.fetched(seq, n_blocks, pool.cache)
        if given is not None:
            first = seq.computed // size - n_given
            places = [first + place for place in self._to_check(n_given)]
            self._check(seq, given.alike, places, seq.computed, pool, spare)
        return None

    def _check(
        self,
        seq: SequenceState,
        alike: Callable[[Sequence[BlockId]], KvFetch],
        places: Sequence[int],
        resume: int,
        pool: BlockPool,
        spare: int,
    ) -> None:
        """Have the next of these blocks computed again; go on where there is none, or no room for it."""
        if not places or pool.available <= spare:
            seq.computed = resume
            return
        place, size = places[0], self._prefixes.block_size
        seq.check = BlockCheck(alike, places[1:], resume, place, seq.blocks[place], (place + 1) * size)
        seq.blocks[place], seq.computed = pool.take(), place * size

    def _to_check(self, n_blocks: int) -> list[int]:
        """Which of the next blocks that peers gave are computed again: one in so many, and nobody can tell which."""
        chosen, at = list[int](), 0
        while self._every:
            if self._unchecked < 0:
                self._unchecked = self._draw() % (2 * self._every - 1)
            if self._unchecked >= n_blocks - at:
                self._unchecked -= n_blocks - at
                break
            chosen.append(at + self._unchecked)
            at, self._unchecked = chosen[-1] + 1, -1
        return chosen

    def distrust(self, givers: frozenset[NodeId], holders: Iterable[SequenceState], pool: BlockPool) -> list[SequenceState]:
        """Forget what stands on blocks of these peers. Returns the sequences, of those that hold blocks, which are to run again."""
        again: list[SequenceState] = []
        for seq in holders:
            if seq.givers & givers or seq in self.fetching:  # what comes may be theirs
                seq.distrusted = True
                if seq.is_live and not seq.preempt_when_collected:
                    seq.forget_guess()
                    again.append(seq)
        pool.forget_given(givers)
        return again

    def compare(self, seq: SequenceState, check: BlockCheck) -> None:
        """Find whether a block that was computed again is what the peer gave."""
        self.fetching[seq] = check.alike((check.aside, seq.blocks[check.place]))
        seq.flights += 1

    def fetched(self) -> Iterator[tuple[SequenceState, KvFetch]]:
        """Sequences that wait no more, and what came for each. What is wanted no more is cancelled."""
        for seq, fetch in tuple(self.fetching.items()):
            if not seq.is_live or seq.preempt_when_collected:
                fetch.cancel()
            if fetch.is_over:
                del self.fetching[seq]
                yield seq, fetch

    def offer(self, seq: SequenceState, first: int) -> None:
        """What is known of a sequence's blocks, from that one on, may be kept."""
        if not seq.request.caller:
            self._waiting += ((seq.keys[at], seq.keys[at - 1] if at else None) for at in range(first, seq.n_published))

    def lend(self, pool: BlockPool) -> None:
        """Take back what was copied, and lend what comes next. What a source has already it lets go at once: nobody would wake the engine for it."""
        self._take_back(pool, self._source.kept())
        self._lend_waiting(pool)
        self._take_back(pool, self._source.kept())

    def _lend_waiting(self, pool: BlockPool) -> None:
        while self._waiting:
            key, parent = self._waiting[0]
            block = pool.cache.find(key)
            if block is not None and block not in self.lent and not pool.cache.givers((block,)):
                if not self._source.keep(key, block, parent):
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
    """Names of blocks that end prefixes used lately, the latest first.

    A name is an unkeyed hash, so a reader that knows the rest of a prompt finds a short unknown part by trying. So other nodes are told only beginnings
    that two conversations shared, and what they asked themselves.
    """

    version: int = 0
    marks: tuple[bytes, ...] = ()
    """Of beginnings that at least two conversations shared."""
    told: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    """For nodes that asked here: the same, and what they asked."""

    def marks_for(self, node_id: str) -> tuple[bytes, ...]:
        """Return what a node may be told."""
        return self.told.get(node_id, self.marks)


@dataclass(slots=True)
class _Chain:
    """The blocks of one sequence, by name."""

    keys: tuple[bytes, ...]
    n_prompt: int
    caller: str
    n_shared: int = 0
    """Blocks that another conversation began with too."""

    def marks(self, length: int) -> list[bytes]:
        """Names to tell of the first `length` blocks: the last of them, and those at powers of two, so that prefixes that part later are found."""
        if length < LEAST_MARK:
            return []
        places = [1 << power for power in range(LEAST_MARK.bit_length() - 1, length.bit_length())]
        return [self.keys[place - 1] for place in (length, *reversed(places))]


class KvLoans:
    """Blocks of one pool that other threads read, by name. Any thread asks and gives back; the engine's thread answers between two steps."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Has the engine's thread look here."""
        self.on_used: Callable[[], object] = lambda: None
        """Told, in the engine's thread, that `prefixes` changed."""
        self.on_checked: Callable[[frozenset[NodeId]], object] = lambda _: None
        """Told, in the engine's thread, of each check of peers' blocks, whose blocks were found to be wrong: that of none."""
        self.liars: deque[frozenset[NodeId]] = deque()
        """Found elsewhere: what they gave is to be forgotten here too."""
        self.prefixes = UsedPrefixes()
        self.out: dict[KvLoan, None] = {}
        """For the engine's thread alone."""
        self._asked: deque[tuple[Sequence[bytes], bool, Future[KvLoan]]] = deque()
        self._awaited: list[tuple[Sequence[bytes], bool, Future[KvLoan]]] = []
        """The first of whose blocks is not computed yet. For the engine's thread alone."""
        self._returned: deque[KvLoan] = deque()
        self._chains: OrderedDict[bytes, _Chain] = OrderedDict()
        """By the last of their names, the latest at the end."""

    @property
    def is_waiting(self) -> bool:
        """Whether the engine's thread has something to do here."""
        return bool(self._asked or self._returned or self.liars)

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

    def distrust(self, givers: frozenset[NodeId]) -> None:
        """Forget what these gave, and run again what stands on it."""
        self.liars.append(givers)
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

    def used(self, keys: Sequence[bytes], n_prompt: int, caller: str = "") -> None:
        """Note the blocks that a sequence used.

        Args:
            n_prompt: how many of them its prompt fills, but for what a template adds at a prompt's end.
            caller: the node that asked; empty: this one.
        """
        if len(keys) < LEAST_MARK:
            return
        chain, known = _Chain(tuple(keys), min(n_prompt, len(keys)), caller), set(keys)
        for last, other in list(self._chains.items()):
            length = common_length(chain.keys, other.keys)
            if length < min(chain.n_prompt, other.n_prompt):
                other.n_shared, chain.n_shared = max(other.n_shared, length), max(chain.n_shared, length)
            else:  # one conversation, which goes on or is asked again
                chain.n_shared = max(chain.n_shared, min(other.n_shared, length))
                if last in known:
                    del self._chains[last]
        self._chains.pop(chain.keys[-1], None)
        self._chains[chain.keys[-1]] = chain
        if len(self._chains) > MOST_CHAINS:
            self._chains.popitem(last=False)
        self._tell()

    def _tell(self) -> None:
        latest = tuple(reversed(self._chains.values()))
        shared = dict.fromkeys(mark for chain in latest for mark in chain.marks(chain.n_shared))
        own = {
            caller: dict.fromkeys(mark for chain in latest if chain.caller == caller for mark in chain.marks(len(chain.keys)))
            for caller in {chain.caller for chain in latest} - {""}
        }
        told = {caller: tuple(marks | shared)[:MOST_MARKS] for caller, marks in own.items()}
        self.prefixes = UsedPrefixes(self.prefixes.version + 1, tuple(shared)[:MOST_MARKS], told)
        self.on_used()
