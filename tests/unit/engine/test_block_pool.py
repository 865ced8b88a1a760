"""The pool's law under random use, and the prefix cache's keys and order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from paceline.core.ids import BlockId
from paceline.engine.prefix_cache import BlockPool, chain_key, prompt_keys, root_key

ROOT = root_key("numerics", "digest")


class TestKeys:
    def test_name_everything_before_a_blocks_end(self) -> None:
        keys = prompt_keys(ROOT, range(10), 4)
        assert len(keys) == 2
        assert keys == [chain_key(ROOT, [0, 1, 2, 3]), chain_key(chain_key(ROOT, [0, 1, 2, 3]), [4, 5, 6, 7])]
        assert prompt_keys(ROOT, [9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != keys[1]

    def test_name_the_model_and_its_numerics(self) -> None:
        roots = {root_key("a", "b"), root_key("a", "c"), root_key("c", "b"), root_key("ab", "")}
        assert len(roots) == 4

    @pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
    def test_cover_full_blocks_only(self, tokens: int, blocks: int) -> None:
        assert len(prompt_keys(ROOT, range(tokens), 4)) == blocks


def filled(pool: BlockPool, n: int, start: int = 0) -> tuple[list[bytes], list[BlockId]]:
    """Take n blocks and publish them as one chain."""
    keys = prompt_keys(ROOT, range(start, start + 4 * n), 4)
    blocks = [pool.take() for _ in keys]
    for key, block in zip(keys, blocks, strict=True):
        pool.cache.insert(key, block)
    return keys, blocks


class TestEviction:
    def test_free_blocks_go_first_then_the_end_of_the_chain_idle_for_longest(self) -> None:
        pool = BlockPool(5)
        old_keys, old = filled(pool, 2)
        new_keys, new = filled(pool, 2, 100)
        pool.give_back(reversed(old))
        pool.give_back(reversed(new))
        assert pool.take() == 4
        assert pool.take() == old[1]
        assert pool.cache.match(old_keys) == old[:1]
        assert pool.take() == old[0]
        assert pool.cache.match(new_keys) == new

    def test_a_hit_makes_a_block_young_again(self) -> None:
        pool = BlockPool(4)
        old_keys, old = filled(pool, 2)
        _, new = filled(pool, 2, 100)
        pool.give_back(reversed(old))
        pool.give_back(reversed(new))
        for block in old:
            pool.share(block)
        assert pool.available == 2
        pool.give_back(reversed(old))
        assert [pool.take(), pool.take()] == [new[1], new[0]]
        assert pool.cache.match(old_keys) == old

    def test_a_block_in_use_is_never_handed_out(self) -> None:
        pool = BlockPool(2)
        _, blocks = filled(pool, 1)
        pool.share(blocks[0])
        pool.give_back(blocks)
        assert pool.take() != blocks[0]
        assert pool.available == 0

    def test_a_second_block_of_one_key_stays_private(self) -> None:
        pool = BlockPool(2)
        keys, blocks = filled(pool, 1)
        twin = pool.take()
        pool.cache.insert(keys[0], twin)
        assert pool.cache.match(keys) == blocks
        pool.give_back([twin])
        assert twin not in pool.cache
        pool.check_invariants([blocks])


@given(
    st.integers(1, 10), st.lists(st.tuples(st.sampled_from(["take", "publish", "hit", "end", "forget"]), st.integers(0, 9)), max_size=80)
)
@settings(max_examples=examples(200), deadline=None)
def test_law_holds_under_any_use(n_blocks: int, operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(n_blocks)
    tables: list[list[BlockId]] = []
    for operation, number in operations:
        match operation:
            case "take" if pool.available:
                tables.append([pool.take() for _ in range(min(pool.available, 1 + number % 3))])
            case "publish" if tables:
                table = tables[number % len(tables)]
                for key, block in zip(prompt_keys(ROOT, range(number * 10, number * 10 + 4 * len(table)), 4), table, strict=True):
                    pool.cache.insert(key, block)
            case "hit":
                hits = pool.cache.match(prompt_keys(ROOT, range(number * 10, number * 10 + 12), 4))
                for block in hits:
                    pool.share(block)
                tables.append(hits)
            case "end" if tables:
                pool.give_back(reversed(tables.pop(number % len(tables))))
            case "forget" if number == 0:
                pool.forget_idle()
                assert not pool.cache.n_idle
            case _:
                pass
        pool.check_invariants(tables)
    while tables:
        pool.give_back(tables.pop())
    pool.check_invariants([])
    assert pool.available == n_blocks


@pytest.mark.parametrize("damage", ["leak", "twice", "alias"])
def test_damage_is_found(damage: str) -> None:
    pool = BlockPool(4)
    table = [pool.take(), pool.take()]
    match damage:
        case "leak":
            tables = [table[:1]]
        case "twice":
            pool._free.append(table[0])
            tables = [table]
        case _:
            tables = [table, table[:1]]
    with pytest.raises(AssertionError):
        pool.check_invariants(tables)


def test_a_name_stands_for_the_same_tokens_whatever_the_size_of_blocks() -> None:
    narrow, wide = prompt_keys(ROOT, range(200), 16), prompt_keys(ROOT, range(200), 64)
    assert wide == narrow[3::4]
