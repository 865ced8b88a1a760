"""Which form each matrix is held in.

Under `stored`, what the file holds is kept: the types that have a form of their own as they lie, plain numbers as bf16, and every other type in
the smallest form whose rounding makes the file's own error against the original weights at most 1.05 times as large (measured:
`docs/performance.md`). The uniform formats hold all matrices alike, the embedding and the head in at least eight bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from paceline.backends.cpu.forms import LAYOUT, Form
from paceline.backends.table import Kernels
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, HEAD, tensor_shapes

NEAREST: Final[Mapping[str, Form]] = {
    **{form.name: form for form in Form},
    **dict.fromkeys(("F32", "F16"), Form.BF16),
    **dict.fromkeys(("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"), Form.Q4_1),
    **dict.fromkeys(("Q3_K", "IQ3_XXS", "IQ3_S", "MXFP4"), Form.Q5_1),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "NVFP4"), Form.Q8_0),
}
"""The form for each of GGML's types under `stored`."""
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


def uniform_format(spec: ModelSpec, type_of: Callable[[str], str]) -> WeightsFormat:
    """The uniform format nearest to what a file holds: by the type that most weights of its layers are in; five bits and six never become four.

    Types of fewer than four bits become four: eight would take more than twice the file.
    """
    shapes = tensor_shapes(spec)
    weights: dict[str, int] = {}
    for name in matrices(spec):
        if name not in {EMBEDDING, HEAD}:
            weights[type_of(name)] = weights.get(type_of(name), 0) + math.prod(shapes[name])
    most = max(weights, key=weights.__getitem__)
    match NEAREST[most]:
        case Form.BF16:
            return WeightsFormat.BF16
        case Form.Q4_0 | Form.Q4_1 | Form.Q4_K:
            return WeightsFormat.INT4
        case _:
            return WeightsFormat.INT4 if most in {"Q3_K", "IQ3_XXS", "IQ3_S"} else WeightsFormat.INT8


def held_format(spec: ModelSpec, weights: WeightsFormat, type_of: Callable[[str], str], kernels: Kernels) -> WeightsFormat:
    """The format kernels hold weights in: `stored` on those made for it; on others the uniform format nearest to what the file holds."""
    return uniform_format(spec, type_of) if weights is WeightsFormat.STORED and kernels is not Kernels.AVX512_BF16 else weights


def held_bytes(spec: ModelSpec, form_of: FormOf) -> dict[str, int]:
    """Bytes that each tensor of a model takes in memory."""

    def of(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        # Rows of no whole groups are bf16, on kernels that take them.
        return LAYOUT[form_of(name)].packed_bytes(*shape) if shape[1] % 32 == 0 else 2 * math.prod(shape)

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def part_bytes(held: Mapping[str, int], layers: LayerRange, *, edges: bool) -> int:
    """What some layers take, and with `edges` the tensors outside the layers."""
    prefixes = tuple(f"model.layers.{layer}." for layer in range(layers.start, layers.stop))
    return sum(n for name, n in held.items() if name.startswith(prefixes) or (edges and not name.startswith("model.layers.")))
