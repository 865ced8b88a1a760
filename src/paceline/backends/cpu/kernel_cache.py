"""Compiled kernels, kept between runs. A first start compiles for some twenty seconds; later ones read machine code.

Numba notices a changed function but not a changed callee, so the folder's name is a hash of all kernel sources, of the compilers'
versions and of the processor. Must run before the kernel modules are imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib.metadata import version
from pathlib import Path

from llvmlite import binding
from numba.core import config

_VARIABLE = "NUMBA_CACHE_DIR"
_COMPLETE = "complete"
_KEPT = 3
"""Folders of other versions to keep; each takes some 5 MiB."""


def _version() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{version('numba')} {version('llvmlite')} {version('numpy')} {binding.get_host_cpu_name()}".encode())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:16]


def in_use() -> bool:
    """Whether `use` chose the folder. Kernels imported without one are compiled anew: Numba's own would run stale callees."""
    return Path(os.environ.get(_VARIABLE, "")).name == _version()


def known(folder: Path) -> bool:
    """Whether every kernel of this version lies under `folder`."""
    return (folder / _version() / _COMPLETE).exists()


def use(folder: Path | None) -> bool:
    """Keep kernels under `folder` (None: beside their sources). Returns whether they are there already."""
    root = folder if folder is not None else Path(__file__).parent / "__pycache__" / "kernels"
    target = root / _version()
    os.environ[_VARIABLE] = str(target)
    config.reload_config()
    there = (target / _COMPLETE).exists()
    if not there and root.is_dir():
        folders = sorted((f for f in root.iterdir() if f != target), key=lambda f: f.stat().st_mtime, reverse=True)
        for old in folders[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
    return there


def complete() -> None:
    """Say that every kernel is in the folder now in use."""
    folder = Path(os.environ[_VARIABLE])
    if folder.is_dir():
        (folder / _COMPLETE).touch()
