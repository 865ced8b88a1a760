"""Two pipelines, each with an orchestrator of its own, share two hosts: both give one machine's bytes, and both go on when a host is killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import Machine, free_port, have_shallow, machines, until
from tests.fleet.test_forwarding import client_of
from tests.fleet.test_pipeline import SMALL, found_fleet, route_of

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

ASKS: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "prompt": "The history of bicycle racing begins", "temperature": 1, "seed": 5, "max_tokens": 256},
    {"model": MODEL, "prompt": "A list of the longest rivers:", "temperature": 1, "seed": 7, "max_tokens": 256},
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Machine], list[Machine], list[str]]]:
    """Two orchestrators, the two hosts that both use, and what one machine answers to each of `ASKS`."""
    port = free_port()
    peer = ("--peer", f"127.0.0.1:{port}")
    root = tmp_path_factory.mktemp("shared")
    with machines(root, Home.from_environment().kernels, "alone", "o", "p", "g", "h") as made, ThreadPoolExecutor() as together:
        alone, o, p, g, h = made
        found_fleet(o, p, g, h)
        have_shallow(alone, o, p)
        for one in (o, p):
            (one.home / "config.toml").write_text("[pipeline]\nkeep_spares = false\n")
        reference = together.submit(answers_of, alone)
        hosts = [
            together.submit(host.up, "--no-model", "--serve-shards", "--threads", "1", "--fleet-port", at, *more)
            for host, at, more in ((h, str(port), ()), (g, "0", peer))
        ]
        for started in hosts:
            started.result()
        spread = ("--model", MODEL, "--draft", "off", "--throughput", "--fleet-port", "0", *peer, *SMALL)
        orchestrators = [together.submit(one.up, *spread, *(f"--pin={name}" for name in (one.name, "g", "h"))) for one in (o, p)]
        for started in orchestrators:
            started.result()
        yield [o, p], [g, h], reference.result()


def answers_of(machine: Machine) -> list[str]:
    machine.up("--model", MODEL, "--fleet-port", "0", *SMALL)
    texts = ["".join(pieces(machine, ask)) for ask in ASKS]
    machine.node.stop()
    return texts


def pieces(machine: Machine, ask: dict[str, Any]) -> Iterator[str]:
    for chunk in client_of(machine).completions.create(**ask, stream=True):
        yield chunk.choices[0].text


def test_a_host_of_two_pipelines_is_killed_and_both_answers_are_the_same(
    shared: tuple[list[Machine], list[Machine], list[str]],
) -> None:
    orchestrators, (g, h), alone = shared
    assert [route_of(one) for one in orchestrators] == [{"g", "h"}] * 2
    for one in orchestrators:
        until(lambda one=one: {"g", "h"} <= one.sees())
    answers = [pieces(one, ask) for one, ask in zip(orchestrators, ASKS, strict=True)]
    # In turns: each host has rows of both under way, and neither is near its end.
    texts = ["".join(turn) for turn in zip(*([next(answer) for answer in answers] for _ in range(5)), strict=True)]
    h.node.kill()
    with ThreadPoolExecutor() as together:
        assert [text + rest for text, rest in zip(texts, together.map("".join, answers), strict=True)] == alone
    # One whose answer was over just before the kill finds out by the next.
    for one, ask, text in zip(orchestrators, ASKS, alone, strict=True):
        assert text.startswith("".join(pieces(one, {**ask, "max_tokens": 8})))
    until(lambda: [route_of(one) for one in orchestrators] == [{"g"}] * 2)
    assert g.is_up


def test_ps_shows_what_a_pipeline_takes_here(shared: tuple[list[Machine], list[Machine], list[str]]) -> None:
    (o, _), _, _ = shared

    def rows() -> list[str]:
        return [row for row in o.run("ps").splitlines() if row]

    heading, _ = rows()
    assert heading.split() == ["name", "weights", "KV", "memory", "context", "answers", "idle", "for"]
    # A client has the last of its answer before the server counts it as over.
    until(lambda: re.match(rf"{MODEL} +\S+ [\d.]+ MiB +[\d.]+ MiB +[\d.]+ MiB +512 +0 +\d+ seconds?", rows()[1]) is not None)
