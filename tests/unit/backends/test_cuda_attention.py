"""Keys in segments on a GPU: what is handed to the kernels, with plain ones in their place, is attention over all keys of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.backends.torch import cuda_attention
from paceline.backends.torch.attention import Rope
from paceline.backends.torch.cuda_attention import Batch, CudaPool, CudaStep, OnDevice, batch_of, rows_apart
from paceline.core.model import RopeSpec
from paceline.engine.local import RowPlan

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 6, 2, 8
ROWS = 12
"""Of a graph."""
N_BLOCKS = 40
PAGE, PAGES, SEGMENT = 16, 4, 64
"""Small, so that plain loops get through them."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAGE", PAGE), ("_PAGES", PAGES), ("SEGMENT", SEGMENT)):
        monkeypatch.setattr(cuda_attention, name, value)


def flash(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, most: int, most_keys: int, *, window_size: tuple[int, int], scale: float, enable_gqa: bool, seqused_k: Tensor, block_table: Tensor, num_splits: int, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernel is documented to do, a row at a time."""
    assert num_splits == 1
    assert most >= int(starts.diff().max())
    assert most_keys >= int(seqused_k.max())
    assert torch.equal(key_starts.diff(), seqused_k)
    assert not bool((starts.diff() * (seqused_k == 0)).any())  # the kernel spoils other pieces' logarithms for rows without keys
    assert enable_gqa == (q.shape[1] != keys.shape[2])
    out, logs = torch.zeros(q.shape), torch.full((q.shape[1], len(q)), torch.inf)
    for piece, (first, end, n) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), seqused_k.tolist(), strict=True)):
        pages = block_table[piece].long()
        own_keys, own_values = (
            pool[pages].flatten(0, 1)[:n].float().repeat_interleave(q.shape[1] // KV_HEADS, 1) for pool in (keys, values)
        )
        for row in range(first, end):
            at = n - (end - row)  # aligned with the last key
            low = 0 if window_size[0] < 0 else max(0, at - window_size[0])
            high = n if window_size[1] < 0 else at + 1
            scores = torch.einsum("hd,khd->hk", q[row].float(), own_keys[low:high]) * scale
            out[row], logs[:, row] = torch.einsum("hk,khd->hd", scores.softmax(-1), own_values[low:high]), scores.logsumexp(-1)
    return out, logs


def merge(own: Tensor, own_logs: Tensor, parts: Tensor, parts_logs: Tensor, places_TS: Tensor, n_heads: int, n_kv: int) -> Tensor:
    per_kv = n_heads // n_kv if own.shape[1] != n_heads else 1

    def of(means: Tensor, logs: Tensor, row: int) -> tuple[Tensor, Tensor]:
        beside = slice(row * per_kv, (row + 1) * per_kv)
        return means[beside].transpose(0, 1).reshape(n_heads, -1), logs[:, beside].reshape(n_heads)

    rows = list[Tensor]()
    for row, places in enumerate(places_TS.tolist()):
        found = [of(parts, parts_logs, place) for place in places if place >= 0] + [of(own, own_logs, row)]
        weights = torch.stack([logs for _, logs in found]).softmax(0)
        rows.append(sum(weight[:, None] * means for weight, (means, _) in zip(weights, found, strict=True)))  # pyright: ignore[reportArgumentType]
    return torch.stack(rows)


def plan_of(sequences: Sequence[tuple[int, int]]) -> RowPlan:
    """Of (first position, rows); blocks lie anywhere, and tables are as long as the longest needs."""
    counts = np.array([rows for _, rows in sequences], np.int32)
    firsts = np.array([first for first, _ in sequences], np.int32)
    width = -(-int((firsts + counts).max()) // PAGE)
    tables, blocks = np.full((len(sequences), width), -1, np.int32), np.random.default_rng(1).permutation(N_BLOCKS)
    used = 0
    for row, end in enumerate((firsts + counts).tolist()):
        own = -(-end // PAGE)
        tables[row, :own] = blocks[used : used + own]
        used += own
    return RowPlan((np.cumsum(counts) - counts).astype(np.int32), counts, firsts, np.zeros(len(counts), np.int32), tables)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "sequences",
    [
        [(0, 3)],
        [(SEGMENT - 2, 4)],
        [(5, 1), (SEGMENT, 1), (3 * SEGMENT + 7, 2), (2 * SEGMENT - 1, 1)],
        [(0, 7), (2 * SEGMENT - 3, 5)],
        [(40, 2 * SEGMENT), (1, 1)],
        [(7 * SEGMENT - 3, ROWS)],
    ],
    ids=str,
)
def test_each_row_attends_to_all_keys_up_to_its_own(
    monkeypatch: pytest.MonkeyPatch, sequences: list[tuple[int, int]], *, packed: bool, window: int
) -> None:
    plan = plan_of(sequences)
    rows = int(plan.n_rows_S.sum())
    if packed and rows > ROWS:
        pytest.skip("more rows than a graph has")
    monkeypatch.setattr(cuda_attention, "varlen_attn", flash)
    monkeypatch.setattr(cuda_attention.cuda_kernels, "merge", merge)
    generator = torch.Generator().manual_seed(0)
    pool = CudaPool(1, N_BLOCKS + 1, KV_HEADS, WIDTH, CPU)
    for pages in pool.pages[0]:
        pages.copy_(torch.randn(pages.shape, generator=generator))
    if packed:
        most = (int((plan.first_position_S + plan.n_rows_S).max()) - 1) // SEGMENT
        n_earlier = 1 << (most - 1).bit_length() if most else 0
        there = OnDevice.of(rows_apart(plan, ROWS, n_earlier, HEADS // KV_HEADS, N_BLOCKS, whole=True), CPU)
        batch = Batch(there.apart, HEADS // KV_HEADS, (n_earlier + 1) * SEGMENT, packed=True)
    else:
        batch = batch_of(plan, CPU, whole=True)
    made = ROWS if packed else rows
    q, k, v = (torch.randn(made, heads, WIDTH, generator=generator).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = CudaStep(batch, pool, Rope(RopeSpec(1e4), WIDTH, 16, CPU), 0.3).attend(0, q, k, v, window)[:rows].unflatten(1, (HEADS, WIDTH))
    row = 0
    for (first, count), table in zip(sequences, plan.tables_SB, strict=True):
        keys, values = (pages[torch.from_numpy(table).long()].flatten(0, 1).float() for pages in pool.pages[0])
        assert torch.equal(keys[first : first + count], k[row : row + count].float())
        for position in range(first, first + count):
            seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
            scores = torch.einsum("hd,khd->hk", q[row].float(), keys[seen].repeat_interleave(HEADS // KV_HEADS, 1)) * 0.3
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen].repeat_interleave(HEADS // KV_HEADS, 1))
            torch.testing.assert_close(out[row].float(), expected, atol=1e-4, rtol=1e-4)
            row += 1


def test_arrays_of_a_graph_are_filled_anew() -> None:
    first, second = (rows_apart(plan_of(each), ROWS, 2, 3, N_BLOCKS, whole=True) for each in ([(5, 1)], [(2 * SEGMENT, 2), (9, 1)]))
    there = OnDevice.of(first, CPU)
    there.fill(second)
    for name, array in second.items():
        assert np.array_equal(there.apart[name].numpy(), array), name
