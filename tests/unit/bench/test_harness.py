"""The comparison's own parts: workers as real processes, the weights written for others, the clients' parsing, the share of bystanders."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paceline.backends.quantize import to_float32
from paceline.store.catalog import open_model
from paceline.store.digests import DigestCache
from paceline.store.hf_folder import SafetensorsWeights
from paceline.store.home import Home

BENCH = Path(__file__).resolve().parents[3] / "bench"
WORKER = """
import time
from worker import Times, serve

class Echo:
    def run(self, prompts, answer_tokens):
        print("a library prints")
        if answer_tokens == 13:
            raise ValueError("thirteen")
        return Times(1.0, [[2.0 + which + step for step in range(answer_tokens)] for which, _ in enumerate(prompts)])

def load(job):
    return Echo(), {"model": job.model, "setting": job.setting}

serve(load)
"""


@pytest.fixture(autouse=True)
def bench_modules() -> Iterator[None]:
    """The scripts import one another by name, as scripts do."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(BENCH):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


class TestContender:
    @pytest.fixture
    def contender(self, tmp_path: Path) -> Iterator[object]:
        script = tmp_path / "echo.py"
        script.write_text(WORKER)
        module = load("contender")
        environment = {"PYTHONPATH": str(BENCH / "engines")}
        kind = module.Kind("echo", str(script), ("",), Path(sys.executable), True, environment)
        job = load("engines.worker").Job("a model", "a setting", 1, 2, 64)
        contender = module.Contender(kind, job, tmp_path / "log")
        yield contender
        contender.kill()

    def test_it_loads_runs_and_reports_raw_times(self, contender: object) -> None:
        assert contender.about == {"model": "a model", "setting": "a setting"}
        contender.resume()
        timing = contender.run([(1, 2), (3,)], 2)
        contender.pause()
        assert timing.started_s == 1.0
        assert timing.arrivals_s == ((2.0, 3.0), (3.0, 4.0))

    def test_it_is_suspended_between_runs(self, contender: object) -> None:
        # The signal was sent before the load returned; a stopped child is reported to its parent.
        _, status = os.waitpid(contender.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP

    def test_a_failure_is_told_with_its_reason(self, contender: object) -> None:
        contender.resume()
        with pytest.raises(load("contender").ContenderError, match="thirteen"):
            contender.run([(1,)], 13)
        assert contender.run([(1,)], 1).arrivals_s == ((2.0,),)

    def test_a_worker_that_died_is_told(self, contender: object) -> None:
        os.kill(contender.pid, signal.SIGKILL)
        with pytest.raises(load("contender").ContenderError, match=r"echo \(a setting\) ended"):
            contender.run([(1,)], 1)

    def test_an_engine_that_is_not_installed_is_told(self, tmp_path: Path) -> None:
        module = load("contender")
        kind = module.Kind("none", "run_llama.py", ("",), tmp_path / "no-python", True, {})
        with pytest.raises(OSError, match="no-python"):
            module.Contender(kind, load("engines.worker").Job("m", "", 1, 1, 64), tmp_path / "log")


class TestWeights:
    def test_the_folder_holds_the_models_own_numbers(self, tmp_path: Path, bundled_gguf: Path) -> None:
        weights = load("weights")
        folder = weights.bf16_folder(str(bundled_gguf), tmp_path)
        theirs, ours = open_model(str(bundled_gguf)).weights, SafetensorsWeights(folder, DigestCache(Home(tmp_path / "home")))
        assert ours.spec == theirs.spec
        for name in ("model.layers.3.self_attn.q_proj.weight", "model.norm.weight"):
            exact = to_float32(theirs.read(name))
            kept = to_float32(ours.read(name))
            np.testing.assert_allclose(kept, exact, rtol=2**-8, atol=0)
        assert weights.bf16_folder(str(bundled_gguf), tmp_path) == folder


class TestQuiet:
    def stat(self, proc: Path, machine_ticks: int, own_ticks: int) -> None:
        (proc / "stat").write_text(f"cpu  {machine_ticks} 0 0 5000 0 0 0 0 0 0\ncpu0 0\n")
        for pid in (7, os.getpid()):
            (proc / str(pid)).mkdir(exist_ok=True)
            ticks = own_ticks if pid == 7 else 0
            (proc / str(pid) / "stat").write_text(f"{pid} (a name) with) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0\n")

    def test_time_of_the_measured_process_is_its_own(self, tmp_path: Path) -> None:
        self.stat(tmp_path, 100, 0)
        bystanders = load("quiet").Bystanders([7], tmp_path)
        self.stat(tmp_path, 400, 300)
        assert bystanders.share() == 0.0

    def test_time_of_others_counts(self, tmp_path: Path) -> None:
        self.stat(tmp_path, 100, 0)
        bystanders = load("quiet").Bystanders([7], tmp_path)
        self.stat(tmp_path, 400, 100)
        assert bystanders.share() > 0

    def test_nothing_is_known_where_the_system_is_silent(self, tmp_path: Path) -> None:
        assert load("quiet").Bystanders([7], tmp_path).share() is None


class TestClient:
    def stream(self, *pieces: bytes) -> object:
        client = load("http_client")
        stream = object.__new__(client.Stream)
        stream.pieces = [(float(at), piece) for at, piece in enumerate(pieces)]
        return client.parsed(stream)

    def test_events_are_stamped_and_tokens_are_the_endpoints_count(self) -> None:
        parsed = self.stream(
            b"HTTP/1.1 200 OK\r\n\r\n",
            b'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"choices":[{"index":0,"text":"b"}]}\n\n',
            b'data: {"choices":[],"usage":{"completion_tokens":31,"total_tokens":40}}\n\n',
            b"data: [DONE]\n\n",
        )
        assert parsed == {"events_s": [1.0, 1.0], "ended_s": 3.0, "tokens": 31}

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 429 Too Many\r\n\r\n", b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{}}\n\n', b""])
    def test_an_answer_that_broke_off_is_no_measurement(self, answer: bytes) -> None:
        with pytest.raises(RuntimeError, match="the endpoint answered"):
            self.stream(answer)
