"""What this machine has to run layers on: its GPU and its processors, their memory and how fast they read it, the MLX ring that this process is a rank
of, and the files it may have open.

Laws: this and `backends.table` say the same of each weights format: CUDA holds bf16, the processors everything that it does not. torch, which takes a
second to import, is asked only where a driver shows itself. The memory's rate is measured once: all cores that a step would use read together,
through the caches, for about 0.1 s of their own time; the best moment is kept until the machine starts again, or, where other programs were busy
meanwhile, until it is asked for when they are not: then the better counts. A ring's members are fixed when its processes start (`mlx.launch` sets `MLX_RANK` and
`MLX_HOSTFILE`), so a node can only say that it has one; looking opens no socket and raises nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.memory import available_bytes, total_bytes
from paceline.backends.options import DeviceKind
from paceline.backends.table import Kernels, fastest_on_processors
from paceline.backends.torch import import_cuda
from paceline.core.model import WeightsFormat
from paceline.engines.installed import Gpu
from paceline.store.home import Home, read_json_object, write_cache

_NVIDIA = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
_DRIVERS = (*_NVIDIA, Path("/dev/dxg"))
LEAST_CAPABILITY = (8, 0)
"""Of an NVIDIA GPU: FlashAttention 2's, and that of products in bf16."""


def fastest_device() -> DeviceKind:
    """A Mac's GPU where MLX can use it, CUDA's where there are a driver and a torch that can, else the processors."""
    if _has_metal():
        return DeviceKind.MLX
    has_driver = any(path.exists() for path in _DRIVERS)
    return DeviceKind.CUDA if has_driver and find_spec("torch") is not None and gpu_lacks() is None else DeviceKind.CPU


def gpus_here(root: Path = Path("/"), system: str = sys.platform, processor: str | None = None) -> frozenset[Gpu]:
    """Return the interfaces to this machine's GPUs, whether or not anything installed uses them. Drivers are looked for, and none is opened.

    Args:
        root: folder that holds the system's own folders.
        processor: architecture of the processor; None: this machine's.
    """
    if system == "darwin":
        return frozenset({Gpu.METAL} if (processor or platform.machine()) == "arm64" else ())
    found = {Gpu.CUDA} if any((root / path.relative_to("/")).exists() for path in _DRIVERS) else set[Gpu]()
    return frozenset(found | ({Gpu.ROCM} if (root / "dev/kfd").exists() else set()))


def gpu_of_own_kernels() -> Gpu | None:
    """Return the interface through which Paceline's own kernels use a GPU here; None: they run on processors."""
    match fastest_device():
        case DeviceKind.CPU:
            return None
        case DeviceKind.CUDA:
            return Gpu.CUDA
        case DeviceKind.MLX:
            return Gpu.METAL


def gpu_lacks() -> str | None:
    """Why this machine's NVIDIA GPU can't be used; None where there is none, or it can."""
    if find_spec("torch") is None:
        return "torch is not installed (pip install 'paceline[torch]')" if any(path.exists() for path in _NVIDIA) else None
    if not any(path.exists() for path in _DRIVERS):
        return None
    cuda = import_cuda()
    if not cuda.is_available():
        return "torch sees no CUDA device"
    if (capability := cuda.get_device_capability()) < LEAST_CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        return f"{cuda.get_device_name()} has compute capability {has}, and attention takes {least}"
    return None


def device_memory_rate() -> float:
    """Bytes a second that it reads of its own memory, by a short copy; the best of some."""
    cuda = import_cuda()
    import torch

    words = min(free_device_bytes() // 4, 1 << 28) // 8
    source = torch.ones(words, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        began.record()
        target.copy_(source)
        ended.record()
        cuda.synchronize()
        best = max(best, 2 * words * 8 / max(began.elapsed_time(ended) / 1000, 1e-9))  # a copy reads and writes
    return best


def free_device_bytes() -> int:
    """Memory that is free on the GPU; a Mac's is the machine's."""
    return available_bytes() if _has_metal() else import_cuda().mem_get_info()[0]


def _has_metal() -> bool:
    if sys.platform != "darwin" or find_spec("mlx") is None or find_spec("mlx_lm") is None:
        return False
    try:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        return bool(mx.metal.is_available())
    except (ImportError, OSError, RuntimeError, AttributeError):
        return False


def usable_cores(system: Path = Path("/sys")) -> int:
    """Physical cores within this process's affinity and its container's quota.

    Two threads on one core take turns on its one multiplier, so hardware threads are not counted. Where the system doesn't
    say which share a core (macOS), every processor counts.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    processors = os.sched_getaffinity(0)
    topology = system / "devices/system/cpu"
    cores = {_siblings(topology / f"cpu{number}/topology/thread_siblings_list", number) for number in processors}
    return max(1, min(len(cores), _quota(system / "fs/cgroup/cpu.max")))


def _siblings(path: Path, number: int) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return str(number)


def _quota(path: Path) -> int:
    """Processors' worth of time a container may use; as many as there are where it is not limited."""
    unlimited = os.cpu_count() or 1
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else max(1, math.floor(int(quota) / int(period)))


SIZE = 64 << 20
"""Bytes that are read round and round: more than most caches hold. Raising it takes memory, and time to fill it."""
BUDGET_S = 0.05
"""Of each thread's processor time. Filling the memory before takes about as long."""
LIMIT_S = 1.0
"""Of a clock on the wall, where other programs have the cores. Raising it: a start waits longer, for a better moment."""
MOMENT_S = 0.002
"""Over which bytes are counted. Raising it: threads that share their cores with other programs are rarely all at it for so long; lowering it: what a
clock reads between two pieces counts for more."""
_PIECE = 1 << 18
"""Copied at a time, into a buffer that stays in the second-level cache."""


def memory_rate(home: Home, threads: int | None = None, measure: Callable[[int], float] | None = None, *, is_busy: bool = False) -> float:
    """Bytes a second. Measures where that was not done yet, or at a bad time and this is a better one.

    Args:
        is_busy: answers are written here: what is measured now is too low.
        threads: default: as many as a step uses.
        measure: default: `stream_rate`.
    """
    threads = threads or usable_cores()
    machine = _identity(threads)
    kept = read_json_object(home.memory_rate) or {}
    said = kept.get("bytes_per_s") if kept.get("machine") == machine else None
    before = float(said) if isinstance(said, int | float) and 0 < said < 1e15 else 0.0
    disturbed = is_busy or is_disturbed()
    if before and (disturbed or kept.get("disturbed") is not True):
        return before
    rate = max(before, (measure or stream_rate)(threads))
    write_cache(home.memory_rate, json.dumps({"machine": machine, "bytes_per_s": rate, "disturbed": disturbed}).encode())
    return rate


def is_disturbed() -> bool:
    """Whether other programs have been busy for the last minute, so that what is measured now is too low."""
    return os.getloadavg()[0] > max(1.0, (os.cpu_count() or 1) / 4)


def stream_rate(threads: int) -> float:
    """Bytes a second that so many threads read together, in the best moment: one in which no other program had a core of theirs."""
    words = SIZE // 8 // threads
    with ThreadPoolExecutor(threads, "memory-rate") as pool:
        # Each thread touches what it reads first, so that the pages are near it.
        parts = list(pool.map(lambda _: np.ones(words, np.uint64), range(threads)))
        until = time.perf_counter() + LIMIT_S
        read = list(pool.map(lambda part: _read(part, until), parts))
    return best_rate([np.array(times) for times in read], min(_PIECE, words * 8))


def best_rate(times: Sequence[npt.NDArray[np.float64]], n_bytes: int) -> float:
    """Bytes a second in the best moment.

    Args:
        times: of each thread: when it began, and when it had read each piece.
        n_bytes: of a piece.
    """
    begun, ended = min(each[0] for each in times), max(each[-1] for each in times)
    moment = max(min(MOMENT_S, ended - begun), 1e-9)
    at = np.unique(np.concatenate(times))
    at = at[at <= ended - moment]
    in_moment = sum(
        np.interp(at + moment, each, n_read) - np.interp(at, each, n_read) for each in times for n_read in [np.arange(len(each))]
    )
    return n_bytes * float(np.max(in_moment)) / moment


def _read(words: npt.NDArray[np.uint64], until: float) -> list[float]:
    """For as much processor time as there is, but not for longer than that; at least a moment."""
    piece = np.empty(min(_PIECE // 8, len(words)), np.uint64)
    times, spent = [time.perf_counter()], time.thread_time()
    while True:
        for start in range(0, len(words) - len(piece) + 1, len(piece)):
            np.copyto(piece, words[start : start + len(piece)])
            times.append(time.perf_counter())
        if time.thread_time() - spent >= BUDGET_S or times[-1] >= until:
            return times


def _identity(threads: int) -> str:
    """This machine since it started, as far as the system says, and the threads."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {platform.machine()} {boot} {threads}"


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
    memory_rate: Callable[[bool], float]
    """Bytes a second, from whether answers are written here. Measures the first time, and of processors' memory again where answers were written then."""


def local_devices(home: Home) -> tuple[LocalDevice, ...]:
    """This machine's, the fastest first."""
    kernels = fastest_on_processors()

    def rate(is_busy: bool) -> float:
        return memory_rate(home, is_busy=is_busy)

    def processors(*weights: WeightsFormat) -> LocalDevice:
        return LocalDevice(kernels, weights, processor_name, total_bytes, available_bytes, rate)

    if fastest_device() is DeviceKind.CPU:
        return (processors(*(WeightsFormat if kernels.compiled else (WeightsFormat.STORED, WeightsFormat.BF16))),)
    if fastest_device() is DeviceKind.MLX:
        from paceline.backends.mlx.loading import device_name

        gpu = LocalDevice(Kernels.MLX, (DeviceKind.MLX.format_unasked,), device_name, total_bytes, available_bytes, rate)
        return gpu, processors(*(weights for weights in WeightsFormat if weights not in gpu.weights))
    gpu_rate = cache(device_memory_rate)
    gpu = LocalDevice(
        Kernels.CUDA,
        (DeviceKind.CUDA.format_unasked,),
        name=import_cuda().get_device_name,
        total_bytes=lambda: import_cuda().mem_get_info()[1],
        free_bytes=free_device_bytes,
        memory_rate=lambda _: gpu_rate(),
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


logger = logging.getLogger(__name__)

WANTED = 8192
"""Connections of members and of clients, of those who are being turned away, and files."""


def allow_open_files(wanted: int = WANTED) -> int:
    """Raise this process's own limit as far as the system lets it; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        logger.warning("this process may open %d files only: %s", soft, error)
        return soft
    return most


RING_BACKEND = "ring"
RING_VARIABLES = ("MLX_RANK", "MLX_HOSTFILE")
"""What `mlx.launch` tells each rank that it starts."""
_MOST_BYTES = 1 << 20
"""Of a host file that is read."""


@dataclass(frozen=True, slots=True)
class RingEnvironment:
    is_available: bool
    rank: int = 0
    world_size: int = 1
    backend: str = ""
    failure_reason: str = ""
    """Empty where it is available."""
    address: str = ""
    """hostname:rank, as a card says it. Empty where it is not available."""


def probe_ring_environment(environment: Mapping[str, str] | None = None) -> RingEnvironment:
    """Look.

    Args:
        environment: default: this process's variables.
    """
    environment = os.environ if environment is None else environment
    if not mlx_version():
        return RingEnvironment(is_available=False, failure_reason="mlx is not installed")
    rank, hostfile = (environment.get(name, "") for name in RING_VARIABLES)
    if not rank or not hostfile:
        missing = " and ".join(name for name in RING_VARIABLES if not environment.get(name))
        return RingEnvironment(is_available=False, failure_reason=f"{missing} not set: this process was not started by mlx.launch")
    hosts = _hosts(hostfile)
    if isinstance(hosts, str):
        return RingEnvironment(is_available=False, failure_reason=hosts)
    if not (rank.isascii() and rank.isdigit() and len(rank) < 7 and int(rank) < len(hosts)):
        return RingEnvironment(is_available=False, failure_reason=f"MLX_RANK is {rank[:20]!r}, and {hostfile} names {len(hosts)} ranks")
    reason = _no_backend()
    if reason:
        return RingEnvironment(is_available=False, failure_reason=reason)
    host = hosts[int(rank)].rpartition(":")[0]
    return RingEnvironment(True, int(rank), len(hosts), RING_BACKEND, address=f"{host}:{int(rank)}")


def mlx_version() -> str:
    """Of the package installed; empty where there is none. Imports nothing."""
    try:
        return version("mlx")
    except PackageNotFoundError:
        return ""


def _hosts(hostfile: str) -> list[str] | str:
    """The first address of each rank, or why there are none."""
    try:
        with Path(hostfile).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        return f"the host file can't be read: {error}"
    try:
        said: Any = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        return f"the host file {hostfile} is not JSON: {error}"
    if not isinstance(said, list) or not said:
        return f"the host file {hostfile} is not a list of ranks"
    hosts = [rank[0] if isinstance(rank, list) and rank else None for rank in said]
    named = [host for host in hosts if isinstance(host, str) and all(host.rpartition(":")[::2])]
    if len(named) != len(hosts):
        return f"the host file {hostfile} has a rank without host:port"
    return named


def _no_backend() -> str:
    """Why MLX has no ring here; empty where it has."""
    try:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        has: bool = mx.distributed.is_available(RING_BACKEND)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as error:
        return f"mlx can't be used: {type(error).__name__}: {error}"
    return "" if has else f"this build of mlx {mlx_version()} has no {RING_BACKEND}"
