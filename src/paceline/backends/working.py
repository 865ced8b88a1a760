"""How much memory a model's kernels take beside weights and KV: told before anything is loaded, by numbers alone."""

from __future__ import annotations

from paceline.backends.cpu import working as cpu
from paceline.backends.cpu.sizes import NEIGHBOURS
from paceline.backends.table import Kernels
from paceline.backends.torch import working as torch
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK, ModelSpec


def working_bytes(kernels: Kernels, spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int = 0) -> int:
    """Bytes of a runner's working memory, at most.

    Args:
        kernels: that run the model.
        spec: the model's sizes.
        max_rows: of a batch.
        threads: that share a step.
        n_blocks: KV blocks.
        logits_rows: rows of a batch whose logits are wanted, at most: each takes the vocabulary in fp32.
    """
    match kernels:
        case Kernels.AVX512_BF16:
            return cpu.working_bytes(spec, max_rows=max_rows, threads=threads, n_blocks=n_blocks, logits_rows=logits_rows)
        case Kernels.TORCH | Kernels.CUDA:
            return torch.working_bytes(spec, max_rows=max_rows, n_blocks=n_blocks, logits_rows=logits_rows)


def kv_group(kernels: Kernels) -> int:
    """KV blocks whose memory comes together: a pool takes that of whole groups."""
    match kernels:
        case Kernels.AVX512_BF16:
            return NEIGHBOURS
        case Kernels.CUDA:
            return WIDEST_BLOCK // BLOCK_TOKENS
        case Kernels.TORCH:
            return 1
