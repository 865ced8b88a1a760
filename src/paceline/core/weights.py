"""How weights reach a backend: a source of named tensors, whatever file holds them; and the tensors of decoders and encoders.

Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`, `model.embed_tokens.weight`, `lm_head.weight`, `model.norm.weight`). Sources translate
GGUF's names, and the permuted q/k rows of the llama family in GGUF files. They read lazily: only the tensors asked for, or a range of their rows. Nothing is
widened here: quantised blocks stay as they are in the file.

Shapes: N outputs (rows), K inputs (columns), B bytes of a row, C positions, I rope frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec, Norms, RopeSpec, rotary_dims

EMBEDDING, FINAL_NORM, HEAD, ROUTER = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", ".mlp.gate.weight"
"""Names of the tensors outside the layers; a tied head has no tensor of its own. ROUTER ends the name of a mixture's router."""
SINKS: Final = "self_attn.sinks"
"""Name of a layer's attention sinks, after the layer's prefix."""

Shape = tuple[int, ...]

GROUP = 32
"""Weights that share one scale, along the input dimension: the group of both uniform quantised formats."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type of GGML: a block of `block` weights takes `nbytes` bytes; `code` names the type in a file."""

    name: str
    code: int
    block: int
    nbytes: int

    def row_bytes(self, k: int) -> int:
        """Return the bytes of k weights, which must be whole blocks."""
        return k // self.block * self.nbytes


TENSOR_TYPES: Final[Mapping[str, TensorType]] = {
    name: TensorType(name, code, block, nbytes)
    for code, name, block, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor of plain numbers. `dtype` says how `data` is to be read: float32, float16, or uint16 that holds bf16 bits."""

    data: npt.NDArray[np.generic]
    dtype: Literal["f32", "f16", "bf16"]


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Rows quantised by GGML, byte for byte as in the file.

    Attributes:
        type: GGML's name of the type, such as Q4_K or IQ4_XS.
        shape: shape of the values; the last dimension is whole blocks.
        rows_NB: uint8, each row's blocks one after the other.
    """

    type: str
    shape: Shape
    rows_NB: npt.NDArray[np.uint8]


StoredTensor = DenseTensor | BlockTensor


def columns_of(tensor: StoredTensor, columns: slice | None) -> StoredTensor:
    """Return some columns of a matrix, which must be whole blocks of each row; None: the tensor itself."""
    if columns is None:
        return tensor
    if isinstance(tensor, DenseTensor):
        return DenseTensor(np.ascontiguousarray(tensor.data[:, columns]), tensor.dtype)
    start, stop = (TENSOR_TYPES[tensor.type].row_bytes(at) for at in (columns.start, columns.stop))
    rows_NB = np.ascontiguousarray(tensor.rows_NB[:, start:stop])
    return BlockTensor(tensor.type, (len(rows_NB), columns.stop - columns.start), rows_NB)


class WeightSource(Protocol):
    """The tensors of one model on disk."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def digest(self) -> str:
        """Hex SHA-256 that names the weights: sources with equal digests have equal tensors."""
        ...

    def names(self) -> Iterable[str]: ...

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor in its file, without reading it."""
        ...

    def type_of(self, name: str) -> str:
        """Return GGML's name of the type a tensor is stored in (F32, BF16, Q6_K), without reading it."""
        ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        """Read one tensor. The arrays are the caller's own, not views of a mapped file.

        Args:
            name: Hugging Face's.
            rows: range of the first dimension; None: all.
            columns: range of a matrix's second dimension, in whole blocks; None: all.

        Raises:
            ModelFileError: the tensor is missing, or its bytes are short or damaged.
        """
        ...


NORM_NAMES: Final[Mapping[Norms, tuple[str | None, ...]]] = {
    Norms.BEFORE: ("input_layernorm", None, "post_attention_layernorm", None),
    Norms.AFTER: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    Norms.AROUND: ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
"""Names of a layer's norms: before attention, after it, before feed-forward, after it. None: the layer lacks that norm."""


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return every tensor of a model with this spec, and its shape, [N, K] for a matrix. Tensors outside the layers come first."""
    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab, spec.hidden), FINAL_NORM: (spec.hidden,)}
    if not spec.tied_head:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    for layer in range(spec.n_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec)}
    return shapes


def _layer_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    heads, kv, low = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim, spec.low
    for name in NORM_NAMES[spec.norms]:
        if name is not None:
            yield f"{name}.weight", (spec.hidden,)
    for name, rows in (("q", heads), ("k", kv), ("v", kv)) if low is None else ():
        yield f"self_attn.{name}_proj.weight", (rows, spec.hidden)
        if spec.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    if low is not None:
        shared = spec.head_dim - spec.own_dims
        yield "self_attn.q_a_proj.weight", (low.queries, spec.hidden)
        yield "self_attn.q_a_layernorm.weight", (low.queries,)
        yield "self_attn.q_b_proj.weight", (heads, low.queries)
        yield "self_attn.kv_a_proj_with_mqa.weight", (low.keys + shared, spec.hidden)
        yield "self_attn.kv_a_layernorm.weight", (low.keys,)
        yield "self_attn.kv_b_proj.weight", (spec.n_kv_heads * (spec.own_dims + low.value_dim), low.keys)
    yield "self_attn.o_proj.weight", (spec.hidden, spec.n_heads * spec.value_dim)
    if spec.out_bias:
        yield "self_attn.o_proj.bias", (spec.hidden,)
    if spec.sinks:
        yield SINKS, (spec.n_heads,)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (heads if spec.qk_norm_whole else spec.head_dim,)
        yield "self_attn.k_norm.weight", (kv if spec.qk_norm_whole else spec.head_dim,)
    blocks = [("mlp", spec.ffn)]
    if spec.moe is not None:
        yield "mlp.gate.weight", (spec.moe.n_experts, spec.hidden)
        if spec.moe.biased:
            yield "mlp.gate.bias", (spec.moe.n_experts,)
        blocks = [(f"mlp.experts.{expert}", spec.moe.ffn) for expert in range(spec.moe.n_experts)]
    for block, ffn in blocks:
        yield f"{block}.gate_proj.weight", (ffn, spec.hidden)
        yield f"{block}.up_proj.weight", (ffn, spec.hidden)
        yield f"{block}.down_proj.weight", (spec.hidden, ffn)
        if spec.moe is not None and spec.moe.biased:
            for name, size in (("gate", ffn), ("up", ffn), ("down", spec.hidden)):
                yield f"{block}.{name}_proj.bias", (size,)


class Pooling(StrEnum):
    """How the vectors of a text's tokens become one."""

    MEAN = "mean"
    CLS = "cls"
    """The vector of the first token."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes of a BERT encoder: every token attends to every other, positions are learned, norms follow their blocks."""

    n_layers: int
    hidden: int
    n_heads: int
    ffn: int
    vocab: int
    max_tokens: int
    """Maximum tokens of a text, with those the tokenizer adds around it: the number of learned positions."""
    n_types: int
    """Rows of the segment table; a single text uses only the first."""
    norm_eps: float
    pooling: Pooling = Pooling.MEAN
    normalise: bool = True
    """Vectors are scaled to length 1."""


WORDS, POSITIONS, TYPES = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
FIRST_NORM = "embeddings.LayerNorm"


def encoder_shapes(spec: EncoderSpec) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of an encoder with this spec, by Hugging Face's name, and its shape, [N, K] for a matrix."""
    hidden, ffn = spec.hidden, spec.ffn
    yield WORDS, (spec.vocab, hidden)
    yield POSITIONS, (spec.max_tokens, hidden)
    yield TYPES, (spec.n_types, hidden)
    norms = [FIRST_NORM]
    for layer in (f"encoder.layer.{i}" for i in range(spec.n_layers)):
        attention = [f"attention.self.{name}" for name in ("query", "key", "value")]
        matrices = [(name, hidden, hidden) for name in (*attention, "attention.output.dense")]
        for name, n, k in (*matrices, ("intermediate.dense", ffn, hidden), ("output.dense", hidden, ffn)):
            yield f"{layer}.{name}.weight", (n, k)
            yield f"{layer}.{name}.bias", (n,)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)


class EncoderSource(Protocol):
    """The tensors of one encoder on disk, under the names of `encoder_shapes`."""

    @property
    def spec(self) -> EncoderSpec: ...

    def read(self, name: str) -> StoredTensor:
        """Read one tensor.

        Raises:
            ModelFileError: its bytes are short or damaged.
        """
        ...


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> npt.NDArray[np.float64]:
    """Return radians per position, float64 [I]. Llama 3 scaling follows Meta's release (`rope_type: llama3`), YaRN its paper and transformers."""
    dims = rotary_dims(rope, head_dim)
    plain = rope.theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims) / rope.linear_factor
    if rope.divisors:
        return plain / np.array(rope.divisors, np.float64)
    if (yarn := rope.yarn) is not None:
        low, high = (
            dims * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta)) for turns in (yarn.fast, yarn.slow)
        )
        low, high = max(0, math.floor(low) if yarn.whole else low), min(dims - 1, math.ceil(high) if yarn.whole else high)
        slowed = np.clip((np.arange(dims // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return plain / yarn.factor * slowed + plain * (1 - slowed)
    if rope.llama3 is None:
        return plain
    factor, low, high, original = rope.llama3
    wavelength = 2 * math.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def rope_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return (cos, sin) of every position and frequency, float32 [C, I], computed in float64."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    return (np.cos(angles) * rope.gain).astype(np.float32), (np.sin(angles) * rope.gain).astype(np.float32)
