"""Install torch, without gigabytes of CUDA where there is no NVIDIA GPU.

With `--if-needed` nothing is installed where Paceline's own kernels run and there is no such GPU: then tests alone use torch.
On macOS, or beside an NVIDIA GPU, pip's ordinary torch is right. On Linux without one, a CPU build is looked for: first where this
machine's own pip looks (its configuration, a wheel folder), then, as PyTorch's documentation has it, through uv's `--torch-backend cpu`.
What it needs is installed first, as requirements/torch.txt names it, and uv as requirements/uv.txt does, both by hash. Torch itself is named by its
version alone: PyTorch's own index could not be reached when this was written, so no hash of its CPU build could be verified.
`TORCH_SPEC` overrides what is installed; `PIP_EXTRA` adds options to pip (an index or a wheel folder of your own).
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pinned() -> str:
    """The torch that pyproject.toml pins."""
    (spec,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["torch"]
    return spec


def has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def is_needed() -> bool:
    """Whether serving models on this machine takes torch: on an NVIDIA GPU, where the processor has no compiled kernels, or where it is asked for."""
    from paceline.backends import cpu

    return "TORCH_SPEC" in os.environ or has_nvidia_gpu() or not cpu.runs_here()


def installed() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def pip_install() -> list[str]:
    return [sys.executable, "-m", "pip", "install", "--quiet", *shlex.split(os.environ.get("PIP_EXTRA", ""))]


def by_hash(name: str) -> list[str]:
    """Return the command that installs a file of requirements/."""
    return [*pip_install(), "--no-deps", "--require-hashes", "--requirement", str(ROOT / f"requirements/{name}.txt")]


def attempts(spec: str) -> list[list[str]]:
    """Commands to try, in order; the first that succeeds is enough."""
    pip = pip_install()
    if "TORCH_SPEC" in os.environ or platform.system() != "Linux" or has_nvidia_gpu() or "+" in spec:
        return [[*pip, spec]]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, "--torch-backend", "cpu", spec]
    return [[*pip, f"{spec}+cpu"], uv]


def main() -> int:
    if "--if-needed" in sys.argv[1:] and not is_needed():
        return 0
    spec = os.environ.get("TORCH_SPEC", pinned())
    if (have := installed()) is not None and spec in {f"torch=={have}", f"torch=={have.partition('+')[0]}"}:
        return 0
    print(f"Installing {spec} (the largest download)", flush=True)
    subprocess.run(by_hash("torch"), check=True)
    commands = attempts(spec)
    for command in commands:
        if command[2] == "uv":
            subprocess.run(by_hash("uv"), check=True)
        # An attempt that fails is not yet an error: pip says "no matching distribution" where no CPU build is configured.
        last = command is commands[-1]
        if subprocess.run(command, check=False, stderr=None if last else subprocess.DEVNULL).returncode == 0:
            return 0
    print(
        f"No CPU build of {spec} could be installed. Give pip a place that has one and try again:\n"
        f"  make install PIP_EXTRA='--find-links FOLDER' TORCH_SPEC={spec}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
