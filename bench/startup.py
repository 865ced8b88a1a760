"""What a first start of `paceline up` costs (no kernels in its home), and a second one: processor seconds of all its processes, and clock seconds.

Trees are measured in turns, so that what else runs hurts all alike: `python bench/startup.py --tree ../before --tree .`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from endpoint import Endpoint

LOOK_S = 0.05


class Spent:
    """Processor seconds of a process and of those it starts: the last seen of those that ended is what they took."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._watch, args=(psutil.Process(pid),), daemon=True)
        self._thread.start()

    def _watch(self, process: psutil.Process) -> None:
        while not self._over.wait(LOOK_S):
            self._look(process)

    def _look(self, process: psutil.Process) -> None:
        for one in (process, *process.children(recursive=True)):
            try:
                times = one.cpu_times()
            except psutil.Error:
                continue
            self._of[one.pid] = times.user + times.system

    def end(self) -> float:
        self._over.set()
        assert self._thread is not None
        self._thread.join()
        return sum(self._of.values())


def start(tree: Path, model: str, home: Path, log: Path) -> dict[str, float]:
    """Start, ask for its health, then one answer."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(tree / "src"), "PACELINE_HOME": str(home)}
    spent = Spent()
    endpoint = Endpoint("--model", model, log=log, environment=environment, on_started=spent.begin)
    try:
        url = f"http://127.0.0.1:{endpoint.port}"
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not any("Ready" in line for line in endpoint.said):
                time.sleep(LOOK_S)
            client.get(f"{url}/health").raise_for_status()
            health_s, processor_s = time.perf_counter() - endpoint.began_s, spent.end()
            name = client.get(f"{url}/v1/models").json()["data"][0]["id"]
            body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
            client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
        return {"processor_s": processor_s, "health_s": health_s, "answer_s": time.perf_counter() - endpoint.began_s}
    finally:
        endpoint.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; may be repeated; this one where none is named")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [Path(__file__).parents[1]]]
    first: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    second: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "up.log"
        for number in range(options.rounds):
            for place, tree in enumerate(trees):
                home = Path(folder) / f"home-{place}"
                shutil.rmtree(home / "cache" / "kernels", ignore_errors=True)
                cold = start(tree, options.model, home, log)
                if number or options.rounds == 1:  # the first round writes the tree's byte code too
                    first[tree].append(cold)
                second[tree].append(start(tree, options.model, home, log))
                loads.append(os.getloadavg()[0])

    def told(rounds: list[dict[str, float]]) -> dict[str, float]:
        return {key: round(median(one[key] for one in rounds), 2) for key in rounds[0]}

    report: dict[str, Any] = {
        "trees": [{"tree": str(tree), "first": told(first[tree]), "second": told(second[tree])} for tree in trees],
        "rounds": options.rounds,
        "load_average": [round(load, 1) for load in loads],
    }
    if len(trees) > 1:
        base, last = report["trees"][0], report["trees"][-1]
        report["last_to_first_tree"] = {
            kind: {key: round(last[kind][key] / base[kind][key], 2) for key in base[kind]} for kind in ("first", "second")
        }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
