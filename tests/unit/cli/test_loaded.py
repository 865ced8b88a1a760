"""`paceline ps`, `load`, `unload` and `rm` beside a real `paceline up` with several models."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import pytest
from tests.fakes.seeded_models import TINY, write_gguf
from tests.unit.cli.test_up import ENDS_S, ask, wait_ready

from paceline.store.catalog import MANIFEST
from paceline.store.home import Home

Start = Callable[..., "subprocess.Popen[str]"]
SMALL = ("--port", "0", "--context", "256", "--kv-tokens", "512", "--threads", "1")

pytestmark = pytest.mark.timeout(600)  # the first load on a machine compiles kernels


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """With two small models beside the bundled one."""
    kernels = Home.from_environment().kernels
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    home = Home.from_environment()
    home.kernels.parent.mkdir()
    home.kernels.symlink_to(kernels)
    for seed, name in enumerate(("one", "two")):
        write_gguf(home.models / name / f"{name}.gguf", TINY, "Q8_0", seed)
        (home.models / name / MANIFEST).write_text(json.dumps({"files": {f"{name}.gguf": {}}}))
    return home


def test_what_is_loaded_is_shown_and_changed_by_the_owner_alone(home: Home, start_paceline: Start) -> None:
    def paceline(*args: str, code: int = 0) -> str:
        process = start_paceline(*args)
        out, err = process.communicate(timeout=ENDS_S)
        assert process.returncode == code, out + err
        return out + err

    up = start_paceline("up", "-m", "one", "-m", "two", "--no-on-demand", *SMALL)
    wait_ready(up)
    assert "is loaded at" in paceline("rm", "two", code=2)
    assert "two is unloaded" in paceline("unload", "two")
    assert "smollm2-135m is loaded" in paceline("load", "smollm2-135m")
    (endpoint,) = json.loads(paceline("ps", "--json"))
    assert [use["name"] for use in endpoint["models"]] == ["one", "smollm2-135m"]
    elsewhere = str(write_gguf(home.root / "three.gguf", TINY, "Q8_0", 3))
    assert "three is loaded" in paceline("load", elsewhere)
    assert "three is loaded" in paceline("load", "three"), "by the name that ps shows, too"
    damaged = home.root / "four.gguf"
    damaged.write_bytes(Path(elsewhere).read_bytes()[:-4096])
    assert "Traceback" not in (refused := paceline("load", str(damaged), code=2))
    assert "four.gguf" in refused
    assert "can't be asked" not in refused
    assert "paceline unload three" in paceline("rm", elsewhere, code=2)
    assert "two is removed" in paceline("rm", "two")
    assert not (home.models / "two").exists()
    up.send_signal(signal.SIGINT)
    assert up.wait(ENDS_S) == 0
    assert "Traceback" not in up.communicate()[1]


def test_an_interrupt_while_a_request_has_its_model_loaded(home: Home, start_paceline: Start) -> None:
    up = start_paceline("up", "-m", "one", *SMALL)
    url = wait_ready(up)

    def client() -> None:
        with suppress(URLError, OSError, ValueError):  # refused, or cut off
            list(ask(url, max_tokens=200, ignore_eos=True))

    with ThreadPoolExecutor() as pool:
        pool.submit(client)
        start_paceline("ps").communicate()  # by then the load has begun, or is over
        up.send_signal(signal.SIGINT)
        assert up.wait(ENDS_S) == 0
    assert "Traceback" not in up.communicate()[1]
