"""KV blocks: their users, by reference count, and the tokens in full blocks, so that requests that begin alike compute the beginning once.

A block's key chains the hash of all tokens up to its end, from a root that names the numerics and the weights: equal keys, equal bytes. The chain has a link
every 16 tokens, so a name stands for the same tokens whatever the size of the blocks that hold them. A cached block without a user is *idle*: it stays until
its room is needed, the one idle for longest first. Sequences give back their blocks from the last to the first, so that a chain loses its end before its
beginning.

Laws:
- A block is in exactly one state: free (no key, no user), idle (in the prefix cache, no user), or used (one user or more, cached or not). Free blocks are
  handed out before idle ones are evicted.
- A block is offered once its rows are known to be right, and generated ones only where they are the same bytes as prompt rows (byte identity, rule 3). A
  sequence that needs blocks which another is about to compute waits for them.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from paceline.core.ids import BlockId, NodeId
from paceline.core.model import BLOCK_TOKENS
from paceline.engine.config import EngineConfig
from paceline.engine.executor import Executor
from paceline.engine.sequence import SequenceState


def root_key(numerics_id: str, model_digest: str) -> bytes:
    """Return the key before the first block: a hash of everything except tokens that decides a block's bytes."""
    return hashlib.blake2b(f"{numerics_id}\0{model_digest}".encode(), digest_size=16).digest()


def salted_key(root: bytes, caller: str, salt: str) -> bytes:
    """Return the root key of the blocks that one caller's requests with one salt share."""
    return hashlib.blake2b(f"{caller}\0{salt}".encode(), key=root, digest_size=16).digest() if caller or salt else root


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a block that holds `token_ids` and follows the block of key `parent`."""
    key = parent
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        key = hashlib.blake2b(key + array("q", token_ids[start : start + BLOCK_TOKENS]).tobytes(), digest_size=16).digest()
    return key


def prompt_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of all full blocks of `token_ids`."""
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = chain_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


class PrefixCache:
    """Keys to blocks, and the order in which idle blocks are evicted. `BlockPool` counts the references and reports them."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, BlockId] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self._idle: dict[BlockId, None] = {}
        """Idle blocks, in the order of eviction."""
        self._givers: dict[BlockId, frozenset[NodeId]] = {}
        """Peers, for each block that depends on their KV."""

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._key_of

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, block: BlockId) -> bool:
        return block in self._idle

    def match(self, keys: Sequence[bytes]) -> list[BlockId]:
        """Return the blocks of the longest cached run of `keys`, from the first on."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: bytes) -> BlockId | None:
        """Return the block with this key; None: it is not cached."""
        return self._block_of.get(key)

    def insert(self, key: bytes, block: BlockId, givers: frozenset[NodeId] = frozenset()) -> None:
        """Name a used block, which depends on KV of the peers `givers`. If the key is taken, the block stays private to its sequence."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if givers:
                self._givers[block] = givers

    def givers(self, blocks: Iterable[BlockId]) -> frozenset[NodeId]:
        """Return the peers that these blocks depend on."""
        return frozenset[NodeId]().union(*(self._givers.get(block, ()) for block in blocks)) if self._givers else frozenset()

    def forget(self, givers: frozenset[NodeId]) -> tuple[list[BlockId], list[BlockId]]:
        """Forget the blocks that depend on these peers. Returns the idle ones, and those in use."""
        found = [block for block, of in self._givers.items() if of & givers]
        idle, used = [block for block in found if block in self._idle], [block for block in found if block not in self._idle]
        for block in found:
            self._idle.pop(block, None)
            self._drop(block)
        return idle, used

    def retire(self, block: BlockId) -> None:
        self._idle[block] = None

    def revive(self, block: BlockId) -> None:
        del self._idle[block]

    def evict(self) -> BlockId:
        """Forget the block idle for longest, and return it. There must be an idle one."""
        block = next(iter(self._idle))
        del self._idle[block]
        self._drop(block)
        return block

    def _drop(self, block: BlockId) -> None:
        del self._block_of[self._key_of.pop(block)]
        self._givers.pop(block, None)

    def check_invariants(self) -> None:
        """Assert that keys and blocks are one to one, and that idle blocks have a key."""
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "the two directions of the cache disagree"
        assert self._idle.keys() <= self._key_of.keys(), "an idle block has no key"
        assert self._givers.keys() <= self._key_of.keys(), "it is known who gave a block that is not known"


_UNBOUNDED = 1 << 62


class Prefixes:
    """Prefix keys of all sequences of one engine. The cache belongs to the pool."""

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self.queried_tokens = self.hit_tokens = self.fetched_tokens = 0
        """Prompt tokens that were looked up, found in the cache, and fetched from elsewhere."""
        self._block_size, self._one_path = executor.block_size, executor.one_path
        self._caching, self._digest = config.prefix_cache, config.model_digest
        self._numerics_id = executor.numerics_id
        self._root = self._new_root()
        self._computing: dict[bytes, SequenceState] = {}
        """Running sequences, by the keys of the prompt blocks that they are about to fill."""

    @property
    def block_size(self) -> int:
        return self._block_size

    def name(self, seq: SequenceState) -> None:
        """Set the keys of the blocks of a new sequence's prompt."""
        if self._caching and not seq.request.scores_prompt:  # a cached block has no logits, which scores need
            seq.keys = prompt_keys(self._root_of(seq), seq.tokens[: seq.n_prompt], self._block_size)
            seq.n_publishable = _UNBOUNDED if self._one_path else len(seq.keys)

    def follow(self, executor: Executor, waiting: Iterable[SequenceState]) -> None:
        """Use the executor's block size and numerics, and recompute the keys of waiting sequences if either changed. Nothing is cached, and no sequence runs,
        at that time.
        """
        now = (executor.block_size, executor.numerics_id)
        if now != (self._block_size, self._numerics_id):
            self._block_size, self._numerics_id = now
            self._root = self._new_root()
            for seq in waiting:
                self.name(seq)

    @property
    def are_shared(self) -> bool:
        """Return whether the names stand for the same bytes elsewhere: on disks, and at other nodes."""
        return self._numerics_id != ""

    def _new_root(self) -> bytes:
        """Return the root of all names. Mixed numerics get a random one, so that their blocks have no shared name."""
        return root_key(self._numerics_id or f"unlike {secrets.token_hex(16)}", self._digest)

    def find(self, seq: SequenceState, cache: PrefixCache) -> Sequence[BlockId] | None:
        """Return the blocks with which a sequence may begin. None: another sequence is computing the next of them."""
        keys = self._wanted(seq)
        hits = cache.match(keys)
        return None if len(hits) < len(keys) and keys[len(hits)] in self._computing else hits

    def begun(self, seq: SequenceState, n_hits: int, cache: PrefixCache) -> None:
        """Start a sequence that runs with `n_hits` cached blocks."""
        seq.n_published = n_hits
        seq.givers, seq.distrusted = cache.givers(seq.blocks[:n_hits]), False
        for key in self._wanted(seq)[n_hits:]:
            self._computing.setdefault(key, seq)
        if seq.cached_tokens is None:
            seq.cached_tokens = n_hits * self._block_size
            if seq.n_publishable:
                self.queried_tokens += seq.n_prompt
                self.hit_tokens += seq.cached_tokens

    def missing(self, seq: SequenceState, n_hits: int) -> Sequence[bytes]:
        """Return the names of the blocks that would follow the `n_hits` found ones."""
        return self._wanted(seq)[n_hits:]

    def fetched(self, seq: SequenceState, n_blocks: int, cache: PrefixCache) -> None:
        """Count and publish `n_blocks` blocks of a sequence that came from elsewhere."""
        tokens = n_blocks * self._block_size
        self.fetched_tokens += tokens
        seq.cached_tokens = (seq.cached_tokens or 0) + tokens
        self.publish(seq, seq.computed, cache)

    def publish(self, seq: SequenceState, settled: int, cache: PrefixCache) -> int:
        """Offer the full blocks of the first `settled` tokens. Returns how many were published before."""
        before = seq.n_published
        for index in range(seq.n_published, min(settled // self._block_size, seq.n_publishable)):
            if index == len(seq.keys):
                start = index * self._block_size
                parent = seq.keys[-1] if seq.keys else self._root_of(seq)
                seq.keys.append(chain_key(parent, seq.tokens[start : start + self._block_size]))
            cache.insert(seq.keys[index], seq.blocks[index], seq.givers)
            self._waive(seq, seq.keys[index])
            seq.n_published += 1
        return before

    def stopped(self, seq: SequenceState) -> None:
        """Record that a sequence computes no further, for now or for good, so that no other waits for it."""
        for key in seq.keys[seq.n_published :]:
            self._waive(seq, key)

    def check_invariants(self, holders: Container[SequenceState]) -> None:
        """Assert that every sequence that others wait for holds blocks."""
        assert all(seq in holders for seq in self._computing.values()), "a key waits for a sequence that is gone"

    def _root_of(self, seq: SequenceState) -> bytes:
        request = seq.request
        return salted_key(self._root, request.caller if request.keeps_apart else "", request.cache_salt)

    def _wanted(self, seq: SequenceState) -> Sequence[bytes]:
        """Return the keys of blocks that may be found. The last token's row must run, because its logits are needed."""
        return seq.keys[: (len(seq.tokens) - 1) // self._block_size]

    def _waive(self, seq: SequenceState, key: bytes) -> None:
        if self._computing.get(key) is seq:
            del self._computing[key]


class BlockPool:
    """Blocks 0 .. n_blocks - 1 of one executor, and the prefix cache over them."""

    def __init__(self, n_blocks: int) -> None:
        self.cache = PrefixCache()
        self._users = [0] * n_blocks
        # In reverse: low ids are used first, and a block just freed, with warm memory, is the next to be used.
        self._free = [BlockId(i) for i in reversed(range(n_blocks))]
        self.used = 0
        """Number of blocks with at least one user."""
        self._forgotten: set[BlockId] = set()
        """Used blocks that left the cache because a peer sent wrong KV."""

    @property
    def n_blocks(self) -> int:
        return len(self._users)

    @property
    def available(self) -> int:
        """Number of blocks that `take` can hand out."""
        return len(self._free) + self.cache.n_idle

    def take(self) -> BlockId:
        """Return a block for one user, with undefined content. One must be available."""
        block = self._free.pop() if self._free else self.cache.evict()
        self._users[block] = 1
        self.used += 1
        return block

    def share(self, block: BlockId) -> None:
        """Add a user to a cached block."""
        if self._users[block] == 0:
            self.cache.revive(block)
            self.used += 1
        self._users[block] += 1

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """Remove one user from each block."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self.used -= 1
                self._forgotten.discard(block)
                if block in self.cache:
                    self.cache.retire(block)
                else:
                    self._free.append(block)

    def forget_idle(self) -> None:
        """Free the blocks without a user, because their content can't be trusted any more."""
        while self.cache.n_idle:
            self._free.append(self.cache.evict())

    def forget_given(self, givers: frozenset[NodeId]) -> None:
        """Forget the blocks that depend on these peers. Sequences that use one must give it back."""
        idle, used = self.cache.forget(givers)
        self._free += idle
        self._forgotten.update(used)

    def check_invariants(self, tables: Iterable[Iterable[BlockId]]) -> None:
        """Assert the module's laws.

        Args:
            tables: the blocks of each sequence that holds any; a shared block is in several.
        """
        self.cache.check_invariants()
        users: Counter[BlockId] = Counter()
        for table in tables:
            blocks = list(table)
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            users.update(blocks)
        assert [users[BlockId(i)] for i in range(self.n_blocks)] == self._users, "reference counts differ from the tables"
        known = (block in self.cache or block in self._forgotten for block, count in users.items() if count > 1)
        assert all(known), "a block outside the cache has two users"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for i, count in enumerate(self._users):
            states = (i in free) + self.cache.is_idle(BlockId(i)) + (count > 0)
            assert states == 1, f"block {i} is in {states} states"
        assert self.used == sum(count > 0 for count in self._users), "the number of used blocks is wrong"
