"""KV blocks outside the pool, by name: fetched into blocks that sequences will begin with, and copied from known blocks to be kept.

Laws:
- The engine's thread is never held up. A block that a source may still write or read is not used by another sequence.
- A fetch that brings less than it promised costs only the computation of the missing rows.
- KV that depends on a peer's blocks is kept nowhere else: it ends with this process, and so does the trust in it.
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
"""Names of blocks that wait to be kept. Raising it: more memory; lowering it: blocks of a burst are dropped before they are kept."""
MOST_CHAINS = 32
"""Prefixes remembered as used last. Raising it: more memory, and more prefixes that are never advertised, since nodes get only `MOST_MARKS` names."""
MOST_MARKS = 64
"""Names that are advertised to a node. Raising it: more prefixes are found elsewhere, and more is sent whenever one is used."""
LEAST_MARK = 4
"""Blocks of the shortest prefix that is advertised. Raising it: shorter prefixes are computed again elsewhere; lowering it: more names of little use."""
PROMPTS_END = 4
"""Tokens that a template may add after a prompt and leave out once the chat goes on, such as an empty thought. Raising it: conversations that differ only in
their last tokens count as one.
"""


class KvSource(Protocol):
    """A store of KV blocks outside the pool. For the engine's thread; its work runs in other threads."""

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        """Return how many blocks of a chain the source expects to have, from the first on, if fetching them pays.

        Args:
            keys: names of the blocks.
            request: the request with a prompt that ends in these blocks; None: there is none.
            n_writing: other answers in progress here, which would be held up while these blocks are computed.
        """
        ...

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        """Begin to fill blocks."""
        ...

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        """Begin to copy a block, which follows `parent` in its chain. It must not change until `kept` names it. Returns False if the source is full for now."""
        ...

    def lacks(self, key: bytes) -> bool:
        """Return whether the source keeps blocks and is not known to have this one. It should then be offered again, with the blocks before it."""
        ...

    def kept(self) -> Sequence[BlockId]:
        """Return the blocks that were released since the last call."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of blocks, by what became of them."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes kept now, for all models."""
        ...

    def reset(self) -> None:
        """End everything under way. Returns once no block is read or written any more."""
        ...


class KvTraffic:
    """Transfers between one pool and a source. Blocks that sequences wait for come in. Known blocks go out as the source has room for them, if they are still
    in the prefix cache then.
    """

    def __init__(self, source: KvSource, prefixes: Prefixes, check_every: int, draw: Callable[[], int]) -> None:
        self._source, self._prefixes, self._every, self._draw = source, prefixes, check_every, draw
        self._unchecked = -1
        """Blocks from peers before the next one that is computed again; below 0: not drawn yet."""
        self.fetching: dict[SequenceState, KvFetch] = {}
        """Fetches of sequences that wait for their next blocks. For the pool such sequences are in flight."""
        self._waiting: deque[tuple[bytes, bytes | None]] = deque(maxlen=MOST_UNKEPT)
        self.lent: dict[BlockId, None] = {}
        """Blocks that are being copied; each has an additional user."""

    @property
    def is_keeping(self) -> bool:
        """True if blocks are still to be copied."""
        return bool(self.lent or self._waiting)

    @property
    def n_coming(self) -> int:
        """Number of complete blocks, of all that sequences wait for."""
        return sum(fetch.filled for fetch in self.fetching.values())

    def fetch(self, seq: SequenceState, keys: Sequence[bytes], blocks: Sequence[BlockId], n_writing: int) -> None:
        """Fetch as many of a sequence's next blocks as the source has; `n_writing` as in `KvSource.run_of`. If the source lacks the blocks before them, these
        are offered again, because nothing after them could be kept.
        """
        if not self._prefixes.are_shared:
            return
        if seq.n_published and self._source.lacks(seq.keys[seq.n_published - 1]):
            self.offer(seq, 0)
        if n := self._source.run_of(keys, seq.request if len(seq.tokens) == seq.n_prompt else None, n_writing):
            self.fetching[seq] = self._source.fetch(keys[:n], blocks[:n])
            seq.flights += 1

    def came(self, seq: SequenceState, fetch: KvFetch, pool: BlockPool, spare: int) -> frozenset[NodeId] | None:
        """Finish a sequence's fetch: use the blocks that came, or compare the one that was computed again.

        Args:
            spare: number of free blocks to leave to other sequences.

        Returns:
            The peers that sent wrong blocks; empty: the block was right. None: nothing was compared, or the result can't be known.
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
        """Set the next of these blocks to be computed again. Without one, or without room for it, continue at position `resume`."""
        if not places or pool.available <= spare:
            seq.computed = resume
            return
        place, size = places[0], self._prefixes.block_size
        seq.check = BlockCheck(alike, places[1:], resume, place, seq.blocks[place], (place + 1) * size)
        seq.blocks[place], seq.computed = pool.take(), place * size

    def _to_check(self, n_blocks: int) -> list[int]:
        """Choose which of the next blocks from peers to compute again: one in `check_every`, at random, so that peers can't predict it."""
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
        """Forget everything that depends on blocks of these peers. Returns the sequences that must run again, of those that hold blocks."""
        again: list[SequenceState] = []
        for seq in holders:
            if seq.givers & givers or seq in self.fetching:  # the blocks on their way may be theirs
                seq.distrusted = True
                if seq.is_live and not seq.preempt_when_collected:
                    seq.forget_guess()
                    again.append(seq)
        pool.forget_given(givers)
        return again

    def compare(self, seq: SequenceState, check: BlockCheck) -> None:
        """Start to compare a block that was computed again with the peer's."""
        self.fetching[seq] = check.alike((check.aside, seq.blocks[check.place]))
        seq.flights += 1

    def fetched(self) -> Iterator[tuple[SequenceState, KvFetch]]:
        """Yield the sequences with a finished fetch. Cancel fetches that are no longer wanted."""
        for seq, fetch in tuple(self.fetching.items()):
            if not seq.is_live or seq.preempt_when_collected:
                fetch.cancel()
            if fetch.is_over:
                del self.fetching[seq]
                yield seq, fetch

    def offer(self, seq: SequenceState, first: int) -> None:
        """Queue a sequence's known blocks, from index `first` on, to be kept."""
        if not seq.request.caller and self._prefixes.are_shared:
            self._waiting += ((seq.keys[at], seq.keys[at - 1] if at else None) for at in range(first, seq.n_published))

    def lend(self, pool: BlockPool) -> None:
        """Unpin the blocks that were copied, and pin the next ones. Blocks the source already holds are released at once, because no wake-up would follow."""
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
        """End all transfers: the blocks are void. Returns the sequences that waited."""
        self._source.reset()
        self._waiting.clear()
        self._take_back(pool, tuple(self.lent))
        waited = tuple(self.fetching)
        self.fetching.clear()
        return waited


@dataclass(slots=True, eq=False)
class KvLoan:
    """Pinned blocks of a pool, which another thread reads. Each has an additional user until the loan is given back."""

    blocks: Mapping[bytes, BlockId]
    """Blocks that were known, by name, of the names asked for."""
    is_void: bool = False
    """KV was lost: the data that was read may be anything."""


@dataclass(frozen=True, slots=True)
class UsedPrefixes:
    """Names of blocks that end recently used prefixes, the latest first.

    A name is an unkeyed hash, so a node that knows the rest of a prompt could find a short unknown part by trial. So other nodes learn only beginnings that two
    conversations shared, and those of their own requests.
    """

    version: int = 0
    marks: tuple[bytes, ...] = ()
    """Names in beginnings that at least two conversations shared."""
    told: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    """Names for each node that sent requests here: the shared ones, and those of its own requests."""

    def marks_for(self, node_id: str) -> tuple[bytes, ...]:
        """Return the names that a node may learn."""
        return self.told.get(node_id, self.marks)


@dataclass(slots=True)
class _Chain:
    """The blocks of one sequence, by name."""

    keys: tuple[bytes, ...]
    n_prompt: int
    caller: str
    n_shared: int = 0
    """Number of leading blocks that another conversation has too."""

    def marks(self, length: int) -> list[bytes]:
        """Return the names to advertise for the first `length` blocks: the last, and those at powers of two, so that prefixes that differ later are found."""
        if length < LEAST_MARK:
            return []
        places = [1 << power for power in range(LEAST_MARK.bit_length() - 1, length.bit_length())]
        return [self.keys[place - 1] for place in (length, *reversed(places))]


class KvLoans:
    """Blocks of one pool that other threads read, by name. Any thread may ask for them and give them back; the engine's thread answers between two steps."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Wakes the engine's thread to call `settle`."""
        self.on_used: Callable[[], object] = lambda: None
        """Called in the engine's thread when `prefixes` changed."""
        self.on_checked: Callable[[frozenset[NodeId]], object] = lambda _: None
        """Called in the engine's thread after each check of peers' blocks, with the peers that sent wrong ones; empty if none did."""
        self.liars: deque[frozenset[NodeId]] = deque()
        """Peers that were found faulty elsewhere; blocks from them are to be forgotten here too."""
        self.prefixes = UsedPrefixes()
        self.out: dict[KvLoan, None] = {}
        """Loans that are out. For the engine's thread alone."""
        self._asked: deque[tuple[Sequence[bytes], bool, Future[KvLoan]]] = deque()
        self._awaited: list[tuple[Sequence[bytes], bool, Future[KvLoan]]] = []
        """Requests for blocks of which the first is not computed yet. For the engine's thread alone."""
        self._returned: deque[KvLoan] = deque()
        self._chains: OrderedDict[bytes, _Chain] = OrderedDict()
        """Chains by the last of their names, the latest at the end."""

    @property
    def is_waiting(self) -> bool:
        """True if the engine's thread has something to do here."""
        return bool(self._asked or self._returned or self.liars)

    def ask(self, keys: Sequence[bytes], *, when_computed: bool = False) -> Future[KvLoan]:
        """Borrow the known blocks of these names. The caller must give the loan back.

        Args:
            when_computed: wait until the first block is computed. A caller that waits no more cancels the future.
        """
        future = Future[KvLoan]()
        self._asked.append((keys, when_computed, future))
        self.wake()
        return future

    def give_back(self, loan: KvLoan) -> None:
        self._returned.append(loan)
        self.wake()

    def distrust(self, givers: frozenset[NodeId]) -> None:
        """Forget the blocks from these peers, and run again the sequences that depend on them."""
        self.liars.append(givers)
        self.wake()

    def leave(self, asked: Future[KvLoan]) -> None:
        """Give up a request for blocks, whether it was answered or not."""
        if not asked.cancel():
            asked.add_done_callback(lambda done: self.give_back(done.result()))

    def settle(self, pool: BlockPool) -> None:
        """Take back finished loans, and lend the blocks that were asked for."""
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
        """Mark all loans void, because KV was lost.

        Args:
            pool: the pool, if it stays in use; None: another pool takes its place.
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
            keys: names of the blocks.
            n_prompt: number of blocks that the prompt fills, without the tokens that a template adds at a prompt's end.
            caller: the node that sent the request; empty: this node.
        """
        if len(keys) < LEAST_MARK:
            return
        chain, known = _Chain(tuple(keys), min(n_prompt, len(keys)), caller), set(keys)
        for last, other in list(self._chains.items()):
            length = common_length(chain.keys, other.keys)
            if length < min(chain.n_prompt, other.n_prompt):
                other.n_shared, chain.n_shared = max(other.n_shared, length), max(chain.n_shared, length)
            else:  # the same conversation, continued or asked again
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
