"""Engines of other makers as real processes, on ports that the system chose. They end with the test, and with the process that started them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
"""Longest start of an engine; reached only when a test fails."""

LLAMA_SERVER = """
import json, sys, xllamacpp
model, wanted = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostnames = model, wanted.pop("port"), ["127.0.0.1"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted.pop("threads", 1)
params.warmup, params.endpoint_metrics, params.ui = False, True, False
params.mmproj.path = wanted.pop("projector", "")
for name, value in wanted.items():
    setattr(params, name, value)
server = xllamacpp.Server(params)
sys.stdin.read()
"""
"""llama.cpp's server in a process. It ends when its input does."""


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that answers."""

    url: str
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextmanager
def llama_server(model: Path, port: int | None = None, **params: object) -> Generator[Running]:
    """Run llama-server with a model.

    Args:
        port: that it listens on; None: a free one.
        params: fields of `xllamacpp.CommonParams`, such as n_ctx and n_parallel; `threads`; and `projector`, the path of a file for images.
    """
    port = port or free_port()
    with _started([sys.executable, "-c", LLAMA_SERVER, str(model), json.dumps(params | {"port": port})], port) as running:
        yield running


@contextmanager
def mlx_server(folder: Path, *args: str) -> Generator[Running]:
    """Run `mlx_lm.server` with a folder of a model, without a way to the hub."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port), *args]
    with _started(command, port, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(folder)) as running:
        yield running


@contextmanager
def _started(command: list[str], port: int, **environment: str) -> Generator[Running]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")} | environment
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
    try:
        running = Running(f"http://127.0.0.1:{port}", process)
        _wait(running)
        yield running
    finally:
        process.kill()
        process.communicate()


def _wait(running: Running) -> None:
    """Wait until the engine is ready."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if running.process.poll() is not None:
            assert running.process.stderr is not None
            raise AssertionError(running.process.stderr.read().decode()[-2000:])
        try:
            with urllib.request.urlopen(running.url + "/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"{running.url} did not start")
