"""A whole matrix held in blocks of another type, as the parts of one are when a model is loaded."""

from __future__ import annotations

import numpy as np

from paceline.backends.quantize import Target, blocks_of, tensor_shape
from paceline.core.weights import TENSOR_TYPES, BlockTensor, StoredTensor


def to_blocks(tensor: StoredTensor, kind: Target) -> BlockTensor:
    """A matrix [N, K], of whole groups."""
    if isinstance(tensor, BlockTensor) and tensor.type == kind:
        return tensor
    n, k = tensor_shape(tensor)
    out_NB = np.empty((n, TENSOR_TYPES[kind].row_bytes(k)), np.uint8)
    blocks_of(tensor, kind, slice(0, n), out_NB)
    return BlockTensor(kind, (n, k), out_NB)
