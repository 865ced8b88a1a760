"""A pipeline over a slow network, beside what the planner makes of it: tokens a second, estimated and measured.

    sudo python bench/pipeline_net.py [--machines 2,3] [--one-way-ms 1,5,20] [--mbit 100] [--streams 1] [--json net.json]

Each machine is a real process in a network namespace of its own, with a core and a thread; between them a switch in this process delays and
paces frames (tests/fleet/network.py). The latency is of one way: a round trip takes twice that. The estimate is the cost model's, from what the
machines measured of themselves and of their ways, for the very split that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fleet.machines import Machine
from tests.fleet.network import Network, network, why_not

from paceline.bench.fleet import found_fleet
from paceline.core.clock import SystemClock
from paceline.machine.build import build_engine, introduced
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home

MODEL = "smollm2-135m"
PRESET = "desk,exchange_s=0.5,restamp_s=2,ttl_s=20"
PORT = 8154
CUTS = {2: ("0-10", "11-29"), 3: ("0-5", "6-17", "18-29")}
"""Layers of each machine."""


def learn(root: Path) -> None:
    """Measure once what one thread does, as a node that serves the whole model does: cards then say it."""
    built = build_engine(NodeSettings(MODEL, threads=1, max_running=1, prefix_cache=False))
    try:
        introduced(built, Home(root), SystemClock())
    finally:
        built.close()


def measure(root: Path, net: Network, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One pipeline at the network's present latency."""
    homes = found_fleet(root, Home.from_environment(), names)
    others = names[1:]
    cores = sorted(os.sched_getaffinity(0))
    made = [
        Machine(
            name,
            homes[name],
            preset=PRESET,
            prefix=(*net.inside(name), "taskset", "-c", str(cores[place % len(cores)])),
            options=("--fleet-host", net.address(name), "--fleet-port", str(PORT), "--no-mdns"),
        )
        for place, name in enumerate(names)
    ]
    try:
        for machine in made[1:]:
            machine.up("--no-model", "--serve-shards", "--threads", "1", *peers(net, [name for name in others if name != machine.name]))
        pins = [part for name, span in zip(names, CUTS[len(names)], strict=True) for part in ("--pin", f"{name}:{span}")]
        own = ("--own-layers", str(int(CUTS[len(names)][0].partition("-")[2]) + 1))
        plan = (
            "--prompt",
            str(options.prompt),
            "--answer",
            str(options.answer),
            "--streams",
            options.streams,
            "--rounds",
            str(options.rounds),
        )
        command = made[0].command("bench", "pipeline", *peers(net, others), *pins, *own, *plan, "--threads", "1", "--json")
        done = subprocess.run(command, env=made[0].environment, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout)["rows"]
    finally:
        for machine in made:
            for up in machine.running:
                up.kill()


def peers(net: Network, names: list[str]) -> list[str]:
    return [part for name in names for part in ("--peer", f"{net.address(name)}:{PORT}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", default="2,3")
    parser.add_argument("--one-way-ms", default="1,5,20")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--streams", default="1")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        own = Home.from_environment()
        (home / "cache").mkdir()
        own.kernels.mkdir(parents=True, exist_ok=True)
        (home / "cache" / "kernels").symlink_to(own.kernels)
        os.environ["PACELINE_HOME"] = str(home)
        learn(home)
        for count in map(int, options.machines.split(",")):
            names = [f"m{number}" for number in range(1, count + 1)]
            for latency_ms in map(float, options.one_way_ms.split(",")):
                with network(*names) as net, tempfile.TemporaryDirectory(dir=folder) as homes:
                    net.delay_s, net.bytes_per_s = latency_ms / 1000, options.mbit * 1e6 / 8
                    for row in measure(Path(homes), net, names, options):
                        said = {"machines": count, "one_way_ms": latency_ms, **row}
                        rows.append(said)
                        print(
                            f"{count} machines, {latency_ms:4.1f} ms one way, {row['streams']:2} streams: estimate {row['estimate_per_s']:6.1f}, "
                            f"measured {row['pipeline_per_s']:6.1f} tokens/s ({row['estimate_per_s'] / row['pipeline_per_s']:.2f}); "
                            f"first token {row['estimate_first_token_ms']:5.0f} and {row['first_token']['p50_ms']:5.0f} ms; "
                            f"alone {row['alone_per_s']:.0f} tokens/s; a batch on the way {row['split']['transfer_ms']:.2f} ms",
                            flush=True,
                        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
