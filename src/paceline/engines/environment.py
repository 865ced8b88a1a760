"""The environment of an engine that this node starts.

Law: a variable reaches the engine only if it is named here. Keys, tokens and passwords never do, whatever they are called: they belong to the person, to the
hub and to Paceline, and an engine is other people's code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_NAMES: Final = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_DIRS",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX",
})  # fmt: skip
"""Variables that programs need to start. Triton, in vLLM, runs a C compiler; the XDG folders hold drivers' shader caches and lists of Vulkan drivers."""
_PREFIXES: Final = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "ROCM_", "HSA_", "AMD_", "GPU_", "VK_", "VULKAN_", "MESA_", "RADV_", "ONEAPI_", "SYCL_", "ZE_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "METAL_", "MTL_", "GGML_", "TORCH_", "PYTORCH_", "TRITON_", "VLLM_",
)  # fmt: skip
"""Settings of GPU runtimes, thread pools and engines. `LLAMA_` is not among them: LLAMA_ARG_* sets any option of the server, such as its address."""
_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def engine_environment(own: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for an engine.

    Args:
        own: this process's variables.
        more: variables that this start needs, such as the engine's key. They are not filtered.
    """
    passed = {name: value for name, value in own.items() if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)}
    return {**passed, **more}
