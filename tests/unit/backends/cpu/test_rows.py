"""What happens between the products, against the written arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.core.model import Activation

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from numba import njit
from tests.unit.backends.cpu import rows_reference as reference

from paceline.backends.cpu import rows

Float32 = npt.NDArray[np.float32]
EPS = np.float32(1e-5)
EPS_BITS = int(EPS.view(np.int32))
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-39, 2.0**-126, -(2.0**-126), 1.1754942e-38, 3.4e38, -3.4e38, 88.0, -88.0, 87.33654, -87.33655, -104.0, 1 + 2.0**-8,
     1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, np.inf, -np.inf, 1e-30, -1e-30, 126.0, 150.0, -150.0, 1e-3, -1e-3, 0.5, -0.5, 2.0, -2.0, 1e10, -1e10],
    np.float32,
)  # fmt: skip


@njit
def call_rms_norm(x: int, weight: int, n: int, eps: int, out: int) -> None:
    rows.rms_norm(x, weight, n, eps, out)


@njit
def call_head_norm(x: int, weight: int, n: int, eps: int) -> None:
    rows.head_norm(x, weight, n, eps)


@njit
def call_rotate(x: int, cos: int, sin: int, half: int, out: int) -> None:
    rows.rotate(x, cos, sin, half, out)


@njit
def call_gate(kind: int, outputs: int) -> None:
    rows.open_gate(kind, outputs)


@njit
def call_round(x: int, n: int, out: int) -> None:
    rows.round_bf16(x, n, out)


@njit
def call_add_scaled(rounded: bool, x: int, y: int, n: int, scale: int) -> None:
    if rounded:
        rows.add_scaled(1, x, y, n, scale)
    else:
        rows.add_scaled(0, x, y, n, scale)


@njit
def call_add_normed(rounded: bool, x: int, y: int, weight: int, n: int, eps: int, scale: int) -> None:
    if rounded:
        rows.add_normed(1, x, y, weight, n, eps, scale)
    else:
        rows.add_normed(0, x, y, weight, n, eps, scale)


@njit
def call_multiply(x: int, n: int, scale: int) -> None:
    rows.multiply_by(x, n, scale)


def random(seed: int, n: int, spread: float = 1.0) -> Float32:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def at(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("n", [32, 576, 4096])
@pytest.mark.parametrize("spread", [1e-6, 0.3, 40.0])
def test_norms(n: int, spread: float) -> None:
    x, weight, out = random(n, n, spread), random(n + 1, n), np.empty(n, np.uint16)
    wanted = reference.norm(x, weight, EPS)
    call_rms_norm(at(x), at(weight), n, EPS_BITS, at(out))
    assert np.array_equal(out, reference.bf16(wanted))
    call_head_norm(at(x), at(weight), n, EPS_BITS)
    assert np.array_equal(x, wanted)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_rotary_embedding(dim: int) -> None:
    x, angles, out = random(dim, dim), random(dim + 1, dim // 2, 3.0), np.empty(dim, np.uint16)
    cos, sin = np.cos(angles), np.sin(angles)
    call_rotate(at(x), at(cos), at(sin), dim // 2, at(out))
    assert np.array_equal(out, reference.rotate(x, cos, sin))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("scale", [np.float32(1), np.float32(0.22)])
def test_what_is_added_to_the_residual(rounded: bool, scale: np.float32) -> None:
    n, bits = 576, int(scale.view(np.int32))
    x, y, weight = random(1, n), random(2, n, 7.0), random(3, n)
    wanted = [reference.added(x, y, scale), reference.added(x, y, scale, weight, EPS)]
    if rounded:
        wanted = [(reference.bf16(total).astype(np.uint32) << 16).view(np.float32) for total in wanted]
    plain, normed = x.copy(), x.copy()
    call_add_scaled(rounded, at(plain), at(y), n, bits)
    call_add_normed(rounded, at(normed), at(y), at(weight), n, EPS_BITS, bits)
    assert np.array_equal(plain, wanted[0])
    assert np.array_equal(normed, wanted[1])
    product = y * scale
    call_multiply(at(y), n, bits)
    assert np.array_equal(y, product)


def test_gelu_by_tanh_is_gelu_by_tanh() -> None:
    g = random(5, 4096, 3.0).astype(np.float64)
    exact = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    found = (reference.gate(g.astype(np.float32), np.ones(len(g), np.float32), Activation.GELU_TANH).astype(np.uint32) << 16).view(
        np.float32
    )
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-6)


def test_the_clamped_gate_is_that_of_gpt_oss() -> None:
    g, u = random(6, 4096, 6.0), random(7, 4096, 6.0)
    glu = np.minimum(g, 7).astype(np.float64)
    exact = (np.clip(u, -7, 7) + 1) * glu / (1 + np.exp(-1.702 * glu))
    found = (reference.gate(g, u, Activation.CLAMPED).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kind", Activation)
def test_the_gate(kind: Activation) -> None:
    for g in (SPECIAL, *(random(seed, 32, spread) for seed, spread in enumerate((1e-3, 1.0, 8.0, 60.0)))):
        u = random(9, 32, 5.0)
        x = np.concatenate([g, u])
        call_gate(rows.GATES[kind], at(x))
        out = x[:16].view(np.uint16)
        with np.errstate(invalid="ignore"):
            wanted = reference.gate(g, u, kind)
        sound = g != -np.inf  # which is no number then
        assert np.array_equal(out[sound], wanted[sound])


def test_rounding_to_bf16() -> None:
    for x in (SPECIAL, random(3, 32, 1e-38), random(4, 32)):
        out, zeros = np.empty(32, np.uint16), np.zeros(32, np.float32)
        call_round(at(x), 32, at(out))
        assert np.array_equal(out, reference.bf16(x))
        total = x.copy()
        call_add_scaled(True, at(total), at(zeros), 32, int(np.float32(1).view(np.int32)))
        assert np.array_equal(total.view(np.uint32) >> 16, reference.bf16(x + zeros))
