"""Which instructions oneDNN, which torch multiplies bf16 matrices with, uses on this processor.

oneDNN does not tell. It chooses by what the processor has, below the bound of an environment variable; so does this module.
Source: oneDNN's developer guide, "CPU dispatcher control".
"""

from __future__ import annotations

import os
import platform
from functools import cache

from llvmlite import binding

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
"""oneDNN's names, ascending, and what each adds. AVX512_CORE does not need the levels between AVX2 and itself."""
_BOUNDS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_UNITS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")


def onednn_isa() -> str:
    """The highest level in use; on other processors than x86, their name and whether they multiply bf16."""
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
    """Whether there are instructions for products of bf16; where there are none, float32 is several times faster."""
    isa = onednn_isa()
    return isa in _UNITS or isa.endswith(" bf16")
