"""Records hold every bit of a file's rows, whoever packs which of them; and rows of an embedding come back out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from paceline.backends import cpu
from paceline.backends.quantize import round_to_bf16

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from tests.unit.backends.cpu import arithmetic

from paceline.backends.cpu.forms import LAYOUT, Form
from paceline.backends.cpu.pack import pack_rows, row_bytes
from paceline.backends.cpu.rows import embed_rows
from paceline.backends.cpu.sizes import aligned

pytestmark = pytest.mark.timeout(300)
N, K = 75, 512


def packed(form: Form, rows: np.ndarray, cuts: list[int], threads: int = 1) -> np.ndarray:
    out = aligned(LAYOUT[form].packed_bytes(len(rows), K))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda ends: pack_rows(form, rows[slice(*ends)], ends[0], out), pairwise(cuts)))
    return out


@pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
def test_a_record_takes_the_bytes_of_its_rows(form: Form) -> None:
    assert LAYOUT[form].packed_bytes(16, K) == 16 * row_bytes(form, K)


@pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
def test_slabs_and_threads_change_nothing(form: Form) -> None:
    rows = arithmetic.random_rows(form, N, K, np.random.default_rng(form))
    whole = packed(form, rows, [0, N])
    assert whole.any()
    assert np.array_equal(packed(form, rows, [0, 16, 48, 64, N], threads=2), whole)


@pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
def test_rows_of_an_embedding_come_back_out(form: Form) -> None:
    rows = arithmetic.random_rows(form, N, K, np.random.default_rng(form))
    table = packed(form, rows, [0, N])
    ids = np.array([0, 15, 16, 74, 3, 3, 40], np.int32)
    out = np.zeros((len(ids), K), np.uint16)
    embed_rows(form, table.ctypes.data, ids, out)
    if form is Form.BF16:
        assert np.array_equal(out, rows.view(np.uint16)[ids])
        values = arithmetic.widen(rows.view(np.uint16))
    else:
        values = dequantize(rows, GGMLQuantizationType[form.name])
        assert np.array_equal(arithmetic.matrix(form, rows).values(), values)
        assert np.array_equal(out, round_to_bf16(values[ids]))
    embed_rows(form, table.ctypes.data, ids, out, 25.3)
    assert np.array_equal(out, round_to_bf16(values[ids] * np.float32(25.3)))


def test_outputs_that_do_not_fill_a_block_are_followed_by_zeros() -> None:
    table = packed(Form.BF16, np.full((5, 2 * K), 0x3F, np.uint8), [0, 5])
    lanes = table.view(np.uint16).reshape(K // 32, 16, 16, 2)
    assert (lanes[:, :, :5] == 0x3F3F).all()
    assert not lanes[:, :, 5:].any()


def test_rows_that_do_not_fit_are_refused() -> None:
    out = aligned(LAYOUT[Form.Q4_K].packed_bytes(16, K))
    with pytest.raises(ValueError, match="Q4_K"):
        pack_rows(Form.Q4_K, np.zeros((17, row_bytes(Form.Q4_K, K)), np.uint8), 0, out)
    for first in (1, 16):
        with pytest.raises(ValueError, match=f"from row {first} "):
            pack_rows(Form.Q4_K, np.zeros((16, row_bytes(Form.Q4_K, K)), np.uint8), first, out)
