"""The attention kernels against the definition in NumPy, bit for bit; and that neither tiles nor pieces change a bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from tests.unit.backends.cpu.attention_reference import attend as reference

from paceline.backends import cpu
from paceline.backends.cpu import Lowering

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from numba import njit

from paceline.backends.cpu import attention
from paceline.backends.cpu.attention import SEGMENT, flush_denormals, mix, restore_denormals, score
from paceline.backends.cpu.pages import write_key, write_value
from paceline.backends.cpu.sizes import ATTENTION_TILES, BLOCK, TILE, aligned, record_bytes, scratch_bytes
from paceline.backends.cpu.weights import sink_records

Bits = npt.NDArray[np.uint16]

attend, finish = njit(attention.attend.py_func), njit(attention.finish.py_func)
"""With a way in from Python."""


@njit
def write(block: int, values: int, slot: int, left: int, k: int, v: int, head_dim: int, value_dim: int, zeros: int) -> None:
    write_key(block, slot, k, head_dim)
    write_value(values, slot, left, v, value_dim, zeros)


@njit
def score_and_mix(
    fused: bool, table: int, blocks: int, keys: int, stride: int, q: int, weights: int, head_dim: int, scores: int, out: int
) -> None:
    mode = flush_denormals()
    if fused:
        score(1, 8, 2, table, blocks, keys, stride, q, head_dim, scores)
        mix(1, 8, 2, table, blocks, keys + 2 * BLOCK * head_dim, stride, weights, head_dim, out, 4 * head_dim)
    else:
        score(0, 8, 2, table, blocks, keys, stride, q, head_dim, scores)
        mix(0, 8, 2, table, blocks, keys + 2 * BLOCK * head_dim, stride, weights, head_dim, out, 4 * head_dim)
    restore_denormals(mode)


def widen(bits: Bits) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Cache:
    """One KV head's keys and values of a sequence, in blocks at scattered places."""

    k_KD: Bits
    v_KD: Bits
    pool: npt.NDArray[np.uint8]
    table: npt.NDArray[np.int32]

    @property
    def block_bytes(self) -> int:
        return 2 * BLOCK * (self.k_KD.shape[1] + self.v_KD.shape[1])


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> Bits:
    return ((rng.standard_normal(shape, np.float32) * np.float32(scale)).view(np.uint32) >> 16).astype(np.uint16)


def cache(rng: np.random.Generator, k_KD: Bits, v_KD: Bits) -> Cache:
    (tokens, dim), value_dim = k_KD.shape, v_KD.shape[1]
    blocks = -(-tokens // BLOCK)
    pool = aligned(2 * BLOCK * (dim + value_dim) * (blocks + 3))
    pool.view(np.uint16)[:] = 0x7F80  # infinities: what is stale must not count
    table = rng.permutation(blocks + 3)[:blocks].astype(np.int32)
    zeros = np.zeros(dim, np.uint16)
    for token in range(tokens):
        block = pool.ctypes.data + int(table[token // BLOCK]) * 2 * BLOCK * (dim + value_dim)
        write(
            block,
            block + 2 * BLOCK * dim,
            token % BLOCK,
            tokens - token,
            k_KD[token].ctypes.data,
            v_KD[token].ctypes.data,
            dim,
            value_dim,
            zeros.ctypes.data,
        )
    return Cache(k_KD, v_KD, pool, table)


def run(kv: Cache, q_THD: Bits, first: int, pieces: int = 1, window: int = 0, sinks: npt.NDArray[np.float32] | None = None) -> Bits:
    """Attention of T rows from position `first`, H query heads; in pieces of its segments."""
    (rows, heads, dim), value_dim = q_THD.shape, kv.v_KD.shape[1]
    out = np.zeros((rows, heads, value_dim), np.uint16)
    segments = (first + rows - 1) // SEGMENT + 1
    scale = int(np.float32(dim**-0.5 * math.log2(math.e)).view(np.int32))
    apart = segments if pieces > 1 else 0
    scratch, records = aligned(scratch_bytes(rows * heads, value_dim)), aligned(rows * heads * max(1, apart) * record_bytes(value_dim))
    cuts = np.linspace(0, segments, pieces + 1).astype(int)
    for start, stop in reversed(list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))):
        attend(kv.table.ctypes.data, kv.pool.ctypes.data, kv.block_bytes, q_THD.ctypes.data, 2 * heads * dim, heads, rows, first, window, dim,
               value_dim, scale, start, stop, records.ctypes.data, apart, scratch.ctypes.data)  # fmt: skip
    last = None if sinks is None else sink_records(sinks, value_dim)
    finish(
        rows,
        heads,
        first,
        window,
        value_dim,
        records.ctypes.data,
        apart,
        out.ctypes.data,
        2 * heads * value_dim,
        0 if last is None else last.ctypes.data,
    )
    return out


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dim", "value_dim", "heads"), [(32, 32, 1), (64, 64, 3), (96, 96, 7), (96, 64, 1), (128, 96, 5), (128, 128, 4), (256, 256, 16)]
)
@pytest.mark.parametrize("magnitude", [0.3, 3.0])
def test_attention_is_the_definition(dim: int, value_dim: int, heads: int, magnitude: float) -> None:
    rng = np.random.default_rng(dim)
    tokens, rows = 2 * SEGMENT + 9, 12
    kv = cache(rng, normal(rng, (tokens, dim), magnitude), normal(rng, (tokens, value_dim)))
    for first in (0, 29, SEGMENT - 5, tokens - rows):
        q_THD = normal(rng, (rows, heads, dim), magnitude)
        out = run(kv, q_THD, first)
        for row, head in ((0, 0), (4, heads - 1), (5, 0), (rows - 1, heads // 2)):
            seen = first + row + 1
            expected = reference(widen(q_THD[row, head]), widen(kv.k_KD[:seen]), widen(kv.v_KD[:seen]))
            np.testing.assert_array_equal(widen(out[row, head]), expected)
            assert np.abs(expected).max() > 0


WINDOWS = (1, 7, 40, SEGMENT, SEGMENT + 33)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_the_definition(window: int) -> None:
    rng = np.random.default_rng(window)
    dim, heads, tokens, rows = 64, 3, 3 * SEGMENT + 9, 43
    kv = cache(rng, normal(rng, (tokens, dim), 2.0), normal(rng, (tokens, dim)))
    for first in (0, 29, SEGMENT - 5, SEGMENT + 20, tokens - rows):
        q_THD = normal(rng, (rows, heads, dim), 2.0)
        out = run(kv, q_THD, first, window=window)
        for row in (0, 4, 5, rows // 2, rows - 1):
            seen, head = first + row + 1, row % heads
            expected = reference(widen(q_THD[row, head]), widen(kv.k_KD[:seen]), widen(kv.v_KD[:seen]), window)
            np.testing.assert_array_equal(widen(out[row, head]), expected)


@pytest.mark.parametrize("window", [0, 40])
def test_sinks_are_the_definition(window: int) -> None:
    rng = np.random.default_rng(5)
    dim, heads, tokens, rows = 64, 4, SEGMENT + 9, 5
    kv, sinks = cache(rng, normal(rng, (tokens, dim), 2.0), normal(rng, (tokens, dim))), np.array([-200.0, 0.3, 4.0, 300.0], np.float32)
    for first in (0, tokens - rows):
        q_THD = normal(rng, (rows, heads, dim), 2.0)
        out = run(kv, q_THD, first, window=window, sinks=sinks)
        np.testing.assert_array_equal(run(kv, q_THD, first, 2, window, sinks), out)
        for row in (0, rows - 1):
            for head in range(heads):
                seen = first + row + 1
                expected = reference(widen(q_THD[row, head]), widen(kv.k_KD[:seen]), widen(kv.v_KD[:seen]), window, float(sinks[head]))
                np.testing.assert_array_equal(widen(out[row, head]), expected)
        assert np.array_equal(out[:, 0], run(kv, q_THD, first, window=window)[:, 0])  # what has no weight takes none
        assert not out[:, 3].any()


@pytest.mark.parametrize("scale", [1e-20, 1e-38])
def test_denormals_are_zero(scale: float) -> None:
    """Products and values around the least normal number: where flushing before, after or not at all would show."""
    rng = np.random.default_rng(3)
    tokens, dim = 40, 32
    kv = cache(rng, normal(rng, (tokens, dim), scale), normal(rng, (tokens, dim), 1e-38))
    q_THD = normal(rng, (1, 4, dim), 1e-18)
    out = run(kv, q_THD, tokens - 1)
    for head in range(4):
        expected = reference(widen(q_THD[0, head]), widen(kv.k_KD), widen(kv.v_KD))
        np.testing.assert_array_equal(out[0, head], (expected.view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("window", [0, 40, SEGMENT, SEGMENT + 33])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("value_dim", [64, 32])
def test_tiles_and_pieces_change_nothing(heads: int, window: int, value_dim: int) -> None:
    rng = np.random.default_rng(heads)
    dim, rows, tokens = 64, 37, 3 * SEGMENT + 70
    kv = cache(rng, normal(rng, (tokens, dim)), normal(rng, (tokens, value_dim)))
    for first in (SEGMENT - 20, tokens - rows):
        q_THD = normal(rng, (rows, heads, dim))
        whole = run(kv, q_THD, first, window=window)
        for pieces in range(2, (first + rows - 1) // SEGMENT + 2):
            np.testing.assert_array_equal(run(kv, q_THD, first, pieces, window), whole)
        at = 0
        for count in (1, 2, 3, 11, 20):
            np.testing.assert_array_equal(run(kv, q_THD[at : at + count].copy(), first + at, window=window), whole[at : at + count])
            at += count
        for head in range(heads):
            np.testing.assert_array_equal(run(kv, q_THD[:, head : head + 1].copy(), first, window=window)[:, 0], whole[:, head])


@pytest.mark.parametrize("lowering", Lowering)
def test_each_instruction_set_has_tiles_for_any_number_of_rows(lowering: Lowering) -> None:
    rows = [tile.rows for tile in ATTENTION_TILES[lowering]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-4:] == [4, 3, 2, 1]
    assert rows[0] <= TILE


def test_pairs_of_bf16_are_two_fused_multiplications() -> None:
    """VDPBF16PS and FMA on widened pairs: the same bits, whatever the exponents."""
    rng = np.random.default_rng(5)
    dim, tokens = 128, 64
    for spread in (1.0, 20.0, 43.0):
        draw = lambda *shape, s=spread: normal(rng, shape) ^ (rng.integers(-int(s), int(s) + 1, shape) * 128).astype(np.uint16)  # noqa: E731
        kv = cache(rng, draw(tokens, dim), draw(tokens, dim))
        q, w = draw(8, dim), draw(8, tokens)
        answers = list[bytes]()
        for fused in (False, True):
            table = kv.table.ctypes.data
            scores, out = aligned(8 * (4 * SEGMENT + 64)), aligned(8 * 4 * dim)
            placed = [aligned(8 * 1088), aligned(8 * (4 * SEGMENT + 64))]
            for rows, place, stride in ((q, placed[0], 1088), (w, placed[1], 4 * SEGMENT + 64)):
                for m, row in enumerate(rows):
                    data = np.frombuffer((row if fused else widen(row)).tobytes(), np.uint8)
                    place[m * stride : m * stride + len(data)] = data
            score_and_mix(fused, table, tokens // BLOCK, kv.pool.ctypes.data, kv.block_bytes, placed[0].ctypes.data, placed[1].ctypes.data,
                          dim, scores.ctypes.data, out.ctypes.data)  # fmt: skip
            answers.append(scores.tobytes() + out.tobytes())
        assert np.count_nonzero(np.frombuffer(answers[0], np.float32)) > 8 * tokens / 2
        assert answers[0] == answers[1]
