"""Compiled dequantisers against gguf-py's own, and the uniform formats against their definitions."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import _type_traits, dequantize, quantize
from tests.fakes.blocks import to_blocks

from paceline.backends.ggml.dequantise import TYPES, dequantise
from paceline.backends.quantize import to_bf16_bits, to_float32
from paceline.core.weights import BlockTensor, DenseTensor
from paceline.store.tensor_files import HALVES

N, K = 3, 768


def random_blocks(name: str, seed: int = 0, *, spread: bool = True) -> BlockTensor:
    """Random rows of a type whose scales are finite; without `spread`, near 1."""
    kind = gguf.GGMLQuantizationType[name]
    block, nbytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (N, K // block * nbytes), np.uint8)
    words = raw.view(np.uint16).reshape(-1, nbytes // 2) if nbytes % 2 == 0 else None
    for at in (54,) if name == "IQ1_M" else HALVES.get(name, ()):
        words[:, at // 2] = words[:, at // 2] & 0xBFFF if spread else 0x2C00 | words[:, at // 2] & 0x3FF  # type: ignore[index]
    return BlockTensor(name, (N, K), raw)


def test_every_type_of_gguf_can_be_dequantised() -> None:
    assert {kind.name for kind in _type_traits} - {"BF16"} == TYPES


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(TYPES))
def test_random_blocks_are_dequantised_to_the_same_bits(name: str) -> None:
    blocks = random_blocks(name)
    out = np.empty((N, K), np.float32)
    dequantise(name, blocks.rows_NB, out)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks.rows_NB, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(out.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def halves(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


def reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


@pytest.mark.parametrize("size", [1e-7, 1.0, 1e4, 1e7])
def test_uniform_blocks_hold_the_nearest_codes_of_their_scale(size: float) -> None:
    values = np.random.default_rng(1).standard_normal((33, 64), np.float32) * np.float32(size)
    values[5] = 0
    values[6, :32] = 7 * np.float32(size)
    groups = values.reshape(33, 2, 32)
    low, scale = halves(groups.min(2)), halves((groups.max(2) - groups.min(2)) / 15)
    codes = np.clip(np.rint((groups - low[:, :, None]) * reciprocal(scale)[:, :, None]), 0, 15)
    expected = (codes * scale[:, :, None]).astype(np.float32) + low[:, :, None]
    np.testing.assert_array_equal(to_float32(to_blocks(DenseTensor(values, "f32"), "Q4_1")), expected.reshape(33, 64))
    scale = halves(np.abs(groups).max(2) / 127)
    codes = np.clip(np.rint(groups * reciprocal(scale)[:, :, None]), -127, 127)
    expected = (codes * scale[:, :, None]).astype(np.float32)
    np.testing.assert_array_equal(to_float32(to_blocks(DenseTensor(values, "f32"), "Q8_0")), expected.reshape(33, 64))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bit_codes_stay_what_they_are(name: str) -> None:
    blocks = random_blocks(name, spread=False)
    exact, kept = to_float32(blocks), to_float32(to_blocks(blocks, "Q4_1"))
    error = np.linalg.norm(kept - exact) / np.linalg.norm(exact)
    assert error == 0 if name != "Q4_K" else error < 2**-11


def test_large_tensors_come_out_alike_on_any_number_of_threads() -> None:
    values = np.random.default_rng(2).standard_normal((700, 4096), np.float32)
    tensor = DenseTensor(values, "f32")
    np.testing.assert_array_equal(to_bf16_bits(tensor), to_bf16_bits(tensor, threads=3))
    blocks = BlockTensor("Q8_0", values.shape, quantize(values, gguf.GGMLQuantizationType.Q8_0))
    np.testing.assert_array_equal(to_float32(blocks, threads=3), dequantize(blocks.rows_NB, gguf.GGMLQuantizationType.Q8_0))
