"""A model's files held against its configuration when it is opened: a wrong file is refused before anything is loaded, and by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.core.model import ModelSpec
from paceline.core.weights import HEAD, Shape, tensor_shapes
from paceline.store.faults import damaged, unsupported

MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 1 << 17
"""In all layers together, five times the largest models'. Each has tensors that are named one by one before any file is believed."""


def check_tensors(path: Path, spec: ModelSpec, found: Mapping[str, Shape]) -> None:
    """Hold the tensors of a file against its own spec.

    Raises:
        ModelFileError: a tensor is missing or of another shape.
        UnsupportedModel: there are tensors this family does not have, so running it without them would be wrong.
    """
    expected = tensor_shapes(spec)
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise damaged(path, f"tensor {missing[0]}{more} is missing")
    for name, shape in expected.items():
        if found[name] != shape:
            raise damaged(path, f"tensor {name} has shape {list(found[name])}, its configuration says {list(shape)}")
    extra = sorted(found.keys() - expected.keys() - {HEAD})
    if extra:
        raise unsupported(path, f"tensor {extra[0]} is not part of the {spec.model_type} family")


def check_sizes(path: Path, spec: ModelSpec) -> None:
    """Sizes that no model has, found before they are used to allocate or to divide.

    Raises:
        ModelFileError: a size is out of range, or sizes contradict one another.
    """
    sizes = {
        "layers": spec.n_layers, "hidden size": spec.hidden, "heads": spec.n_heads, "KV heads": spec.n_kv_heads,
        "head size": spec.head_dim, "feed-forward size": spec.ffn, "vocabulary": spec.vocab, "context": spec.max_context,
    }  # fmt: skip
    if spec.moe is not None:
        sizes |= {"experts": spec.moe.n_experts, "experts a token": spec.moe.top_k, "expert size": spec.moe.ffn}
    for name, size in sizes.items():
        if not 0 < size < 1 << 31:
            raise damaged(path, f"its configuration says {name} = {size}")
    n_experts = 1 if spec.moe is None else spec.moe.n_experts
    if spec.n_layers > MAX_LAYERS or spec.n_layers * n_experts > MAX_EXPERTS:
        experts = "" if spec.moe is None else f" of {n_experts} experts"
        raise damaged(path, f"its configuration says {spec.n_layers} layers{experts}")
    if spec.n_heads % spec.n_kv_heads or spec.head_dim % 2:
        raise damaged(path, f"{spec.n_heads} heads, {spec.n_kv_heads} KV heads and head size {spec.head_dim} don't go together")
    if spec.moe is not None and spec.moe.top_k > spec.moe.n_experts:
        raise damaged(path, f"its configuration uses {spec.moe.top_k} of {spec.moe.n_experts} experts")
    if not (0 < spec.rope.theta < math.inf and 0 <= spec.rms_eps < math.inf and 0 < spec.rope.linear_factor < math.inf):
        scaling = f", its rope's factor {spec.rope.linear_factor}" if spec.rope.linear_factor != 1 else ""
        raise damaged(path, f"its rope base is {spec.rope.theta} and its norm's epsilon {spec.rms_eps}{scaling}")
