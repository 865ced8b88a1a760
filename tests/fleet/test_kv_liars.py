"""A machine lies about KV and its checksum: it is found, named and left, and the bytes are those of one machine. Machines are real processes (`kv_saboteur.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.kv_machines import Saboteur, pushed, saboteurs
from tests.fleet.machines import BOUND_S, until
from tests.fleet.test_forwarding import metric
from tests.fleet.test_kv_faults import STORY
from tests.fleet.test_kv_moves import SMALL, ask, counted

from paceline.ways.kv.pushing import PushEnd

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

NUMBERS = count()
LEAST = 'paceline_kv_push_least_tokens{node="p"}'
LIES = 'paceline_kv_lies_total{node="p"}'
CHECKS = 'paceline_kv_spot_checks_total{found="%s"}'


def start(machine: Saboteur, every: int = 1) -> None:
    (machine.home / "config.toml").write_text(f"[kv]\nspot_check_every = {every}\nnixl = {json.dumps(every == 1)}\n")
    machine.up(*SMALL, *(("--role", "prefill", "--prefill-chunk", "32") if machine.name == "p" else ("--role", "decode")))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Saboteur, Saboteur]]:
    """`p` computes prompts for `d`."""
    with saboteurs(tmp_path_factory.mktemp("liars"), {"p": 5000.0, "d": 5.0}, start) as (p, d):
        yield p, d


def told(machine: Saboteur, said: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """What it answers itself, and the events."""
    place, text, events = urlsplit(machine.node.url), "", list[dict[str, Any]]()
    wanted = {"model": MODEL, "messages": said, "temperature": 0.8, "seed": 5, "max_tokens": 12, "ignore_eos": True, "ways": ["alone"]}
    with closing(HTTPConnection(place.hostname or "", place.port, timeout=BOUND_S)) as asking:
        body = json.dumps({**wanted, "stream": True, "stream_options": {"include_events": True}})
        asking.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        for line in asking.getresponse().read().decode().splitlines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                events += [chunk] if "event" in chunk else []
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return text, events


@pytest.mark.parametrize(("deed", "every"), [("lie", 1), ("nan", 0)])
def test_a_machine_that_lies_is_found_and_left_and_the_bytes_are_those_of_one(
    pair: tuple[Saboteur, Saboteur], deed: str, every: int
) -> None:
    p, d = pair
    if d.is_up and deed == "nan":
        d.node.stop()  # what it knows of P ends with the process
        start(d, every)
    until(lambda: counted(d, LEAST) > 0)
    p.will(f"{deed} 5")
    while not p.did:
        said: list[Any] = [{"role": "user", "content": f"{next(NUMBERS)}. {STORY}"}]
        answer, events = told(d, said)
    assert [(event["event"], event["detail"]) for event in events] == [("kv_distrusted", {"nodes": "p", "n_tokens": 0})]
    assert ask(d, said, cache_salt="computed anew") == answer
    assert counted(d, LIES) == counted(d, CHECKS % "wrong") == 1
    assert counted(d, CHECKS % "right") >= 5 * every
    assert "WRONG KV CAME FROM p" in " ".join(d.run("status").split())
    # It is asked for nothing more, and nothing that stood on what it gave is known.
    before = pushed(d, PushEnd.WHOLE)
    assert ask(d, said) == answer
    other: list[Any] = [{"role": "user", "content": f"{next(NUMBERS)}. {STORY}"}]
    assert ask(d, other) == ask(d, other, cache_salt="computed anew")
    assert pushed(d, PushEnd.WHOLE) == before
    for machine in (p, d):
        until(lambda machine=machine: metric(machine, "paceline_kv_blocks_used") == 0)
        assert not machine.violations
