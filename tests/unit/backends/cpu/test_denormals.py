"""What is denormal is zero in products of bf16 and in attention once it is rounded, not before: numbers around 2**-126, where processors differ.

x86 flushes a result after it was rounded, ARM before; without flushing, results are rounded to fewer bits there. docs/internals/arithmetic.md has the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from numba import njit
from numba.core import types
from numba.extending import intrinsic
from tests.unit.backends.cpu import attention_reference as reference
from tests.unit.backends.cpu.test_attention import cache, run
from tests.unit.backends.cpu.test_products import Product

from paceline.backends.cpu.attention import flush_denormals, restore_denormals
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.pack import pack_rows
from paceline.backends.cpu.simd import Emit, F, Value
from paceline.backends.quantize import round_to_bf16

Float = npt.NDArray[np.float32]
LEAST = 2.0**-126
TAKEN = {0.0: LEAST, 2.0**-152: LEAST, 2.0**-151: LEAST, 2.0**-151 * (1 + 2.0**-4): 0.0, 2.0**-150: 0.0}
"""What is taken from 2**-126, and what is left by the rule. ARM flushes the second and the third, rounding to denormals keeps the fourth."""


def _of_vectors(operation: Callable[[Emit, Sequence[Value]], Value]) -> Callable[..., None]:
    @intrinsic
    def apply(_: Any, a: Any, b: Any, c: Any, out: Any) -> Any:
        def body(e: Emit, args: Sequence[Value]) -> None:
            *inputs, out = args
            e.store(operation(e, [e.load(F, each) for each in inputs]), out)

        return lowered(body, types.void, *[types.int64] * 4)

    @njit
    def call(a: int, b: int, c: int, out: int) -> None:
        before = flush_denormals()
        apply(a, b, c, out)
        restore_denormals(before)

    def on_arrays(a: Float, b: Float, c: Float) -> Float:
        out = np.empty_like(a)
        for i in range(0, len(a), 16):
            call(*(int(each[i : i + 16].ctypes.data) for each in (a, b, c, out)))
        return out

    return on_arrays


def _near_the_least(rng: np.random.Generator, n: int) -> tuple[Float, Float, Float]:
    """a * b + c at and a little under 2**-126, of either sign."""
    steps, taken = rng.integers(0, 2**15, n), rng.choice(list(TAKEN), n)
    sign = rng.choice([-1.0, 1.0], n)
    c = sign * (LEAST + steps * 2.0**-149)
    return (-sign * (steps * 2.0**-149 + taken) * 2.0**63).astype(np.float32), np.full(n, 2.0**-63, np.float32), c.astype(np.float32)


def test_a_multiply_add_is_flushed_after_it_is_rounded() -> None:
    fma = _of_vectors(lambda e, args: e.careful_fma(*args))
    a, b, c = _near_the_least(np.random.default_rng(1), 1024)
    wanted = reference.fma(a, b, c)
    assert fma(a, b, c).tobytes() == wanted.tobytes()
    assert {0.0, LEAST} == set(np.abs(wanted).tolist())
    # What overflows where it is computed at another size is right all the same, and so is what is far from all this.
    rng = np.random.default_rng(2)
    a, b, c = (np.ldexp(rng.standard_normal(1024), rng.integers(-126, 127, 1024)).astype(np.float32) for _ in range(3))
    with np.errstate(over="ignore"):
        assert fma(a, b, c).tobytes() == reference.fma(a, b, c).tobytes()


def test_a_product_is_flushed_after_it_is_rounded() -> None:
    mul = _of_vectors(lambda e, args: e.careful_mul(*args[:2]))
    part = 1 + np.random.default_rng(3).random(4096)
    a, b = (part * 2.0**-63).astype(np.float32), (1 / part * 2.0**-63).astype(np.float32)
    wanted = reference.mul(a, b)
    assert mul(a, b, a).tobytes() == wanted.tobytes()
    assert {0.0, LEAST} <= set(wanted.tolist())


def test_products_of_bf16() -> None:
    case = Product(Form.BF16, 16, 32, len(TAKEN))
    weights = np.zeros((16, 32), np.float32)
    weights[:, 0], weights[:, 1] = 2.0**-63, 2.0**-63
    weights[8:] *= -1
    pack_rows(Form.BF16, round_to_bf16(weights).view(np.uint8), 0, case.packed)
    x = np.zeros((len(TAKEN), 32), np.float32)
    x[:, 1], x[:, 0] = 2.0**-63, [-taken * 2.0**63 for taken in TAKEN]
    case.x = round_to_bf16(x)
    for rows in range(1, len(TAKEN) + 1):
        found = case.run(0, rows, [0, 1])
        assert found[:, 0].tolist() == list(TAKEN.values())[:rows]
        assert found[:, 15].tolist() == [-left for left in TAKEN.values()][:rows]


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention(heads: int) -> None:
    """The third of three keys has all the weight, and no value; the others' weights and values are what 2**-126 is made of, and what is taken from it."""
    dim = 32
    k, v, q = np.zeros((3, dim), np.float32), np.zeros((3, dim), np.float32), np.zeros((1, heads, dim), np.float32)
    q[..., :2] = 1
    for key, power in ((0, -76), (1, -60)):
        score = power / (dim**-0.5 * np.log2(np.e))
        k[key, 0] = np.floor(score)
        k[key, 1] = score - k[key, 0]
    v[1, : len(TAKEN)] = 2.0**-66
    v[0, : len(TAKEN)] = [-taken * 2.0**76 for taken in TAKEN]
    k, v, q = (round_to_bf16(each) for each in (k, v, q))
    out = run(cache(np.random.default_rng(4), k, v), q, 2)
    wide = [(each.astype(np.uint32) << 16).view(np.float32) for each in (q[0, 0], k, v)]
    for head in range(heads):
        found = (out[0, head].astype(np.uint32) << 16).view(np.float32)
        assert found.tobytes() == reference.attend(*wide).tobytes()
        assert found[: len(TAKEN)].tolist() == list(TAKEN.values())
