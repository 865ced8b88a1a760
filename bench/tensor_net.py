"""Tensor ranks on two hosts with latency between them, beside what the planner makes of it: a request's seconds, estimated and measured.

    sudo python bench/tensor_net.py [--model smollm2-135m | FILE.gguf] [--one-way-ms 0.1,0.5,2.5] [--mbit 1000] [--rounds 3]

Two machines are real processes in network namespaces, a core and a thread each; between them a switch in this process delays and paces frames
(tests/fleet/network.py), before all else that wants a core, so that a delay is what it says. A third process beside them runs the model alone, on the first
one's core; it and the ranks answer in turns. The estimate is the cost model's, from what the machines measured of themselves and of their link; with each
latency all are started anew. Where others use the processor, what
one machine takes is not what was measured when the model was first loaded: beside the planner's own estimate stands one whose part of computing is what one
machine took in the same turns, so that what is left is the exchange's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fleet.machines import Machine
from tests.fleet.network import Network, network, why_not

from paceline.bench.fleet import found_fleet
from paceline.core.clock import SystemClock
from paceline.machine.build import build_engine, introduced
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import MANIFEST
from paceline.store.home import Home

PRESET = "desk,exchange_s=0.5,restamp_s=2,ttl_s=60"
PORT = 8154
KNOWN_S = 60.0
"""For a link to be measured."""


def learn(model: str, root: Path) -> None:
    """Measure once what one thread does, as a node that serves the whole model does: cards then say it."""
    built = build_engine(NodeSettings(model, threads=1, max_running=1, prefix_cache=False))
    try:
        introduced(built, Home(root), SystemClock())
    finally:
        built.close()


def ask(url: str, model: str, prompt: int, answer: int, seed: int) -> dict[str, float]:
    """One request, of a prompt that was never asked before: seconds to the first token, and to the last."""
    draw, parts = random.Random(seed), urlsplit(url)
    body = {"model": model, "prompt": [draw.randrange(1000, 20000) for _ in range(prompt)], "max_tokens": answer, "temperature": 0}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=600)
    began = time.perf_counter()
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body | {"stream": True, "ignore_eos": True, "draft": "off"}),
        {"Content-Type": "application/json"},
    )
    came = [time.perf_counter() - began for line in connection.getresponse() if line.startswith(b'data: {"')]
    return {"first_s": came[0], "all_s": came[-1]}


def measured(net: Network, node: Machine, options: argparse.Namespace, seed: int) -> dict[str, float]:
    asked = ("--ask", node.node.url, "--model", options.model, "--prompt", str(options.prompt), "--answer", str(options.answer))
    command = [*net.inside("m1"), sys.executable, __file__, *asked, "--seed", str(seed)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def planned(node: Machine, options: argparse.Namespace, ways: str) -> list[dict[str, Any]]:
    """Choices, the best first."""
    said = node.run(*("plan", options.model, "--json", "--ways", ways, "--prompt", str(options.prompt), "--answer", str(options.answer)))
    made = json.loads(said[said.index("{") : said.rindex("}") + 1])
    return [made["chosen"], *made["runners_up"]]


def link_of(net: Network, node: Machine) -> dict[str, float]:
    """What the first machine's card says of its link to the second."""
    command = [*net.inside("m1"), sys.executable, __file__, "--link", str(node.home)]
    until = time.monotonic() + KNOWN_S
    while not (found := json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)) and time.monotonic() < until:
        time.sleep(1.0)
    return found


def link(home: Path) -> dict[str, float]:
    card = Machine("m1", home).card_of("m1")
    found = next((link for link in (card.links if card is not None else ()) if link.to == "m2"), None)
    return (
        {}
        if found is None
        else {"call_ms": 1000 * found.rtt_s, "network_ms": 1000 * (found.network_s or 0.0), "mbyte_s": found.bytes_per_s / 1e6}
    )


def started(root: Path, net: Network) -> tuple[Machine, Machine, Machine]:
    """The machines that share the model, the first of which answers; and one that runs it alone."""
    homes = found_fleet(root, Home.from_environment(), ["m1", "m2"])
    cores = sorted(os.sched_getaffinity(0))
    bare = root / "alone"
    bare.mkdir()
    for shared in ("models", "cache"):
        (bare / shared).symlink_to(Home.from_environment().root / shared, target_is_directory=True)

    def machine(name: str, at: str, home: Path, *more: str) -> Machine:
        core = str(cores[("m1", "m2").index(at) % len(cores)])
        return Machine(name, home, preset=PRESET, prefix=(*net.inside(at), "taskset", "-c", core), options=more)

    def in_fleet(name: str) -> tuple[str, ...]:
        return ("--fleet-host", net.address(name), "--fleet-port", str(PORT), "--no-mdns")

    one, two = (machine(name, name, homes[name], *in_fleet(name)) for name in ("m1", "m2"))
    return one, two, machine("alone", "m1", bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--one-way-ms", default="0.1,0.5,2.5")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ask", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--link", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.link is not None:
        print(json.dumps(link(options.link)))
        return
    if options.ask:
        print(json.dumps(ask(options.ask, options.model, options.prompt, options.answer, options.seed)))
        return
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, network("m1", "m2") as net:
        home, own = Path(folder) / "home", Home.from_environment()
        (home / "cache").mkdir(parents=True)
        (home / "models").mkdir()
        own.kernels.mkdir(parents=True, exist_ok=True)
        (home / "cache" / "kernels").symlink_to(own.kernels)
        os.environ["PACELINE_HOME"] = str(home)
        if (path := Path(options.model)).is_file():  # of which both machines have to know
            options.model = path.stem
            (home / "models" / path.stem).mkdir()
            (home / "models" / path.stem / MANIFEST).write_text(json.dumps({"path": str(path.resolve())}))
        learn(options.model, home)
        net.first()
        one, two, alone = nodes = started(Path(folder), net)
        try:
            run(net, one, two, alone, options)
        finally:
            for node in nodes:
                for up in node.running:
                    up.kill()


def run(net: Network, one: Machine, two: Machine, alone: Machine, options: argparse.Namespace) -> None:
    small = ("--threads", "1", "--context", "2048", "--kv-tokens", "4096", "--draft", "off")
    net.bytes_per_s, seed = options.mbit * 1e6 / 8, 0
    alone.up("--model", options.model, *small)
    for delay_s in [float(each) / 1000 for each in options.one_way_ms.split(",")]:
        net.delay_s = delay_s
        two.up("--no-model", "--serve-shards", "--threads", "1", "--peer", f"{net.address('m1')}:{PORT}")
        one.up("--model", options.model, "--ways", "tensor", "--peer", f"{net.address('m2')}:{PORT}", *small)
        known = link_of(net, one)
        times: dict[str, list[dict[str, float]]] = {"alone": [], "ranks": []}
        for _ in range(options.rounds):
            for name, node in (("alone", alone), ("ranks", one)):
                seed += 1
                times[name].append(measured(net, node, options, seed))
        ranks = next(each for each in planned(one, options, "tensor") if each["stages"][0]["node_id"] == "m1")
        single = next(each for each in planned(one, options, "alone") if each["stages"][0]["node_id"] == "m1")
        chosen = planned(one, options, "alone,tensor")[0]["way"]
        took, lone = (median(each["all_s"] for each in times[name]) for name in ("ranks", "alone"))
        expected, single_s = ranks["estimate"], single["estimate"]["total_s"]
        corrected = expected["compute_s"] * lone / single_s + expected["latency_s"] + expected["bandwidth_s"]
        fits = (chosen == "tensor") == (took * 1.1 < lone)
        print(
            f"{options.model}, {2000 * delay_s:g} ms there and back ({known}), load {os.getloadavg()[0]:.1f}: ranks {took:.2f} s measured, "
            f"{expected['total_s']:.2f} estimated ({expected['total_s'] / took:.2f}), {corrected:.2f} with one machine as it was ({corrected / took:.2f}); "
            f"one machine {lone:.2f} s, {single_s:.2f} estimated; the plan takes {chosen}, {'as measured' if fits else 'unlike what was measured'}; "
            f"of it {expected['compute_s']:.2f} s computing, {expected['latency_s']:.2f} s on the way; rounds: "
            + ", ".join(f"{b['all_s']:.2f} to {a['all_s']:.2f}" for a, b in zip(times["alone"], times["ranks"], strict=True)),
            flush=True,
        )
        one.node.stop()
        two.node.stop()


if __name__ == "__main__":
    main()
