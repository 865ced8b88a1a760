"""The fastest device here, and the figures of one that is not the processors. torch, which takes a second to import, is asked only where a driver
shows itself.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from paceline.backends.options import DeviceKind

_DRIVERS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


def fastest_device() -> DeviceKind:
    """CUDA's where there are a driver and a torch that can use it, else the processors."""
    if not any(path.exists() for path in _DRIVERS) or find_spec("torch") is None:
        return DeviceKind.CPU
    import torch

    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


def device_name() -> str:
    """As its maker calls it."""
    import torch

    return torch.cuda.get_device_name()


def total_device_bytes() -> int:
    """Its memory."""
    import torch

    return torch.cuda.mem_get_info()[1]


def device_memory_rate(_threads: int = 1) -> float:
    """Bytes a second that it reads of its own memory, by a short copy; the best of some."""
    import torch

    words = min(free_device_bytes() // 4, 1 << 28) // 8
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


def free_device_bytes() -> int:
    """Memory that is free on it."""
    import torch

    return torch.cuda.mem_get_info()[0]
