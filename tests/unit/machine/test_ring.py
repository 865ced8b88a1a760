"""The ring's environment, and a real ring of two processes over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.ports import find_port
from paceline.machine import devices
from paceline.machine.devices import RingEnvironment, mlx_version, probe_ring_environment

needs_mlx = pytest.mark.skipif(not mlx_version(), reason="mlx is not installed (there are wheels for Linux with glibc 2.35 and for macOS)")

RANK = """
import json
import mlx.core as mx
from paceline.machine.devices import probe_ring_environment
seen = probe_ring_environment()
group = mx.distributed.init(backend=seen.backend, strict=True)
total = mx.distributed.all_sum(mx.array([float(seen.rank + 1)]), group=group, stream=mx.cpu)
mx.eval(total)
print(json.dumps([seen.is_available, seen.rank, seen.world_size, seen.address, group.rank(), group.size(), total.item()]))
"""


@needs_mlx
def test_two_processes_are_a_ring(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in (find_port("127.0.0.1"), find_port("127.0.0.1"))]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], ended
    for rank, (said, _) in enumerate(ended):
        assert json.loads(said) == [True, rank, 2, f"127.0.0.1:{rank}", rank, 2, 3.0]


@needs_mlx
def test_a_rank_says_so_without_opening_a_socket(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"], ["10.0.0.7:5000", "10.1.0.7:5000"], ["[::1]:5000"]]))
        assert probe_ring_environment({"MLX_RANK": "0", "MLX_HOSTFILE": str(hostfile)}) == RingEnvironment(
            True, 0, 3, "ring", address="127.0.0.1:0"
        )
    assert probe_ring_environment({"MLX_RANK": "1", "MLX_HOSTFILE": str(hostfile)}).address == "10.0.0.7:1"


def test_without_mlx_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "mlx_version", lambda: "")
    assert probe_ring_environment({"MLX_RANK": "0", "MLX_HOSTFILE": "x"}) == RingEnvironment(
        is_available=False, failure_reason="mlx is not installed"
    )


@pytest.mark.parametrize(
    ("variables", "said", "reason"),
    [
        ({}, None, "MLX_RANK and MLX_HOSTFILE not set"),
        ({"MLX_RANK": "0"}, None, "MLX_HOSTFILE not set"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "/nowhere"}, None, "can't be read"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "a\0b"}, None, "can't be read"),
        ({"MLX_RANK": "0"}, "{", "not JSON"),
        ({"MLX_RANK": "0"}, "[" * 100_000, "not JSON"),
        ({"MLX_RANK": "0"}, "\udcff", "not JSON"),
        ({"MLX_RANK": "0"}, "{}", "not a list"),
        ({"MLX_RANK": "0"}, "[]", "not a list"),
        ({"MLX_RANK": "0"}, "[" + " " * (1 << 20) + "]", "not a list"),
        ({"MLX_RANK": "0"}, '[["a:1"], []]', "without host:port"),
        ({"MLX_RANK": "0"}, '[["a:1"], ["b"]]', "without host:port"),
        ({"MLX_RANK": "0"}, '["a:1"]', "without host:port"),
        ({"MLX_RANK": "1"}, '[["a:1"]]', "names 1 ranks"),
        ({"MLX_RANK": "-1"}, '[["a:1"]]', "MLX_RANK is '-1'"),
        ({"MLX_RANK": "x"}, '[["a:1"]]', "MLX_RANK is 'x'"),
        ({"MLX_RANK": "9" * 5000}, '[["a:1"]]', "MLX_RANK is"),
    ],
)
def test_what_is_wrong_is_reported(
    variables: dict[str, str], said: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "mlx_version", lambda: "0.30")
    if said is not None:
        (tmp_path / "hosts.json").write_bytes(said.encode("utf-8", "surrogateescape"))
        variables = {**variables, "MLX_HOSTFILE": str(tmp_path / "hosts.json")}
    found = probe_ring_environment(variables)
    assert not found.is_available
    assert reason in found.failure_reason
    assert (found.address, found.backend) == ("", "")


@pytest.mark.parametrize("broken", [ImportError("no libmlx"), OSError("GLIBC_2.35 not found"), RuntimeError("no Metal device")])
def test_a_broken_mlx_is_reported(broken: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise broken

    monkeypatch.setattr(devices, "mlx_version", lambda: "0.30")
    for name in ("mlx", "mlx.core"):
        monkeypatch.setitem(sys.modules, name, Broken())
    (tmp_path / "hosts.json").write_text('[["a:1"]]')
    found = probe_ring_environment({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts.json")})
    assert not found.is_available
    assert "mlx can't be used" in found.failure_reason
