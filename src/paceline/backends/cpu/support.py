"""The sizes of models that the compiled kernels can run."""

from __future__ import annotations

from paceline.core.model import ModelSpec, rotary_dims

MOST_HEAD_DIM = 256
"""Largest head that attention's scratch has room for."""
MOST_EXPERTS = 512
"""Most experts of a layer: a product's scratch has room for their router's logits for a panel of rows."""


def refuses(spec: ModelSpec) -> str | None:
    """Return why these kernels can't run a model; None if they can."""
    from paceline.backends.cpu.padding import padded

    spec = padded(spec)
    if spec.moe is not None and spec.moe.n_experts > MOST_EXPERTS:
        return f"layers of {spec.moe.n_experts} experts have no compiled kernels"
    if spec.head_dim > MOST_HEAD_DIM:
        return f"heads of {spec.head_dim} have no compiled kernels"
    if (rotary := rotary_dims(spec.rope, spec.head_dim)) % 32:
        return f"heads of which {rotary} dimensions turn have no compiled kernels"
    sizes = {"hidden": spec.hidden, "head_dim": spec.head_dim}
    if (low := spec.low) is not None:
        sizes |= {"v_head_dim": low.value_dim, "q_lora_rank": low.queries, "kv_lora_rank": low.keys}
        if low.value_dim > spec.head_dim:  # the mix of values is written over its query
            return f"values of {low.value_dim} beside keys of {spec.head_dim} have no compiled kernels"
    normed = ", and the norms of its heads leave no room for more" if spec.qk_norm else ""
    return next((f"{name} is not a multiple of 32{normed}" for name, size in sizes.items() if size % 32), None)
