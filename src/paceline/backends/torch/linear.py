"""Matrix products of a layer, in bf16. Libraries choose kernels by the number of rows, and some kernels for few rows add in another order, so fewer
rows than `LEAST_ROWS` are padded.

On a processor, torch multiplies bf16 matrices with oneDNN, which does not report the instructions that it uses. It takes the best ones that the processor
has, up to the limit in an environment variable; `onednn_isa` does the same. Source: oneDNN's developer guide, "CPU dispatcher control".

Shapes: N outputs, K inputs, T rows.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import binding
from torch import Tensor

from paceline.backends.quantize import to_bf16_bits
from paceline.core.weights import StoredTensor

_LEVELS = {
    "AVX": ("avx",),
    "AVX2": ("avx2", "fma"),
    "AVX2_VNNI": ("avxvnni",),
    "AVX2_VNNI_2": ("avxvnniint8", "avxneconvert"),
    "AVX512_CORE": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "AVX512_CORE_VNNI": ("avx512vnni",),
    "AVX512_CORE_BF16": ("avx512bf16",),
    "AVX512_CORE_FP16": ("avx512fp16",),
    "AVX512_CORE_AMX": ("amx-tile", "amx-bf16", "amx-int8"),
    "AVX512_CORE_AMX_FP16": ("amx-fp16",),
}
"""oneDNN's levels in ascending order, with the features that each adds. AVX512_CORE does not need the levels between AVX2 and itself."""
_BOUNDS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_UNITS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")


def onednn_isa() -> str:
    """Return the highest oneDNN level in use; on processors other than x86 the machine's name, followed by " bf16" if it multiplies bf16."""
    features = binding.get_host_cpu_features()
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return f"{platform.machine()}{' bf16' if features.get('bf16', False) else ''}"
    bound = next((os.environ[name].upper() for name in _BOUNDS if os.environ.get(name)), "ALL")
    found = "SSE41"
    for level, needs in _LEVELS.items():
        if all(features.get(need, False) for need in needs):
            found = level
        if level == bound:
            break
    return found


@cache
def multiplies_bf16() -> bool:
    """Return whether the processor has instructions for products of bf16. Without them, float32 is several times faster."""
    isa = onednn_isa()
    return isa in _UNITS or isa.endswith(" bf16")


LEAST_ROWS = {"cpu": 2, "cuda": 64}
"""Least rows of a product, by kind of device. On a GPU, 64 rows take no longer than one, because the weights are read once in both cases. cuBLASLt's
kernels for fewer than 17 rows of narrow matrices add in another order. Without split sums, those for few rows with long sums are slow (on an H200
0.34 ms instead of 0.03 for 4096 outputs of 14336 inputs)."""


class Linear:
    """One matrix, or several fused along their outputs. `rows` looks up embeddings."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._weight_NK, self._bias_N = weight_NK, bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Multiply: bf16 [T, K] to bf16 [T, N]."""
        missing = LEAST_ROWS[self._weight_NK.device.type] - len(x_TK)
        padded = F.pad(x_TK, (0, 0, 0, missing)) if missing > 0 else x_TK
        return F.linear(padded, self._weight_NK, self._bias_N)[: len(x_TK)]

    def rows(self, rows_T: Tensor) -> Tensor:
        """Return the weights of outputs `rows_T`, bf16 [T, K]."""
        return self._weight_NK[rows_T]


def dense(tensors: Sequence[StoredTensor], device: torch.device) -> Tensor:
    """Return stored tensors as one bf16 tensor on the device, joined along their first dimension."""
    bits = [to_bf16_bits(tensor, torch.get_num_threads()) for tensor in tensors]
    joined = bits[0] if len(bits) == 1 else np.concatenate(bits)
    return torch.from_numpy(joined.view(np.int16)).view(torch.bfloat16).to(device)
