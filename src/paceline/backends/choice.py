"""Which form each matrix is held in.

Under `stored`, what the file holds is kept: the types that have a form of their own as they lie, plain numbers as bf16, and every other type in
the smallest form whose rounding makes the file's own error against the original weights at most 1.05 times as large (measured:
`docs/performance.md`). The uniform formats hold all matrices alike, the embedding and the head in at least eight bits. The torch kernels have
those formats alone, and under `stored` hold each matrix in the one that keeps what the file has of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from paceline.backends.cpu.forms import LAYOUT, Form
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, GROUP, HEAD, tensor_shapes

NEAREST: Final[Mapping[str, Form]] = {
    **{form.name: form for form in Form},
    **dict.fromkeys(("F32", "F16"), Form.BF16),
    **dict.fromkeys(("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"), Form.Q4_1),
    **dict.fromkeys(("Q3_K", "IQ3_XXS", "IQ3_S", "MXFP4"), Form.Q5_1),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "NVFP4"), Form.Q8_0),
}
"""The form for each of GGML's types under `stored`."""
_AS_INT4: Final = {name for name, form in NEAREST.items() if form in {Form.Q4_0, Form.Q4_1, Form.Q4_K}} | {"Q3_K", "IQ3_XXS", "IQ3_S"}
"""Types that the torch kernels hold in four bits."""
_TORCH_GROUP_BYTES: Final = {WeightsFormat.INT4: 20, WeightsFormat.INT8: 42, WeightsFormat.BF16: 64}
"""Of 32 inputs: codes, and bf16 scales and offsets, of which eight bits have two each, and their fp16 scale."""
_TORCH_ROWS: Final = 64
"""Outputs are padded to so many there, of quantised matrices."""
_UNIFORM: Final = {WeightsFormat.INT4: Form.Q4_1, WeightsFormat.INT8: Form.Q8_0, WeightsFormat.BF16: Form.BF16}

FormOf = Callable[[str], Form]
"""The form of a matrix, by its tensor's name."""


def forms_by(weights: WeightsFormat, type_of: Callable[[str], str]) -> FormOf:
    """The form of each matrix under a weights format.

    Args:
        type_of: GGML's name of the type a tensor is stored in.
    """
    if weights is WeightsFormat.STORED:
        return lambda name: NEAREST[type_of(name)]
    form = _UNIFORM[weights]
    head_form = Form.Q8_0 if form is Form.Q4_1 else form
    return lambda name: head_form if name in {EMBEDDING, HEAD} else form


def matrices(spec: ModelSpec) -> list[str]:
    """Names of a dense model's matrices."""
    return [name for name, shape in tensor_shapes(spec).items() if len(shape) == 2]


def torch_formats(spec: ModelSpec, weights: WeightsFormat, type_of: Callable[[str], str]) -> dict[str, WeightsFormat]:
    """The format that the torch kernels hold each matrix in: under `stored` int4, or int8 where four bits would lose what the file has.

    Types of fewer than four bits become four: eight would take more than twice the file. A model is in bf16 as a whole or not at all, since its
    two paths are then one; the embedding and the head have eight bits at least; a router is always in bf16.
    """
    routers = {name for name in matrices(spec) if name.endswith(".mlp.gate.weight")}
    layered = [name for name in matrices(spec) if name not in {EMBEDDING, HEAD} | routers]
    if weights is not WeightsFormat.STORED:
        formats = dict.fromkeys(layered, weights)
    elif all(NEAREST[type_of(name)] is Form.BF16 for name in layered):
        formats = dict.fromkeys(layered, WeightsFormat.BF16)
    else:
        formats = {name: WeightsFormat.INT4 if type_of(name) in _AS_INT4 else WeightsFormat.INT8 for name in layered}
    table = WeightsFormat.BF16 if WeightsFormat.BF16 in formats.values() else WeightsFormat.INT8
    return formats | dict.fromkeys(routers, WeightsFormat.BF16) | {name: table for name in matrices(spec) if name in {EMBEDDING, HEAD}}


def held_bytes(spec: ModelSpec, form_of: FormOf) -> dict[str, int]:
    """Bytes that each tensor of a model takes in memory."""

    def of(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        # Rows of no whole groups are bf16, on kernels that take them.
        return LAYOUT[form_of(name)].packed_bytes(*shape) if shape[1] % 32 == 0 else 2 * math.prod(shape)

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def formats_of_products(formats: Mapping[str, WeightsFormat]) -> list[WeightsFormat]:
    """Those that `torch_formats` gave a model's layers, routers aside."""
    if formats[EMBEDDING] is WeightsFormat.BF16:
        return [WeightsFormat.BF16]
    return sorted({held for name, held in formats.items() if name not in {EMBEDDING, HEAD}} - {WeightsFormat.BF16})


def torch_bytes(spec: ModelSpec, formats: Mapping[str, WeightsFormat]) -> dict[str, int]:
    """`held_bytes`, on the torch kernels, without bf16 copies for prompts."""

    def of(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        n, k = shape
        rows = n if formats[name] is WeightsFormat.BF16 else -(-n // _TORCH_ROWS) * _TORCH_ROWS
        return rows * k * _TORCH_GROUP_BYTES[formats[name]] // GROUP

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def part_bytes(held: Mapping[str, int], layers: LayerRange, *, edges: bool) -> int:
    """What some layers take, and with `edges` the tensors outside the layers."""
    prefixes = tuple(f"model.layers.{layer}." for layer in range(layers.start, layers.stop))
    return sum(n for name, n in held.items() if name.startswith(prefixes) or (edges and not name.startswith("model.layers.")))
