"""Which full KV blocks hold which tokens, so that requests that begin alike compute the beginning once.

A block's key chains the hash of all tokens up to its end, from a root that names the numerics and the weights: equal keys, equal bytes. The
chain has a link every 16 tokens, so a name stands for the same tokens whatever the size of the blocks that hold them.
A cached block that no sequence uses is *idle*: it stays until its room is needed, the one idle for longest first. Sequences give
back their blocks from the last to the first, so that a chain loses its end before its beginning.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from paceline.core.ids import BlockId
from paceline.core.model import BLOCK_TOKENS


def root_key(numerics_id: str, model_digest: str) -> bytes:
    """The key before the first block: everything but tokens that decides a block's bytes."""
    return hashlib.blake2b(f"{numerics_id}\0{model_digest}".encode(), digest_size=16).digest()


def salted_key(root: bytes, caller: str, salt: str) -> bytes:
    """The root of the blocks that one caller's requests of one salt share."""
    return hashlib.blake2b(f"{caller}\0{salt}".encode(), key=root, digest_size=16).digest() if caller or salt else root


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block that holds `token_ids` and follows the block of key `parent`."""
    key = parent
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        key = hashlib.blake2b(key + array("q", token_ids[start : start + BLOCK_TOKENS]).tobytes(), digest_size=16).digest()
    return key


def prompt_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of `token_ids`."""
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = chain_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


class PrefixCache:
    """Keys to blocks, and the order in which idle blocks are given up. Counts no references: `BlockPool` tells it of them."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, BlockId] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self._idle: dict[BlockId, None] = {}
        """Insertion order is the order of eviction."""

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
        """Blocks of the longest run of `keys`, from the first on, that is cached."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, key: bytes, block: BlockId) -> None:
        """Name a block in use. Where the key is taken, the block stays its sequence's own."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def retire(self, block: BlockId) -> None:
        """No sequence uses the block any more."""
        self._idle[block] = None

    def revive(self, block: BlockId) -> None:
        """A sequence uses the block again."""
        del self._idle[block]

    def evict(self) -> BlockId:
        """Forget the block idle for longest, and hand it over. There must be one."""
        block = next(iter(self._idle))
        del self._idle[block]
        del self._block_of[self._key_of.pop(block)]
        return block

    def check_invariants(self) -> None:
        """Keys and blocks are one to one, and what is idle has a key."""
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "the two directions of the cache disagree"
        assert self._idle.keys() <= self._key_of.keys(), "an idle block has no key"
