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


def cuda_name() -> str:
    """Of the current CUDA device, as its maker calls it."""
    import torch

    return torch.cuda.get_device_name()


def total_cuda_bytes() -> int:
    """Memory of the current CUDA device."""
    import torch

    return torch.cuda.mem_get_info()[1]


def cuda_memory_rate(_threads: int = 1) -> float:
    """Bytes a second that the current CUDA device reads of its own memory, by a short copy; the best of some."""
    import torch

    words = min(free_cuda_bytes() // 4, 1 << 28) // 8
    source = torch.ones(words, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        target.copy_(source)
        ended.record()
        torch.cuda.synchronize()
        best = max(best, 2 * words * 8 / max(began.elapsed_time(ended) / 1000, 1e-9))  # a copy reads and writes
    return best


def free_cuda_bytes() -> int:
    """Memory free on the current CUDA device."""
    import torch

    return torch.cuda.mem_get_info()[0]
