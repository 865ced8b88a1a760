"""Whether there is a CUDA device. torch, which takes a second to import, is asked only where a driver shows itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_DRIVERS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


def has_cuda() -> bool:
    """A driver, and a torch that can use it."""
    if not any(path.exists() for path in _DRIVERS) or find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def free_cuda_bytes() -> int:
    """Memory free on the current CUDA device."""
    import torch

    return torch.cuda.mem_get_info()[0]
