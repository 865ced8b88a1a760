"""What runs layers on this machine: a GPU where there is one, and the processors; which of them runs a weights format, and what memory it has.

Law: this and `backends.table` say the same of each format: CUDA holds bf16, the processors everything that it does not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.backends import cpu
from paceline.backends.memory import available_bytes, total_bytes
from paceline.backends.table import Kernels
from paceline.core.model import WeightsFormat
from paceline.machine import accelerator
from paceline.machine.cores import usable_cores
from paceline.machine.memory_rate import memory_rate
from paceline.store.home import Home


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One of them, and how it is asked for its figures: each look may block for a moment."""

    kernels: Kernels
    """Those that it would run most models with."""
    weights: tuple[WeightsFormat, ...]
    """Formats that run on it."""
    name: Callable[[], str]
    total_bytes: Callable[[], int]
    free_bytes: Callable[[], int]
    memory_rate: Callable[[], float]
    """Bytes a second. Measures, so that what serves meanwhile is disturbed."""


def local_devices(home: Home) -> tuple[LocalDevice, ...]:
    """This machine's, the fastest first."""
    kernels = Kernels.AVX512_BF16 if cpu.runs_here() else Kernels.TORCH

    def processors(*weights: WeightsFormat) -> LocalDevice:
        return LocalDevice(kernels, weights, processor_name, total_bytes, lambda: available_bytes(), lambda: memory_rate(home))

    if not accelerator.has_cuda():
        return (processors(*WeightsFormat),)
    gpu = LocalDevice(
        Kernels.CUDA,
        (WeightsFormat.BF16,),
        accelerator.cuda_name,
        accelerator.total_cuda_bytes,
        accelerator.free_cuda_bytes,
        accelerator.cuda_memory_rate,
    )
    return gpu, processors(*(weights for weights in WeightsFormat if weights not in gpu.weights))


def running(devices: Sequence[LocalDevice], weights: WeightsFormat) -> LocalDevice:
    """What runs a weights format."""
    return next(device for device in devices if weights in device.weights)


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, and how many cores a step uses."""
    cores = usable_cores()
    name = platform.processor() or platform.machine()
    try:
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    except OSError:
        pass  # not Linux: the name above will do
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"
