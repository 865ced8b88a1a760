"""The pause of an answer whose only other machine is killed, next to the time that this machine takes to load the layers it takes over.

    python bench/local_fallback.py [--model smollm2-135m] [--rounds 3]

Two nodes of this machine share the model; the second, a real process, dies by SIGKILL while an answer streams. The load is timed in the same run.
Exit status 1 if a pause is longer than its load and `MORE_S`, or if a token differs from the answer before the loss.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.bench.fault import answer, requests
from paceline.bench.fleet import BenchNode, LocalFleet
from paceline.cli.sharing import fleet_settings
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.fleet.plan import Pin
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home
from paceline.ways.pipeline.executor.search import LocalRoute
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes import build

MORE_S = 2.0
OWN_LAYERS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    loads_s, loads_the_rest = list[float](), build.loads_the_rest

    def timed(*args: Any) -> Callable[[], LocalRoute]:
        load = loads_the_rest(*args)

        def run() -> LocalRoute:
            began = time.perf_counter()
            try:
                return load()
            finally:
                loads_s.append(time.perf_counter() - began)

        return run

    build.loads_the_rest = timed
    fleet, clock = LocalFleet(2, 1), SystemClock()
    os.environ["PACELINE_HOME"] = str(fleet.homes["local-1"])
    settings = NodeSettings(options.model, context=512, kv_tokens=4096, threads=1)
    order = PipelineOrder(
        PipelineSettings(enabled=True, fallback_to_local=True), (Pin(NodeId("local-1")), Pin(NodeId("local-2"))), OWN_LAYERS
    )
    asked, is_right, node = requests([tuple(range(10, 74))], 64), True, None
    try:
        node = BenchNode(fleet_settings(fleet.port, fleet.host, (), fleet.preset, mdns=False, needed=True), Home.from_environment(), clock)
        gone = set[bytes]()
        for turn in range(options.rounds):
            if turn:
                fleet.start("local-2")
            node.wait_for(["local-2"], beside=gone)
            node.wait_for_links([NodeId("local-2")])
            gone |= {card.instance for card in node.cards if card.node_id == "local-2"}
            built = node.build(settings, order)
            try:
                right = answer(built.engine, asked, clock).tokens
                seen = answer(built.engine, asked, clock, 16, lambda: fleet.kill("local-2"))
            finally:
                built.close()
            same = seen.tokens == right
            print(
                f"pause {seen.gap_s:.2f} s, load {loads_s[-1]:.2f} s, {'same' if same else 'OTHER'} tokens; load average {os.getloadavg()[0]:.1f}"
            )
            is_right &= same and seen.gap_s <= loads_s[-1] + MORE_S
    finally:
        if node is not None:
            node.close()
        fleet.close()
    print("PASS" if is_right else "FAIL")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
