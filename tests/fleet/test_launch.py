"""`paceline launch`, started by MLX's launcher and by hand: real ranks, and their end whichever of them is told."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI
from tests.fleet.machines import BOUND_S, Machine, Up, free_port, machines, until
from tests.fleet.test_forwarding import MODEL, client_of
from tests.fleet.test_pipeline import found_fleet

from paceline.backends import cpu
from paceline.store.home import Home

pytestmark = [
    pytest.mark.sampled(1, by="file", among="models over machines"),
    pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2"),
]

SMALL = ("--port", "0", "--context", "512", "--kv-tokens", "1024", "--threads", "2", "--draft", "off", "--no-on-demand")


class Launching(Machine):
    """A machine whose commands are given whole."""

    def command(self, *arguments: str) -> list[str]:
        return list(arguments)


def launch(machine: Machine, *command: str, **environment: str) -> Up:
    """Start what becomes a `paceline up`, with further variables in its environment."""
    variables = (f"{name}={value}" for name, value in environment.items())
    launched = Up(Launching(machine.name, machine.home), ("env", *variables, *command))
    machine.running.append(launched)
    return launched


def descendants(pid: int) -> dict[int, str]:
    """Processes that a process started, and those that they did: what each runs."""
    found: dict[int, str] = {}
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= descendants(child)
    return found


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@contextmanager
def one_host(tmp_path: Path, *command: str, **environment: str) -> Iterator[Up]:
    with machines(tmp_path, Home.from_environment().kernels, "a") as (a,):
        launched = launch(a, *command, **environment)
        launched.wait_ready()
        yield launched


def test_sigterm_to_a_rank_ends_all_once_answers_have_ended(tmp_path: Path) -> None:
    """Also where it reaches the leader a moment later, as from whoever stops a group of processes: that is no second stop."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["127.0.0.1:1"], ["127.0.0.1:2"]]))
    command = (sys.executable, "-m", "paceline", "launch", *SMALL, "--drain-s", str(BOUND_S))
    with one_host(tmp_path, *command, MLX_RANK="0", MLX_HOSTFILE=str(hosts)) as launched:
        every = descendants(launched.process.pid)
        (rank,) = (pid for pid, runs in every.items() if "paceline.ways.tensor.rank" in runs)
        (leader,) = (pid for pid, runs in every.items() if "paceline up" in runs)
        client = OpenAI(base_url=f"{launched.url}/v1", api_key="none", max_retries=0)
        question = {"role": "user", "content": "Tell me of the sea."}
        with client, client.chat.completions.create(model=MODEL, messages=[question], max_tokens=400, stream=True) as answer:  # type: ignore[list-item]
            next(iter(answer))
            os.kill(rank, signal.SIGTERM)
            launched.wait_for("Stopping")
            os.kill(leader, signal.SIGTERM)
            *_, last = answer
        assert last.choices[0].finish_reason in {"length", "stop"}
        assert launched.process.wait(BOUND_S) == 0, "".join(launched.said)
        until(lambda: gone(set(every)))


def test_mlx_launch_starts_two_ranks_that_answer(tmp_path: Path) -> None:
    pytest.importorskip("mlx")
    launcher = shutil.which("mlx.launch", path=str(Path(sys.executable).parent))
    assert launcher is not None
    here = ("--hosts", "127.0.0.1", "--repeat-hosts", "2", "--backend", "ring", "--python", sys.executable)
    os.mkfifo(tmp_path / "typed")  # one whose standard input has ended looks for more without a pause
    command = shlex.join([launcher, *here, "--", "-m", "paceline", "launch", *SMALL])
    with one_host(tmp_path, "sh", "-c", f"exec {command} 0<>{shlex.quote(str(tmp_path / 'typed'))}") as launched:
        every = descendants(launched.process.pid)
        assert sum("paceline.ways.tensor.rank" in runs for runs in every.values()) == 1
        assert any("Rank 1 is a process of what runs on 127.0.0.1 already" in line for line in launched.said)
        (leader,) = (pid for pid, runs in every.items() if "paceline launch" in runs)
        os.kill(leader, signal.SIGTERM)
        launched.process.wait(BOUND_S)
        until(lambda: gone(set(every)))


def test_two_hosts_are_two_nodes_of_the_fleet(tmp_path: Path) -> None:
    hosts, port = tmp_path / "hosts.json", free_port()
    hosts.write_text(json.dumps([{"host": "127.0.0.1", "port": 22}, {"host": "127.0.0.2", "port": 22}]))
    with machines(tmp_path, Home.from_environment().kernels, "a", "b") as (a, b):
        found_fleet(a, b)
        command = (sys.executable, "-m", "paceline", "launch", "--hostfile", str(hosts), *SMALL, "--fleet-port", str(port), "--no-mdns")
        second = launch(b, *command, "--fleet-host", "127.0.0.2", MLX_RANK="1")
        first = launch(a, *command, "--fleet-host", "127.0.0.1", MLX_RANK="0")
        second.wait_ready()
        first.wait_ready()
        assert sum("paceline.ways.tensor.rank" in runs for runs in descendants(second.process.pid).values()) == 1
        said = client_of(a).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
        assert re.search(r"\w", said.choices[0].message.content or "")
        for each in (first, second):
            each.process.send_signal(signal.SIGTERM)
            assert each.process.wait(BOUND_S) == 128 + signal.SIGTERM, "".join(each.said)
