"""Make a Debian for 64-bit ARM with what the kernels' tests need, to be run under qemu: .venv/arm64. Changes nothing where there is one.

It takes debootstrap, and qemu-user-static to be of use: `apt-get install qemu-user-static debootstrap`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(sys.prefix) / "arm64"
PYTHON = "3.11"
"""Of Debian 12."""
PLATFORMS = ("manylinux_2_31_aarch64", "manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
PROGRAMS = ("qemu-aarch64-static", "debootstrap", "dpkg-deb")
WITH = (
    "numba",
    "llvmlite",
    "numpy",
    "pytest",
    "pytest-timeout",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "gguf",
    "tqdm",
    "pyyaml",
    "requests",
    "hypothesis",
    "sortedcontainers",
    "llguidance",
)
"""Packages as they are here. Each is named, and none is asked what else it needs."""


def main() -> None:
    if (ROOT / "made").exists():
        return
    _, debootstrap, dpkg = programs = [shutil.which(program) for program in PROGRAMS]
    if missing := [name for name, found in zip(PROGRAMS, programs, strict=True) if found is None]:
        sys.exit(f"There is no {' and no '.join(missing)}: apt-get install qemu-user-static debootstrap")
    shutil.rmtree(ROOT, ignore_errors=True)
    print("Making a Debian for 64-bit ARM in", ROOT, flush=True)
    subprocess.run(
        [str(debootstrap), "--arch=arm64", "--variant=minbase", "--foreign", "--include=python3", "bookworm", ROOT],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    # Nothing is set up in there: libraries and Python are all that is asked for.
    for package in (ROOT / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run([str(dpkg), "-x", package, ROOT], check=True)
    wheels = ROOT / "wheels"
    named = [f"{name}=={version(name)}" for name in WITH]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON, *platforms, "--dest", wheels]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *named], check=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(ROOT / "site")
    (ROOT / "made").touch()


if __name__ == "__main__":
    main()
