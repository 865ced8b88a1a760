"""Weights laid out as `gemm.py` reads them: records of one group of 32 inputs x 16 outputs, block after block of outputs.

Shapes: N outputs (a multiple of 16), K inputs (of 32), G groups, P = 16 input pairs a group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.gemm import BF16, BF16_RECORD, INT4, INT4_RECORD, INT8, INT8_RECORD
from paceline.core.model import WeightsFormat
from paceline.core.weights import GROUP, GroupedTensor

RECORD = {INT4: INT4_RECORD, INT8: INT8_RECORD, BF16: BF16_RECORD}
FORM = {WeightsFormat.INT4: INT4, WeightsFormat.INT8: INT8, WeightsFormat.BF16: BF16}
LANES = 16

Bytes = npt.NDArray[np.uint8]


def packed_bytes(form: int, n: int, k: int) -> int:
    """Bytes that N x K weights take."""
    return n // LANES * (k // GROUP) * RECORD[form]


def pack_grouped(tensor: GroupedTensor) -> Bytes:
    """Records of an int4 or int8 matrix: uint8 [N / 16, G, record]."""
    n, k = tensor.codes_NK.shape
    blocks, groups = n // LANES, k // GROUP
    form = INT4 if tensor.bits == 4 else INT8
    records = np.empty((blocks, groups, RECORD[form]), np.uint8)
    codes = tensor.codes_NK.view(np.uint8).reshape(blocks, LANES, groups, -1, 16 // tensor.bits, 2)
    words = np.zeros((blocks, groups, codes.shape[3], LANES, 2), np.uint16)
    for place in range(codes.shape[4]):
        words |= codes[:, :, :, :, place].transpose(0, 2, 3, 1, 4).astype(np.uint16) << np.uint16(place * tensor.bits)
    at = GROUP * LANES * tensor.bits // 8
    records[:, :, :at] = words.reshape(blocks, groups, -1).view(np.uint8)
    for table in (tensor.scale_NG, tensor.offset_NG):
        if table is not None and at < records.shape[2]:
            lanes = np.ascontiguousarray(table.reshape(blocks, LANES, groups).transpose(0, 2, 1), np.float16)
            records[:, :, at : at + 2 * LANES] = lanes.view(np.uint8)
            at += 2 * LANES
    return records


def pack_bf16(bits_NK: npt.NDArray[np.uint16]) -> Bytes:
    """Records of a bf16 matrix: uint8 [N / 16, G, 1024]."""
    n, k = bits_NK.shape
    blocks, groups = n // LANES, k // GROUP
    pairs = bits_NK.reshape(blocks, LANES, groups, GROUP // 2, 2).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(pairs).reshape(blocks, groups, -1).view(np.uint8)
