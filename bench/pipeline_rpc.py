"""A pipeline's single stream beside llama.cpp's RPC, in turns: two machines of a core and a thread each, the same weights.

    python bench/pipeline_rpc.py --llama DIR [--rounds 5] [--json pipeline_rpc.json]

DIR holds `ggml-rpc-server` and `llama-bench` of a llama.cpp built with GGML_RPC. Ours is what bench/pipeline.py measures: mutual TLS, the caller holds
the first layers and the head. Theirs: two servers, a core each, in the clear; `llama-bench` beside them on the first. 128 tokens generated behind 128.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.store.catalog import resolve
from paceline.store.home import Home

HERE = Path(__file__).parent


def ours() -> float:
    """Tokens a second, of a process of its own."""
    out = HERE / f".pipeline-{os.getpid()}.json"
    command = [sys.executable, str(HERE / "pipeline.py"), "--streams", "1", "--rounds", "1", "--json", str(out)]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text())["1"]["two"][0])
    finally:
        out.unlink(missing_ok=True)


def theirs(folder: Path, model: Path, ports: tuple[int, int]) -> float:
    """Tokens a second as llama-bench counts them."""
    command = [str(folder / "llama-bench"), "-m", str(model), "--rpc", ",".join(f"127.0.0.1:{port}" for port in ports), "-ngl", "99"]
    command += ["-t", "1", "-p", "0", "-n", "128", "-d", "128", "-r", "2", "-o", "json"]
    ran = subprocess.run(["taskset", "-c", "0", *command], check=True, capture_output=True, text=True)
    return float(json.loads(ran.stdout)[0]["avg_ts"])


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[int, int]]:
    """Two of theirs."""
    ports = (free_port(), free_port())
    running = [
        subprocess.Popen(
            ["taskset", "-c", str(core), str(folder / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for core, port in enumerate(ports)
    ]
    try:
        until = time.monotonic() + 20
        for port in ports:
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
                time.sleep(0.05)
        yield ports
    finally:
        for server in running:
            server.kill()
            server.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--llama", type=Path, required=True)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    model = resolve("smollm2-135m", Home.from_environment()).path
    rates: dict[str, list[float]] = {"paceline": [], "llama.cpp RPC": []}
    with servers(options.llama) as ports:
        for _ in range(options.rounds):
            rates["paceline"].append(ours())
            rates["llama.cpp RPC"].append(theirs(options.llama, model, ports))
    ratios = sorted(a / b for a, b in zip(*rates.values(), strict=True))
    for name, found in rates.items():
        print(f"{name:14} {statistics.median(found):7.1f} tok/s  ({min(found):.1f} to {max(found):.1f})")
    print(f"ratio          {statistics.median(ratios):7.2f}x  ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if options.json:
        options.json.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
