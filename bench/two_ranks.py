"""Whether tensor ranks work here from end to end: PASS or FAIL of each thing, with its time.

    python bench/two_ranks.py                                                        # two ranks of this machine
    mlx.launch --hostfile hosts.json -- .venv/bin/python bench/two_ranks.py --model X   # of several, which have joined a fleet

hosts.json: `paceline hostfile hosts.json NAME=NUMBER NAME=NUMBER` writes it, the machine that serves first: [{"host": NAME, "port": 22, "ssh": NAME,
"ips": [NUMBER]}, ...]. Options that this does not know are those of `paceline up`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from urllib.request import Request, urlopen

RANK = "paceline.ways.tensor.rank"
STOP_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")
failed: list[str] = []


def check(name: str, what: Callable[[], str]) -> None:
    began = time.perf_counter()
    try:
        said = what()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a FAIL
        failed.append(name)
        said = f"{type(error).__name__}: {error}"
    print(f"{'FAIL' if name in failed else 'PASS'} {name}: {said} ({time.perf_counter() - began:.2f} s)", flush=True)


def send(url: str, **body: object) -> HTTPResponse:
    with urlopen(f"{url}/v1/models", timeout=60) as models:
        model = json.load(models)["data"][0]["id"]
    data = json.dumps({"model": model, "temperature": 0.8, "seed": 7, **body}).encode()
    return urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"}), timeout=600)


def ask(url: str, prompt: str, tokens: int) -> str:
    with send(url, prompt=prompt, max_tokens=tokens) as answer:
        text = json.load(answer)["choices"][0]["text"]
    assert text.strip(), "an empty answer"
    return text


def hang_up(url: str) -> str:
    with send(url, prompt="Count:", max_tokens=400, stream=True) as answer:
        answer.readline()
    until = time.monotonic() + 30
    while "paceline_requests_running 0" not in urlopen(f"{url}/metrics", timeout=30).read().decode():
        assert time.monotonic() < until, "it still runs 30 s later"
        time.sleep(0.05)
    return "the sequence is gone"


def ranks_below(pid: int) -> dict[int, float]:
    """Ranks that a process has started, and the processor's time that each took."""
    found: dict[int, float] = {}
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            if RANK in Path(f"/proc/{child}/cmdline").read_text():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                found[child] = (int(fields[11]) + int(fields[12])) / TICKS
            found |= ranks_below(child)
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if "MLX_RANK" not in os.environ and "--hostfile" not in others:
            hosts = Path(folder) / "hosts.json"
            hosts.write_text(json.dumps([["127.0.0.1:1"], ["127.0.0.1:2"]]))
            others = ["--hostfile", str(hosts), *others]
        command = [sys.executable, "-m", "paceline", "launch", "--port", "0", *others]
        if os.environ.get("MLX_RANK", "0") != "0":
            os.execv(command[0], command)
        return lead(command)


def lead(command: list[str]) -> int:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    lines, url = list[str](), ""

    def ready() -> str:
        nonlocal url
        for line in process.stdout or ():
            lines.append(line)
            if found := re.search(r"Ready at (http://\S+)/v1", line):
                url = found[1]
                return url
        raise RuntimeError("".join(lines[-5:]))

    check("loads and shards", ready)
    if url:
        threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()
        before, first = ranks_below(process.pid), ""

        def one() -> str:
            nonlocal first
            first = ask(url, "The sea is", 32)
            return f"{len(first)} characters"

        def several() -> str:
            with ThreadPoolExecutor(4) as pool:
                texts = set(pool.map(lambda _: ask(url, "The sea is", 32), range(4)))
            assert texts == {first}, "bytes differ from the first answer's"
            return "4 at once, the first one's bytes"

        def took_part() -> str:
            after = ranks_below(process.pid)
            idle = [pid for pid, spent in after.items() if spent <= before.get(pid, 0.0)]
            assert not idle, f"ranks {idle} computed nothing"
            return ", ".join(f"process {pid} {spent - before[pid]:.2f} s" for pid, spent in after.items()) or "none is on this host"

        def stops() -> str:
            ranks, began = ranks_below(process.pid), time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            took = time.perf_counter() - began
            assert took <= STOP_S, f"it took {took:.1f} s"
            assert not any(map(runs, ranks)), "ranks are left"
            return "all ranks ended"

        for name, what in {
            "one request": one,
            "several at once": several,
            "every rank took part": took_part,
            "cancel in the middle": lambda: hang_up(url),
            "stops within 5 s": stops,
        }.items():
            check(name, what)
    process.kill()
    print("FAIL" if failed else "PASS", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
