"""Compiled kernels, kept between runs: a first start compiles them, later ones read machine code.

Numba notices a changed function but not a changed callee, so the folder's name is a hash of all kernel sources, of the compilers'
versions and of the processor. Must run before the kernel modules are imported.

Processes share the folder: one compiles at a time (`alone`), the others wait and find what it left. Numba renames whole files into place, so what
differs from the seal was changed after it: by a disk, or by a process that compiled more and was killed. Those functions are compiled again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba.core import config

from paceline.backends.instructions import Lowering, compiled_for, features, lowering_in_use
from paceline.core.files import write_file

logger = logging.getLogger(__name__)

_settings: Any = config
_settings._config_fname = ""  # noqa: SLF001 - Numba would read settings from the current folder each time that `use` tells it of a cache
_VARIABLE = "NUMBA_CACHE_DIR"
_FEATURES = "NUMBA_CPU_FEATURES"
_COMPLETE, _LOCK = "complete", "lock"
_LAYERS = "team.enter-"
"""Beginning of the names of files for the function that runs layers. It is compiled last, together with nearly all others."""
_ROOM = 32 << 20
"""Bytes that must be free before kernels are written: Numba would end a start with the error of a full disk."""
_KEPT = 8
"""Folders of other versions to keep, the ones used last: there is one for each processor that `--device` names too. Each takes some 5 MiB."""


def sources() -> list[Path]:
    """Return the files that determine what kernels compute: their own, and those with constants that are compiled into them."""
    here = Path(__file__).parent
    constants = ("core/model.py", "core/weights.py", "engine/arithmetic.py")
    return [
        here / "compiling.py",
        *sorted(here.glob("cpu/*.py")),
        *sorted(here.glob("ggml/*.py")),
        *(here.parent / name for name in constants),
    ]


def _version() -> str:
    return _version_of(lowering_in_use())


@cache
def _version_of(lowering: Lowering | None) -> str:
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    digest.update(f"{version('numba')} {version('llvmlite')} {version('numpy')} {binding.get_host_cpu_name()}".encode())
    digest.update(f"{sorted(features())} {lowering}".encode())
    return digest.hexdigest()[:16]


def in_use() -> bool:
    """Return whether `use` chose the cache folder. Kernels imported without it are compiled again, because Numba's own cache would run stale callees."""
    return Path(os.environ.get(_VARIABLE, "")).name == _version()


def known(folder: Path) -> bool:
    """Return whether the function that runs layers was compiled under `folder` before.

    Some kernels may still be damaged, or another process may be compiling them.
    """
    try:
        seal: dict[str, str] = json.loads((folder / _version() / _COMPLETE).read_bytes())
        return any(Path(name).name.startswith(_LAYERS) for name in seal)
    except (OSError, ValueError, TypeError):
        return False


def use(folder: Path | None) -> bool:
    """Keep compiled kernels under `folder` (None: next to their sources). Returns whether they are there already.

    Damaged ones are removed. If the folder can't be used, this is logged, and each start compiles the kernels.
    """
    if (asked := compiled_for()) is not None:
        os.environ[_FEATURES] = asked
    root = folder if folder is not None else Path(__file__).parent / "__pycache__" / "kernels"
    target = root / _version()
    there = _is_whole(target)
    try:
        if not there:
            target.mkdir(parents=True, exist_ok=True)
            with _locked(target, wait=False) as locked:
                # While another process compiles, nothing is damaged but unfinished.
                there = _is_whole(target)
                if locked and not there:
                    _remove_damaged(target)
                    _make_room(root, target)
        os.environ[_VARIABLE] = str(target)
        with suppress(OSError):  # of another person
            os.utime(target)
    except OSError as error:
        _warn(target, error.strerror)
        os.environ.pop(_VARIABLE, None)
    config.reload_config()
    return there


@cache
def _warn(target: Path, reason: str) -> None:
    """Log that kernels can't be kept, once in a process for each folder and reason."""
    logger.warning("compiled kernels can't be kept in %s (%s): each start will compile them", target, reason)


@contextmanager
def alone(*, wait: bool = True) -> Generator[Path | None]:
    """Compile while no other process does, where compiled kernels are kept and may be written.

    Args:
        wait: for another process that compiles. Without it the block runs at the same time: little may be compiled twice.

    Yields:
        The folder in use; None where other processes compile too, or nothing is kept.
    """
    folder = Path(os.environ.get(_VARIABLE, ""))
    if in_use() and os.access(folder, os.W_OK):
        with _locked(folder, wait=wait) as locked:
            yield folder if locked else None
    else:
        yield None


@contextmanager
def _locked(target: Path, *, wait: bool = True) -> Generator[bool]:
    """Hold the folder's lock. Without `wait` the block runs even if another process has the lock; it then receives False."""
    with (target / _LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def complete() -> None:
    """Write the seal of the folder in use: the digests of all kernels compiled so far."""
    if not in_use():
        return
    folder = Path(os.environ[_VARIABLE])
    mark = folder / _COMPLETE
    try:
        seal = _seal_of(folder)
        if not mark.exists() or mark.read_bytes() != seal:
            write_file(mark, seal)
    except OSError as error:
        logger.warning("%s can't be written (%s): the next start will compile the kernels again", mark, error.strerror)


def _seal_of(target: Path) -> bytes:
    return json.dumps({str(file.relative_to(target)): _digest(file) for file in target.rglob("*.nb?")}).encode()


def _is_whole(target: Path) -> bool:
    """Return whether a folder was completed and its files are unchanged. A truncated file would end the process instead of raising an error."""
    try:
        return not _changed(target)
    except (OSError, ValueError, AttributeError):
        return False


def _changed(target: Path) -> list[str]:
    """Return the names of files that are missing or differ from the seal. Raises OSError or ValueError if the seal can't be read."""
    seal: dict[str, str] = json.loads((target / _COMPLETE).read_bytes())
    return [name for name, digest in seal.items() if not (target / name).is_file() or _digest(target / name) != digest]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _remove_damaged(target: Path) -> None:
    """Remove the functions, index and machine code, of files that are not what the seal says; all of them, and the seal, where it is none."""
    mark = target / _COMPLETE
    if not mark.exists():
        return
    try:
        names = _changed(target)
    except (ValueError, AttributeError):
        names = [str(file.relative_to(target)) for file in target.rglob("*.nb?")]
        mark.unlink()
    logger.warning("%d files of compiled kernels in %s are damaged: their functions are compiled again", len(names), target)
    for name in names:
        function = re.sub(r"(\.\d+)?\.nb.$", "", name)
        for file in (target / function).parent.glob(f"{Path(function).name}*.nb?"):
            file.unlink()
    if mark.exists():
        write_file(mark, _seal_of(target))


def _make_room(root: Path, target: Path) -> None:
    """Remove old versions, but for the latest, and see that kernels can be written."""
    folders = sorted((f for f in root.iterdir() if f != target), key=lambda f: f.stat().st_mtime, reverse=True)
    for old in folders[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if shutil.disk_usage(target).free < _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
