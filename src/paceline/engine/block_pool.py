"""The paged pool of KV blocks: who uses which, by reference count.

Law: a block is in exactly one state: free (no key, no user), idle (in the prefix cache, no user), or used (one user or more,
cached or not). Free blocks are handed out before idle ones are evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.core.ids import BlockId
from paceline.engine.prefix_cache import PrefixCache


class BlockPool:
    """Blocks 0 .. n_blocks - 1 of one executor, and the prefix cache over them."""

    def __init__(self, n_blocks: int) -> None:
        self.cache = PrefixCache()
        self._users = [0] * n_blocks
        # From the end: low ids first, and a block just freed, whose memory is warm, is the next to be used.
        self._free = [BlockId(i) for i in reversed(range(n_blocks))]
        self._used = 0

    @property
    def n_blocks(self) -> int:
        return len(self._users)

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free) + self.cache.n_idle

    @property
    def used(self) -> int:
        """Blocks with at least one user."""
        return self._used

    def take(self) -> BlockId:
        """A block for one user, its content undefined. One must be available."""
        block = self._free.pop() if self._free else self.cache.evict()
        self._users[block] = 1
        self._used += 1
        return block

    def share(self, block: BlockId) -> None:
        """One more user of a cached block."""
        if self._users[block] == 0:
            self.cache.revive(block)
            self._used += 1
        self._users[block] += 1

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """One user less of each."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._used -= 1
                if block in self.cache:
                    self.cache.retire(block)
                else:
                    self._free.append(block)

    def forget_idle(self) -> None:
        """Free what no sequence uses: what those blocks hold can't be trusted any more."""
        while self.cache.n_idle:
            self._free.append(self.cache.evict())

    def check_invariants(self, tables: Iterable[Iterable[BlockId]]) -> None:
        """Assert the module's law.

        Args:
            tables: the blocks of each sequence that holds any; a shared block stands in several.
        """
        self.cache.check_invariants()
        users: Counter[BlockId] = Counter()
        for table in tables:
            blocks = list(table)
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            users.update(blocks)
        assert [users[BlockId(i)] for i in range(self.n_blocks)] == self._users, "reference counts differ from the tables"
        assert all(block in self.cache for block, count in users.items() if count > 1), "a block outside the cache has two users"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for i, count in enumerate(self._users):
            states = (i in free) + self.cache.is_idle(BlockId(i)) + (count > 0)
            assert states == 1, f"block {i} is in {states} states"
        assert self._used == sum(count > 0 for count in self._users), "the number of used blocks is wrong"
