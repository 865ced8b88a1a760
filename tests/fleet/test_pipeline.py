"""A pipeline of real nodes loses its stages, in every way they can be lost: the answer goes on with the bytes of one machine, or ends in time.

`o` orchestrates and `h` hosts, both as a person starts them. `bad` and `good` are nodes of one process, `saboteur.py`, so that they come and go quickly.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes.shallow_model import MODEL, write_shallow
from tests.fleet.machines import Machine, free_port, machines, until, until_nothing
from tests.fleet.open_files import open_files, unexplained
from tests.fleet.test_forwarding import client_of, metric

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.net.trust.authority import Authority
from paceline.net.trust.certificates import make_key, make_request
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.store.home import Home
from paceline.ways.pipeline.executor.events import LOADING_S

SMALL = ("--context", "512", "--kv-tokens", "4096", "--threads", "1")
LAYERS, OWN = 5, 2
SEARCH_S = 10
"""Also on a busy machine more than a node that is known takes for its first word."""
ASLEEP_S = 3.2
"""Of a machine: longer than the silence of a stage is borne, and shorter than others keep its card."""
CONFIG = f"""[pipeline]
search_seconds = {SEARCH_S}
spot_check_every = 1
keep_spares = false
"""
THINGS: dict[str, Any] = {
    "type": "array",
    "minItems": 6,
    "maxItems": 8,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "state": {"enum": ["brand new", "very old"]}},
        "required": ["name", "state"],
        "additionalProperties": False,
    },
}
SALE = {"type": "object", "properties": {"things": THINGS}, "required": ["things"], "additionalProperties": False}
FORMS: tuple[dict[str, Any], ...] = (
    {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"name": "things", "schema": THINGS}}}, "temperature": 1},
    {"extra_body": {"regex": "([a-z]{1,9} = [0-9]{1,9};\n){30}", "draft": "off"}},
    {"extra_body": {"grammar": 'start: line{30}\nline: "The number is " /[0-9]{1,9}/ ".\\n"'}, "temperature": 0.8},
    {
        "tools": [{"type": "function", "function": {"name": "sell", "parameters": SALE}}],
        "tool_choice": "required",
        "max_tokens": 150,
    },
)
"""What requests add, the last one a chat."""
ASK: dict[str, Any] = {"model": MODEL, "prompt": "The history of bicycle racing begins", "temperature": 1, "seed": 5, "max_tokens": 150}


def route_of(machine: Machine) -> set[str]:
    """The nodes that its pipeline runs over, as its log says."""
    found = [line for line in machine.node.said if re.search(r"goes on over|^Loaded in", line)]
    return set(re.findall(r" on ([a-z]+)\b", found[-1].rpartition("goes on over")[2]))


@dataclass(slots=True)
class Fleet:
    o: Machine
    h: Machine
    twins: subprocess.Popen[str]
    peer: str
    alone: str
    """The answer of one machine."""
    alone_formed: list[str]
    """Of one machine: to `FORMS`, one after the other."""

    def tell(self, order: str) -> str:
        """Have `bad` or `good` do something; returns once they did, with what they answer."""
        assert self.twins.stdin is not None
        assert self.twins.stdout is not None
        self.twins.stdin.write(f"{order}\n")
        self.twins.stdin.flush()
        answer = self.twins.stdout.readline().rstrip()
        assert answer, "the saboteur has ended"
        return answer

    def only(self, *names: str) -> None:
        """Have exactly these hosts, each as if just started."""
        for name in ("bad", "good"):
            self.tell(f"{'start' if name in names else 'stop'} {name}")
        if "h" in names and not self.h.is_up:
            self.start_h()
        elif "h" not in names and self.h.is_up:
            self.h.node.stop()
        self.sees(*names)

    def sees(self, *names: str) -> None:
        until(lambda: self.o.sees() == {"o", *names})

    def start_h(self) -> None:
        self.h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", "0", "--peer", self.peer)

    def ask(self, **more: Any) -> str:
        return client_of(self.o).completions.create(**{**ASK, **more}).choices[0].text

    def served(self) -> bool:
        """Whether there is an answer; then it is the right one."""
        try:
            text = self.ask()
        except openai.InternalServerError as error:
            if error.status_code != 503:
                raise
            return False
        assert text == self.alone
        return True

    def stream(self) -> Iterator[str]:
        with client_of(self.o).completions.create(**ASK, stream=True) as chunks:
            for chunk in chunks:
                yield chunk.choices[0].text

    def over(self, name: str) -> None:
        """Have the pipeline run over this host, which is the only one."""
        self.only(name)
        self.ask(max_tokens=1)
        self.goes_over(name)

    @property
    def route(self) -> set[str]:
        return route_of(self.o)

    def goes_over(self, name: str) -> None:
        """A log comes by another way than an answer, and may come later."""
        until(lambda: self.route == {name})

    def said(self, pattern: str) -> bool:
        return re.search(pattern, "".join(self.o.node.said)) is not None


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root, port = tmp_path_factory.mktemp("pipeline"), free_port()
    model = str(write_shallow(root, LAYERS))
    peer = f"127.0.0.1:{port}"
    with machines(root, Home.from_environment().kernels, "alone", "o", "h", "bad", "good") as made, ThreadPoolExecutor() as together:
        alone, o, h, bad, good = made
        found_fleet(o, h, bad, good)
        (o.home / "config.toml").write_text(CONFIG)
        command = [sys.executable, str(Path(__file__).parent / "saboteur.py"), peer, str(bad.home), str(good.home)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        twins = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
        with twins:
            try:
                reference = together.submit(answer_of, alone, model)
                fleet = Fleet(o, h, twins, peer, "", [])
                fleet.start_h()
                o.up("--model", model, "--pipeline", "--own-layers", str(OWN), "--fleet-port", str(port), *SMALL)
                fleet.alone, fleet.alone_formed = reference.result()
                yield fleet
            finally:
                twins.kill()


def answer_of(machine: Machine, model: str) -> tuple[str, list[str]]:
    machine.up("--model", model, "--fleet-port", "0", *SMALL)
    text = client_of(machine).completions.create(**ASK).choices[0].text
    formed = ["".join(formed_pieces(machine, form)) for form in FORMS]
    machine.node.stop()
    return text, formed


def formed_pieces(machine: Machine, form: dict[str, Any]) -> Iterator[str]:
    """Pieces of an answer of one of `FORMS`: all that its client gets."""
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "seed": 5, "max_tokens": 360, "stream": True, **form}
    if "tools" in form:
        for chunk in client_of(machine).chat.completions.create(messages=[{"role": "user", "content": "Sell all things."}], **asked):
            for called in chunk.choices[0].delta.tool_calls or ():
                assert called.function is not None
                yield (called.function.name or "") + (called.function.arguments or "")
    else:
        for chunk in client_of(machine).completions.create(prompt="A list of things:", **asked):
            yield chunk.choices[0].text


def found_fleet(*members: Machine) -> None:
    """Identities of one fleet, without a join for each."""
    now = SystemClock().wall()
    authority = Authority.create(now)
    for machine in members:
        key, name = make_key(), NodeId(machine.name)
        identity = Identity.assemble(key, authority.issue(make_request(key, name), name, now), authority.root, now)
        folder = FleetFolder(Home(machine.home).fleet)
        folder.write_secret(folder.identity_file, identity.to_pem())


def test_stages_die_and_come_back_and_the_answer_is_the_same(fleet: Fleet) -> None:
    assert fleet.ask() == fleet.alone
    fleet.tell("start good")  # it joins later
    fleet.sees("h", "good")
    chunks = fleet.stream()
    text = "".join(next(chunks) for _ in range(5))
    fleet.h.node.kill()
    assert text + "".join(chunks) == fleet.alone
    fleet.goes_over("good")
    fleet.tell("start bad")
    fleet.sees("bad", "good")
    # An answer of its own: the one before may be over by the time that the machine is seen.
    chunks = fleet.stream()
    text = "".join(next(chunks) for _ in range(5))
    fleet.tell("stop good")
    assert text + "".join(chunks) == fleet.alone
    fleet.goes_over("bad")


def test_answers_of_a_form_go_on_over_what_replaces_a_killed_stage(fleet: Fleet) -> None:
    fleet.over("h")
    fleet.tell("start good")
    fleet.sees("h", "good")
    answers = [formed_pieces(fleet.o, form) for form in FORMS]
    texts = ["".join(next(pieces) for _ in range(2)) for pieces in answers]
    assert metric(fleet.o, "paceline_requests_running") >= 2
    fleet.h.node.kill()
    assert [text + "".join(pieces) for text, pieces in zip(texts, answers, strict=True)] == fleet.alone_formed
    fleet.goes_over("good")
    things = json.loads(fleet.alone_formed[0])
    assert len(things) >= 6


def test_an_orchestrator_that_slept_blames_no_stage(fleet: Fleet) -> None:
    fleet.over("h")
    process = fleet.o.node.process
    said = len(fleet.o.node.said)
    for pieces_before in (1, 8, None):  # None: idle
        stream = fleet.stream()
        text = "" if pieces_before is None else "".join(next(stream) for _ in range(pieces_before))
        process.send_signal(signal.SIGSTOP)
        time.sleep(ASLEEP_S)
        process.send_signal(signal.SIGCONT)
        assert text + "".join(stream) == fleet.alone
    assert not [line for line in fleet.o.node.said[said:] if "goes on over" in line], fleet.o.node.said[said:]


def test_where_nobody_is_left_an_answer_ends_and_a_later_one_is_served(fleet: Fleet) -> None:
    fleet.over("good")
    chunks = fleet.stream()
    next(chunks)
    fleet.tell("stop good")
    with pytest.raises(openai.APIError, match="No machines are left"):
        list(chunks)
    assert not fleet.served()
    fleet.only("good")
    until(fleet.served)


def test_an_answer_waits_for_a_machine_that_loads_for_longer_than_a_search_lasts(fleet: Fleet) -> None:
    fleet.over("h")
    fleet.tell("start good")
    fleet.tell("do good load")
    fleet.sees("h", "good")
    asked = client_of(fleet.o).completions.create(**ASK, stream=True, extra_body={"stream_options": {"include_events": True}})
    with asked as chunks:
        text = "".join(next(chunks).choices[0].text for _ in range(5))
        fleet.h.node.kill()
        told = 0
        while told * LOADING_S <= SEARCH_S:
            chunk = next(chunks)
            extra = chunk.model_extra or {}
            if extra.get("event") == "shard_status" and extra["detail"]["status"] == "loading":
                assert extra["detail"]["nodes"] == "good"
                fleet.tell("gain good")
                told += 1
            text += "".join(choice.text for choice in chunk.choices)
        fleet.tell("do good nothing")
        text += "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == fleet.alone
    fleet.goes_over("good")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("deed", ["slow", "stalled", "deaf", "nan", "shape"])
def test_a_stage_that_misbehaves_is_found_and_left_out(fleet: Fleet, deed: str) -> None:
    fleet.over("bad")
    corrupt = metric(fleet.o, "paceline_shard_corruption_detected_total")
    fleet.tell("start good")
    fleet.sees("bad", "good")
    chunks = fleet.stream()
    text = "".join(next(chunks) for _ in range(5))
    fleet.tell(f"do bad {deed}")
    assert text + "".join(chunks) == fleet.alone
    fleet.goes_over("good")
    found = metric(fleet.o, "paceline_shard_corruption_detected_total") - corrupt
    assert found == (1 if deed in {"nan", "shape"} else 0)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc to count open files in")
def test_a_failover_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.over("good")
    fleet.tell("start bad")
    fleet.sees("bad", "good")
    assert fleet.ask() == fleet.alone
    processes = [fleet.o.node.process.pid, fleet.twins.pid]
    before = [open_files(pid) for pid in processes]
    for deed in ("stalled", "nan", "deaf") * 2:
        one, other = sorted(("bad", "good"), key=lambda name: name not in fleet.route)
        fleet.tell(f"do {one} {deed}")
        assert fleet.ask() == fleet.alone
        fleet.goes_over(other)
        until(lambda one=one: fleet.tell(f"sessions {one}") == "0")
        fleet.tell(f"start {one}")
        fleet.sees("bad", "good")
    until(lambda: fleet.tell(f"sessions {other}") == "1")  # a spot check has another, for a moment
    until_nothing(lambda: [left for each in before for left in unexplained(fleet.o, processes, each)])


def test_wrong_numbers_are_found_by_a_spot_check(fleet: Fleet) -> None:
    fleet.over("bad")
    corrupt = metric(fleet.o, "paceline_shard_corruption_detected_total")
    fleet.tell("start good")
    fleet.sees("bad", "good")
    fleet.tell("do bad wrong")
    asked = count()

    def found() -> bool:
        fleet.ask(prompt=f"{next(asked)} mountains are", max_tokens=1)
        return metric(fleet.o, "paceline_shard_corruption_detected_total") > corrupt

    until(found)
    until(lambda: fleet.said(f"bad computes other bytes for layers {OWN} to {LAYERS - 1} than good"))
    assert fleet.ask() == fleet.alone
    fleet.goes_over("good")
