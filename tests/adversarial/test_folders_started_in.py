"""A folder that came with a download may be the one a person starts Paceline in: no code in it runs."""

from __future__ import annotations

import os
import plistlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.bench.fleet import LocalFleet
from paceline.cli import launch, service
from paceline.core.errors import NixlFailed
from paceline.core.generation import Grammar, GrammarKind
from paceline.core.processes import python_command
from paceline.engine.grammar_trial import GrammarTrial
from paceline.net.nixl import NixlAgent
from paceline.net.trust.authority import Authority, AuthorityProcess
from paceline.net.trust.signing import SignedKind
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import BUNDLED, open_model
from paceline.store.home import Home
from paceline.store.tokenizer import ModelTokenizer
from paceline.ways.tensor.process import RankProcess

RAN = "ran"


@pytest.fixture(autouse=True)
def started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules by names that Paceline's processes import, each of which says that it ran."""
    folder = tmp_path / "model"
    (folder / "paceline").mkdir(parents=True)
    for module in ("paceline/__init__", "paceline/__main__", "shutil", "json"):
        (folder / f"{module}.py").write_text(f"open({str(folder / RAN)!r}, 'a').write({module!r})")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(folder)
    return folder


def test_a_tokenizers_process_imports_nothing_from_it(started_in: Path, bundled_gguf: Path) -> None:
    own = open_model(BUNDLED, Home.from_environment()).tokenizer
    assert isinstance(own, ModelTokenizer)
    tokenizer = BoundedTokenizer(own)
    try:
        assert tokenizer.encode("hello") == own.encode("hello")
    finally:
        tokenizer.close()
        assert not (started_in / RAN).exists()


def start_rank() -> None:
    with ExitStack() as kept:
        fd = os.memfd_create("memory") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
        kept.callback(os.close, fd)
        memory: Any = SimpleNamespace(say_done=lambda *_: None, number=0)
        rank = RankProcess(cast("Any", SimpleNamespace(rank=1)), memory, fd, 1.0)  # which is no order: it ends at once
        rank.popen.wait(100)
        rank.close(0)


def launch_rank() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))
    assert launch._run(["--no-such-option"]) == 2


def sign() -> None:
    authority = Authority.create(time.time())
    file = Path("ca")
    file.write_bytes(authority.to_pem())
    file.chmod(0o600)
    assert AuthorityProcess(file.absolute(), authority.root).sign(SignedKind.REVOCATION, b"x")


def run_service() -> None:
    command = plistlib.loads(service.plist(["--help"], Path("/"), 1))["ProgramArguments"]
    assert subprocess.run(command, capture_output=True, check=False, timeout=100).returncode == 0


def run_module() -> None:
    """A person typed it, without -P."""
    assert subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, check=False, timeout=100).returncode == 0


def try_form() -> None:
    assert GrammarTrial().refusal(Grammar(GrammarKind.REGEX, "a")) is None


@pytest.mark.parametrize("start", [start_rank, launch_rank, sign, run_service, run_module, try_form])
def test_no_process_of_this_program_imports_anything_from_it(started_in: Path, start: Callable[[], None]) -> None:
    if start is run_module:  # a folder of that name can't be told from the package itself
        shutil.rmtree("paceline")
    start()
    assert not (started_in / RAN).exists()


def test_no_settings_of_compilers_are_read_from_it(started_in: Path) -> None:
    """They name folders of caches, which are pickles."""
    write = f"from pathlib import Path; Path('.numba_config.yaml').write_text('disable_jit: 1\\ncache_dir: {started_in}')\n"
    look = "from paceline.backends import kernel_cache\nfrom numba.core import config\n"
    check = "config.reload_config()\nassert not config.DISABLE_JIT\nassert not config.CACHE_DIR\nimport yaml\n"
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    for works in (look + write + check, look + check):  # the file comes once a process runs, and is there before the next
        done = subprocess.run(python_command("-c", works), env=env, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        assert Path(".numba_config.yaml").exists()


def test_nothing_that_reads_settings_of_libraries_from_it_is_loaded(started_in: Path) -> None:
    (started_in / "ucx.conf").write_text(f"UCX_LOG_FILE={started_in / RAN}")
    with pytest.raises(NixlFailed, match=r"ucx\.conf"):
        NixlAgent()


def test_local_nodes_import_nothing_from_it(started_in: Path, tmp_path: Path) -> None:
    fleet = LocalFleet(2, 1, model=tmp_path / "no model")  # so that the node ends at once
    fleet.close()
    assert not (started_in / RAN).exists()
