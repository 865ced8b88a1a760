"""First token of a new prompt, computed at another node and computed here, in turns.

    python bench/push.py --tokens 2048 --share 0.25
    python bench/push.py --tokens 4096 --share 1 --threads 1             # P as fast as D, which is idle: the prompt stays
    python bench/push.py --tokens 4096 --share 1 --threads 1 --live 8    # and while it writes eight answers: their gaps
    python bench/push.py --tokens 8192 --rounds 1 --model 1b.gguf        # of bench/make_model.py --preset llama-1b
    unshare -n sh -c 'ip link set lo up; python bench/push.py --stream'  # bytes moved, which are the loopback interface's: nobody else's are beside them

Two `paceline up` of one machine, mutual TLS on: P computes prompts for D. D gets its share of the time by being stopped for the rest of it, a tenth of a
second at a time; P is not held back. Both have the machine's cores in common, so while one computes the other had better not: what a second
machine would give is more, as its memory and caches are its own, and less, as its link is. A request with a `cache_salt` is computed at D. Gaps are between two
tokens of an answer that D writes meanwhile, from a prompt's begin to its first token, and over as long after it; and while P computes as long a prompt of its own, of which
nothing is pushed: what that takes of D, the machine takes that both are on. The first round, an eighth as long, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fleet.machines import Machine, free_port, machines, token_in, until
from tests.fleet.test_forwarding import MODEL, client_of
from tests.fleet.test_kv_moves import counted

from paceline.core.model import BLOCK_TOKENS
from paceline.store.catalog import MANIFEST
from paceline.store.home import Home
from paceline.ways.kv.pushing import PushEnd
from size_rows import machine

PERIOD_S = 0.1
LEAST = 'paceline_kv_push_least_tokens{node="p"}'
PRICED = 'paceline_kv_peer_least_tokens{node="p"}'
TAKEN = 'paceline_kv_transport_bytes_total{transport="%s",what="taken"}'


def throttle(pid: int, share: float, over: threading.Event) -> None:
    """Let a process run for its share of each period."""
    while share < 1 and not over.is_set():
        time.sleep(PERIOD_S * share)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PERIOD_S * (1 - share))
        os.kill(pid, signal.SIGCONT)


def ends_of(d: Machine) -> dict[str, float]:
    """Pushes, by how they ended."""
    return {end.value: counted(d, f'paceline_kv_pushes_total{{outcome="{end}"}}') for end in PushEnd}


def loopback_bytes() -> int:
    """Sent over this network namespace's loopback interface, headers and all."""
    return next(int(line.split()[9]) for line in Path("/proc/net/dev").read_text().splitlines() if line.split()[0] == "lo:")


def first_token_s(d: Machine, model: str, prompt: list[int], salt: str | None) -> float:
    began = time.perf_counter()
    extra = {"ignore_eos": True} | ({} if salt is None else {"cache_salt": salt})
    with client_of(d).completions.create(model=model, prompt=prompt, max_tokens=2, temperature=0, stream=True, extra_body=extra) as stream:
        next(iter(stream))
        return time.perf_counter() - began


class Live:
    """Answers that D writes all the while."""

    def __init__(self, d: Machine, model: str, streams: int) -> None:
        self._d, self._model, self._over = d, model, threading.Event()
        self._came: list[list[float]] = [[] for _ in range(streams)]
        self._threads = [threading.Thread(target=self._write, args=(times, number)) for number, times in enumerate(self._came)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: all(self._came))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def gaps_s(self, begin: float, end: float) -> list[float]:
        """Between tokens of one answer, the later of which came between two times."""
        return [b - a for times in self._came for a, b in pairwise(tuple(times)) if begin < b <= end]

    def _write(self, times: list[float], number: int) -> None:
        asked: dict[str, Any] = {"ignore_eos": True, "cache_salt": "live", "ways": ["alone"]}
        while not self._over.is_set():
            with client_of(self._d).completions.create(
                model=self._model, prompt=f"Stream {number}.", max_tokens=4000, temperature=0, stream=True, extra_body=asked
            ) as stream:
                for _ in stream:
                    times.append(time.perf_counter())
                    if self._over.is_set():
                        break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.25, help="of the time, that D runs")
    parser.add_argument("--live", type=int, default=0, help="answers that D writes meanwhile")
    parser.add_argument("--threads", type=int, default=0, help="of each of the two; 0: as `paceline up` chooses")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the bundled model")
    parser.add_argument("--stream", action="store_true", help="blocks come through TLS, and not by NIXL")
    options = parser.parse_args()
    threads = ("--threads", str(options.threads)) if options.threads else ()
    model = MODEL if options.model is None else "other"
    context = max(8192, options.tokens + 64)
    up = ("--fleet-port", "0", "--context", str(context), "--kv-tokens", str(8 * context), "--model", model, *threads)
    draw, over = random.Random(1), threading.Event()
    rows: dict[str, list[float]] = {"pushed": [], "here": [], "p_alone": []}
    gaps: dict[str, list[float]] = {"without": [], "pushed": [], "here": [], "p_alone": []}
    went: list[str] = []
    kv: list[tuple[float, float]] = []  # bytes of blocks taken, and bytes that went over loopback meanwhile and not by NIXL
    with tempfile.TemporaryDirectory() as scratch, machines(Path(scratch), Home.from_environment().kernels, "p", "d", warm=None) as (p, d):
        for each in (p, d):
            if options.model is not None:
                (folder := Home(each.home).models / model).mkdir(parents=True)
                (folder / MANIFEST).write_text(json.dumps({"path": str(options.model.resolve())}))
            if options.stream:
                (each.home / "config.toml").write_text("[kv]\nnixl = false\n")
        p.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        p.up(*up)
        p.node.stop()
        (d.home / "cache" / "speeds").mkdir(parents=True, exist_ok=True)
        for measured in (p.home / "cache" / "speeds").iterdir():  # D's is what its share makes of P's
            for each, share in ((p, 1.0), (d, options.share)):
                speeds = json.loads(measured.read_text())
                for speed in speeds["speeds"].values():
                    speed |= {"disturbed": False, "prefill_tokens_per_second": speed["prefill_tokens_per_second"] * share}
                (each.home / "cache" / "speeds" / measured.name).write_text(json.dumps(speeds))
        p.up(*up, "--role", "prefill")
        d.run("join", token_in(p.run("token", "--address", "127.0.0.1")), "--name", "d")
        d.up(*up, "--role", "decode")
        until(lambda: counted(d, LEAST if options.share < 1 else PRICED) > 0)
        throttling = threading.Thread(target=throttle, args=(d.node.process.pid, options.share, over))
        throttling.start()
        try:
            with Live(d, model, options.live) as live:
                for number in range(options.rounds + 1):
                    prompt = [draw.randrange(1000, 30000) for _ in range(options.tokens if number else max(512, options.tokens // 8))]
                    gate, before = counted(d, LEAST), ends_of(d)
                    for kind, at, salt in (
                        ("pushed", d, None),
                        ("here", d, str(number)),
                        *((("p_alone", p, str(number)),) if options.live else ()),
                    ):
                        taken, sent = [counted(d, TAKEN % way) for way in ("nixl", "stream")], loopback_bytes()
                        rows[kind].append(took_s := first_token_s(at, model, prompt, salt))
                        end, sent = time.perf_counter(), loopback_bytes() - sent
                        if kind == "pushed":
                            by_nixl, streamed = (counted(d, TAKEN % way) - had for way, had in zip(("nixl", "stream"), taken, strict=True))
                            kv.append((by_nixl + streamed, by_nixl + sent))
                        time.sleep(took_s if options.live else 0)
                        gaps[kind] += live.gaps_s(end - took_s, end)
                        gaps["without"] += live.gaps_s(end + 0.2 * took_s, end + took_s)
                    ended = ", ".join(end for end, count in ends_of(d).items() if count > before[end])
                    went.append(ended or (f"not pushed: from {gate:g} tokens on" if gate else "not pushed: never faster"))
                    if not number:
                        rows, gaps, went = {kind: [] for kind in rows}, {kind: [] for kind in gaps}, []
                        kv.clear()
        finally:
            over.set()
            throttling.join()
        said = {
            "tokens": options.tokens,
            "share_of_d": options.share,
            "pushed_s": [round(one, 3) for one in rows["pushed"]],
            "here_s": [round(one, 3) for one in rows["here"]],
            "went": went,
            "least_tokens": counted(d, LEAST),
            "kv_bytes_a_token": sum(taken for taken, _ in kv) / len(kv) / ((options.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS),
            "moved_over_kv": [round(moved / taken, 4) for taken, moved in kv if taken],
            "gaps_p95_ms": {kind: round(1000 * quantiles(found, n=20)[-1], 1) for kind, found in gaps.items() if len(found) > 1},
            "faster": round(median(b / a for a, b in zip(rows["pushed"], rows["here"], strict=True)), 2),
            **({"at_least": 2.2, "reach_for": 3.0} if options.share < 1 else {}),
        }
    print(json.dumps({"machine": machine(2), **said}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
