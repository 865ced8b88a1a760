"""A pipeline of real nodes, each of which computes in instructions of its own: the bytes of one machine, one request and sixteen, in chunks, behind
prefixes that are known, with drafts, and after a stage is lost to a machine that has other instructions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import Machine, free_port, have_shallow, machines, until
from tests.fleet.test_forwarding import client_of, metric
from tests.fleet.test_pipeline import found_fleet, route_of
from tests.fleet.test_two_pipelines import pieces

from paceline.backends import cpu
from paceline.store.home import Home

SETS = cpu.lowerings_here()
"""The fastest first."""
pytestmark = [
    pytest.mark.sampled(1, by="file", among="models over machines"),
    pytest.mark.skipif(len(SETS) < 2, reason="this processor has one set of instructions that kernels are made of"),
]

OPTIONS = ("--context", "1024", "--kv-tokens", "16384", "--threads", "1", "--prefill-chunk", "48", "--fleet-port", "0")
SHARED = "The quick brown fox jumps over the lazy dog, and then it goes to sleep under a very old tree. "
ASKS: list[dict[str, Any]] = [
    {
        "model": MODEL,
        "extra_body": {"ignore_eos": True},
        "prompt": (SHARED * (n % 4) + f"Thing number {n}: ") * (1 + n % 3),
        "temperature": 0.9 * (n % 2),
        "seed": n,
        "max_tokens": 40,
    }
    for n in range(16)
]
"""Of 4 to 200 tokens, most with a common beginning; greedy and drawn by turns."""
LONG = [{**ask, "max_tokens": 150} for ask in ASKS[:4]]


@dataclass(slots=True)
class Mixed:
    o: Machine
    stages: list[Machine]
    alone: list[str]
    """What one machine answers to each of `ASKS`."""
    alone_long: list[str]
    """The text, to each of `LONG`."""


def answer(machine: Machine, ask: dict[str, Any]) -> str:
    """Tokens and the logarithms of their probabilities, to the last digit."""
    return client_of(machine).completions.create(logprobs=2, **ask).choices[0].model_dump_json()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    port = free_port()
    with (
        machines(tmp_path_factory.mktemp("sets"), Home.from_environment().kernels, "alone", "o", "a", "b") as made,
        ThreadPoolExecutor() as together,
    ):
        alone, o, a, b = made
        found_fleet(o, a, b)
        have_shallow(alone, o)
        (o.home / "config.toml").write_text("[pipeline]\nkeep_spares = false\n")
        serve = ("--no-model", "--serve-shards", "--threads", "1")
        a.up(*serve, "--device", f"cpu-{SETS[-1]}", "--fleet-port", str(port))
        peer = ("--peer", f"127.0.0.1:{port}")
        b.up(*serve, "--device", f"cpu-{SETS[1]}", "--fleet-port", "0", *peer)
        alone.up("--model", MODEL, "--device", f"cpu-{SETS[0]}", *OPTIONS)
        answers = list(together.map(answer, repeat(alone), ASKS))
        long = list(together.map("".join, (pieces(alone, ask) for ask in LONG)))
        alone.node.stop()
        pins = [f"--pin={name}" for name in ("o", "a", "b")]
        o.up("--model", MODEL, "--device", f"cpu-{SETS[0]}", "--throughput", *pins, *peer, *OPTIONS)
        yield Mixed(o, [a, b], answers, long)


def test_stages_of_other_instructions_give_the_bytes_of_one_machine(mixed: Mixed) -> None:
    assert route_of(mixed.o) == {"a", "b"}
    assert [card.backend for name in ("o", "a", "b") if (card := mixed.o.card_of(name))] == [
        f"cpu-{each}" for each in (SETS[0], SETS[-1], SETS[1])
    ]
    assert [answer(mixed.o, ask) for ask in ASKS[:4]] == mixed.alone[:4]  # one at a time, nothing known
    with ThreadPoolExecutor(16) as together:
        assert list(together.map(answer, repeat(mixed.o), ASKS)) == mixed.alone
        assert list(together.map(answer, repeat(mixed.o), ASKS)) == mixed.alone
    assert metric(mixed.o, "paceline_prefix_cache_hits_total") > 0
    assert metric(mixed.o, 'paceline_accepted_draft_tokens_total{by="ngram"}') > 0


def test_a_stage_is_lost_to_a_machine_of_other_instructions(mixed: Mixed) -> None:
    until(lambda: {"a", "b"} <= mixed.o.sees())
    answers = [pieces(mixed.o, ask) for ask in LONG]
    begun = ["".join(turn) for turn in zip(*([next(each) for each in answers] for _ in range(5)), strict=True)]
    mixed.stages[1].node.kill()
    with ThreadPoolExecutor(4) as together:
        assert [text + rest for text, rest in zip(begun, together.map("".join, answers), strict=True)] == mixed.alone_long
    assert route_of(mixed.o) == {"a"}
