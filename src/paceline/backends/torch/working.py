"""How much memory torch's kernels take beside weights and KV: as if all activations of a layer were there at once, in fp32; rope tables; logits."""

from __future__ import annotations

from paceline.core.model import BLOCK_TOKENS, ModelSpec


def working_bytes(spec: ModelSpec, *, max_rows: int, n_blocks: int, logits_rows: int) -> int:
    """As `backends.working.working_bytes`."""
    width = 4 * spec.hidden + 2 * spec.n_heads * spec.head_dim + 2 * spec.ffn
    context = min(spec.max_context, n_blocks * BLOCK_TOKENS)
    return 4 * (max_rows * width + logits_rows * spec.vocab + 2 * context * spec.head_dim)
