"""Compiled kernels, kept between runs. A first start compiles for some twenty seconds; later ones read machine code.

Numba notices a changed function but not a changed callee, so the folder's name is a hash of all kernel sources, of the compilers'
versions and of the processor. Must run before the kernel modules are imported.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from importlib.metadata import version
from pathlib import Path

from llvmlite import binding
from numba.core import config

from paceline.core.files import write_file

logger = logging.getLogger(__name__)

_VARIABLE = "NUMBA_CACHE_DIR"
_COMPLETE = "complete"
_ROOM = 32 << 20
"""Bytes that must be free before kernels are written: Numba would end a start with the error of a full disk."""
_KEPT = 3
"""Folders of other versions to keep; each takes some 5 MiB."""


def _version() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.with_name("ggml").glob("*.py")]):
        digest.update(source.read_bytes())
    digest.update(f"{version('numba')} {version('llvmlite')} {version('numpy')} {binding.get_host_cpu_name()}".encode())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:16]


def in_use() -> bool:
    """Whether `use` chose the folder. Kernels imported without one are compiled anew: Numba's own would run stale callees."""
    return Path(os.environ.get(_VARIABLE, "")).name == _version()


def known(folder: Path) -> bool:
    """Whether every kernel of this version lies under `folder`, whole."""
    return _is_whole(folder / _version())


def use(folder: Path | None) -> bool:
    """Keep kernels under `folder` (None: beside their sources). Returns whether they are there already.

    Damaged ones are removed. Where nothing can be kept, that is logged, and each start compiles.
    """
    root = folder if folder is not None else Path(__file__).parent / "__pycache__" / "kernels"
    target = root / _version()
    there = _is_whole(target)
    try:
        if not there:
            _make_room(root, target)
        os.environ[_VARIABLE] = str(target)
    except OSError as error:
        logger.warning("compiled kernels can't be kept in %s (%s): each start will compile them", target, error.strerror)
        os.environ.pop(_VARIABLE, None)
    config.reload_config()
    return there


def complete() -> None:
    """Say that every kernel compiled so far is in the folder in use, and what it looks like."""
    if not in_use():
        return
    folder = Path(os.environ[_VARIABLE])
    seal = json.dumps({str(file.relative_to(folder)): _digest(file) for file in folder.rglob("*.nb?")}).encode()
    mark = folder / _COMPLETE
    try:
        if not mark.exists() or mark.read_bytes() != seal:
            write_file(mark, seal)
    except OSError as error:
        logger.warning("%s can't be written (%s): the next start will compile the kernels again", mark, error.strerror)


def _is_whole(target: Path) -> bool:
    """Whether a folder was completed, and its files are still what they were: a cut one would end the process, not raise."""
    try:
        seal = json.loads((target / _COMPLETE).read_bytes())
        return all(_digest(target / name) == digest for name, digest in seal.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _make_room(root: Path, target: Path) -> None:
    """An empty folder for this version, if it was once complete; old versions removed, but for the latest."""
    if (target / _COMPLETE).exists():
        logger.warning("the compiled kernels in %s are damaged, and are compiled again", target)
        shutil.rmtree(target)
    target.mkdir(parents=True, exist_ok=True)
    folders = sorted((f for f in root.iterdir() if f != target), key=lambda f: f.stat().st_mtime, reverse=True)
    for old in folders[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if shutil.disk_usage(target).free < _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
