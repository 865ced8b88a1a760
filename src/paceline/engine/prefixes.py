"""Prefix blocks from sequence to sequence: which of a newcomer's are there, which are about to be, and which of its own others may have.

Law: a block is offered once its rows are known to be right, and generated ones only where they are the same bytes as prompt rows (byte identity,
rule 3). Who needs what another is about to compute waits for it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from paceline.core.ids import BlockId
from paceline.engine.config import EngineConfig
from paceline.engine.executor import Executor
from paceline.engine.prefix_cache import PrefixCache, chain_key, prompt_keys, root_key, salted_key
from paceline.engine.sequence import SequenceState

_UNBOUNDED = 1 << 62


class Prefixes:
    """Of all sequences of one engine. The cache is the pool's."""

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self.queried_tokens = self.hit_tokens = 0
        """Of prompts."""
        self._block_size, self._one_path = executor.block_size, executor.one_path
        self._caching = config.prefix_cache
        self._root = root_key(executor.numerics_id, config.model_digest)
        self._computing: dict[bytes, SequenceState] = {}
        """Keys of prompt blocks that a running sequence is about to fill."""

    def name(self, seq: SequenceState) -> None:
        """Name the blocks of a new sequence's prompt."""
        if self._caching and not seq.request.scores_prompt:  # a block that is found has no logits
            seq.keys = prompt_keys(self._root_of(seq), seq.tokens[: seq.n_prompt], self._block_size)
            seq.n_publishable = _UNBOUNDED if self._one_path else len(seq.keys)

    def use_blocks_of(self, tokens: int, waiting: Iterable[SequenceState]) -> None:
        """Blocks hold so many tokens from now on: those of sequences that wait are named anew. Nothing is cached, and none runs."""
        if tokens != self._block_size:
            self._block_size = tokens
            for seq in waiting:
                self.name(seq)

    def find(self, seq: SequenceState, cache: PrefixCache) -> Sequence[BlockId] | None:
        """Blocks with which a sequence may begin, or None while another computes the next of them."""
        keys = self._wanted(seq)
        hits = cache.match(keys)
        return None if len(hits) < len(keys) and keys[len(hits)] in self._computing else hits

    def begun(self, seq: SequenceState, n_hits: int) -> None:
        """A sequence runs, with so many blocks that were found."""
        seq.n_published = n_hits
        for key in self._wanted(seq)[n_hits:]:
            self._computing.setdefault(key, seq)
        if seq.cached_tokens is None:
            seq.cached_tokens = n_hits * self._block_size
            if seq.n_publishable:
                self.queried_tokens += seq.n_prompt
                self.hit_tokens += seq.cached_tokens

    def publish(self, seq: SequenceState, settled: int, cache: PrefixCache) -> None:
        """Offer full blocks, of the first `settled` tokens."""
        for index in range(seq.n_published, min(settled // self._block_size, seq.n_publishable)):
            if index == len(seq.keys):
                start = index * self._block_size
                parent = seq.keys[-1] if seq.keys else self._root_of(seq)
                seq.keys.append(chain_key(parent, seq.tokens[start : start + self._block_size]))
            cache.insert(seq.keys[index], seq.blocks[index])
            self._waive(seq, seq.keys[index])
            seq.n_published += 1

    def stopped(self, seq: SequenceState) -> None:
        """A sequence computes no further, for now or for good: no other waits for it."""
        for key in seq.keys[seq.n_published :]:
            self._waive(seq, key)

    def check_invariants(self, holders: Container[SequenceState]) -> None:
        """Assert that a sequence that others wait for holds blocks."""
        assert all(seq in holders for seq in self._computing.values()), "a key waits for a sequence that is gone"

    def _root_of(self, seq: SequenceState) -> bytes:
        return salted_key(self._root, seq.request.caller, seq.request.cache_salt)

    def _wanted(self, seq: SequenceState) -> Sequence[bytes]:
        """Keys of blocks that may be found. The last token's row must run: its logits are what is wanted."""
        return seq.keys[: (len(seq.tokens) - 1) // self._block_size]

    def _waive(self, seq: SequenceState, key: bytes) -> None:
        if self._computing.get(key) is seq:
            del self._computing[key]
