"""Slices of KV between unlike numbers of ranks, or stages: against copying head by head."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from tests.conformance.suites.layer_runner import Rows, RunnerCase, plan_of, tokens
from tests.conformance.test_layer_runners import LLAMA

from paceline.backends import torch
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange, WeightsFormat
from paceline.ways.kv.slices import kv_slices


def heads_of_ranks(n_heads: int, size: int) -> tuple[range, ...]:
    """The KV heads of each of `size` ranks: as even as may be; of more ranks than heads, several have the same one."""
    if size <= n_heads:
        return tuple(range(rank * n_heads // size, (rank + 1) * n_heads // size) for rank in range(size))
    return tuple(range(rank * n_heads // size, rank * n_heads // size + 1) for rank in range(size))


def by_hand(n: int, sources: tuple[range, ...], targets: tuple[range, ...]) -> None:
    """Copy the slices; every target then has, in its order, what it holds, each of it written once, out of a source that has it."""
    held = [[f"{one}" for one in source] for source in sources]
    got: list[list[str | None]] = [[None] * len(target) for target in targets]
    for slice_ in kv_slices(sources, targets):
        for step, one in enumerate(slice_.part):
            assert held[slice_.source][slice_.source_at + step] == f"{one}"
            assert got[slice_.target][slice_.target_at + step] is None, "it is sent twice"
            got[slice_.target][slice_.target_at + step] = f"{one}"
    assert got == [[f"{one}" for one in target] for target in targets]
    assert {one for target in targets for one in target} == set(range(n))


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 8, 9, 32])
def test_any_two_numbers_of_ranks(n_heads: int) -> None:
    sizes = [1, 2, 3, 4, 5, 8, 16]
    for p in sizes:
        for d in sizes:
            by_hand(n_heads, heads_of_ranks(n_heads, p), heads_of_ranks(n_heads, d))


def test_any_split_of_either_even_or_not() -> None:
    draw = random.Random(5)

    def split(n: int, parts: int) -> tuple[range, ...]:
        cuts = [0, *sorted(draw.sample(range(1, n), parts - 1)), n]
        return tuple(range(start, stop) for start, stop in pairwise(cuts))

    for _ in range(300):
        n = draw.randrange(2, 40)
        by_hand(n, split(n, draw.randrange(1, min(n, 9) + 1)), split(n, draw.randrange(1, min(n, 9) + 1)))


def test_more_ranks_than_heads_have_some_alike_and_targets_take_turns_among_them() -> None:
    assert heads_of_ranks(2, 4) == (range(1), range(1), range(1, 2), range(1, 2))
    slices = kv_slices(heads_of_ranks(2, 4), heads_of_ranks(2, 4))
    assert [(one.source, one.target) for one in slices] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_uneven_heads_leave_no_rank_with_two_more_than_another() -> None:
    for n in range(1, 40):
        for size in range(1, n + 1):
            lengths = [len(part) for part in heads_of_ranks(n, size)]
            assert max(lengths) - min(lengths) <= 1
            assert sum(lengths) == n


def test_what_no_source_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="no source has 4"):
        kv_slices((range(4), range(5, 8)), (range(8),))


CUTS = [(range(3),), (range(1), range(1, 3)), (range(2), range(2, 3)), (range(1), range(1, 2), range(2, 3))]


@pytest.mark.parametrize("targets", CUTS, ids=str)
@pytest.mark.parametrize("sources", CUTS, ids=str)
def test_stages_of_other_spans_have_blocks_slice_by_slice(sources: tuple[range, ...], targets: tuple[range, ...]) -> None:
    """One machine and pipelines of any spans: what is copied is what the target's stages compute themselves."""
    case = RunnerCase("torch", torch.load, LLAMA, WeightsFormat.BF16)

    def computed(spans: tuple[range, ...], at: int) -> list[bytearray]:
        """The block of each stage, after a prompt ran through all."""
        runners = [case.runner(layers=LayerRange(span.start, span.stop), edges=not span.start) for span in spans]
        try:
            block = Rows(tokens(runners[0].block_size, LLAMA.vocab), 0, [at])
            x_TD = runners[0].embed(np.array(block.ids, np.int32))
            found: list[bytearray] = []
            for runner in runners:
                x_TD = runner.run_layers(x_TD, plan_of([block]))
                found.append(bytearray(runner.block_bytes))
                runner.export_block(BlockId(at), memoryview(found[-1]))
            return found
        finally:
            for runner in runners:
                runner.close()

    there, here = computed(sources, 1), computed(targets, 4)
    got = [bytearray(len(block)) for block in here]
    for one in kv_slices(sources, targets):
        layer = len(there[one.source]) // len(sources[one.source])
        part = there[one.source][one.source_at * layer : (one.source_at + len(one.part)) * layer]
        got[one.target][one.target_at * layer : (one.target_at + len(one.part)) * layer] = part
    assert got == here
