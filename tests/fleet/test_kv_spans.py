"""A conversation goes on between a machine that runs the model alone and pipelines of other cuts: each machine has its layers' KV from who holds them.
The bytes are those of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tests.fleet.machines import Machine, free_port, machines, meet, until
from tests.fleet.test_forwarding import MODEL, client_of, metric
from tests.fleet.test_kv_moves import FETCHED, STORY, counted, share
from tests.fleet.test_pipeline import found_fleet

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

CHECKS = 'paceline_kv_spot_checks_total{found="%s"}'
GIVEN = 'paceline_kv_peer_blocks_total{what="given"}'
SMALL = ("--context", "2048", "--kv-tokens", "8192", "--threads", "1", "--draft", "off")
LEAST = 30
"""Blocks of the story."""


@dataclass(slots=True)
class Spread:
    """One machine alone; two that begin pipelines, of three machines and of two; and the hosts of both."""

    alone: Machine
    o: Machine
    q: Machine
    hosts: list[Machine]

    @property
    def all(self) -> list[Machine]:
        return [self.alone, self.o, self.q, *self.hosts]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    with machines(tmp_path_factory.mktemp("kv"), Home.from_environment().kernels, "a", "o", "q", "g", "h") as made:
        alone, o, q, g, h = made
        found_fleet(*made)
        for machine in made:
            (machine.home / "config.toml").write_text(
                "[pipeline]\nkeep_spares = false\nsearch_seconds = 150\n\n[kv]\nnixl = false\nspot_check_every = 6\n"
            )
        port = free_port()
        peer = ("--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        # They answer their own clients alone: a request to a pipeline's machine is not sent on to where it would be faster, nor its prompt computed there.
        peer = (*peer, "--role", "prefill")
        alone.up("--fleet-port", str(port), "--role", "prefill", *SMALL)
        with ThreadPoolExecutor() as together:
            list(together.map(lambda host: host.up("--no-model", "--serve-shards", "--threads", "1", *peer), (g, h)))
        o.up("--pipeline", "--pin", "o:0-9", "--pin", "g:10-19", "--pin", "h:20-29", *peer, *SMALL)
        q.up("--pipeline", "--pin", "g:0-13", "--pin", "h:14-29", *peer, *SMALL)
        meet(*made)
        yield Spread(alone, o, q, [g, h])


def ask(machine: Machine, said: list[Any], **extra: Any) -> tuple[str, int, int]:
    """What it answers, how many tokens of the prompt it did not compute, and how many these are."""
    answer = client_of(machine).chat.completions.create(
        model=MODEL, messages=said, temperature=0.8, seed=5, max_tokens=12, extra_body={"ignore_eos": True, **extra}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens


def knows(machine: Machine, other: str, prefixes: float) -> None:
    """Wait until a machine would fetch from another, and was told more prefixes than before."""
    until(lambda: counted(machine, f'paceline_kv_peer_least_tokens{{node="{other}"}}') > 0 and told(machine) > prefixes)


def told(machine: Machine) -> float:
    return counted(machine, "paceline_kv_peer_prefixes")


def test_a_conversation_goes_from_a_machine_to_a_pipeline_to_another_and_back(spread: Spread) -> None:
    # A fetch that takes longer than computing is given up, as on a machine that does much else, and so is a stage that says nothing: then another story is told.
    assert any(goes_around(spread, f"Story {told_before}. {STORY}") for told_before in range(4)), "no fetch was in time"
    for one in (spread.alone, spread.o, spread.q):
        until(lambda one=one: metric(one, "paceline_kv_blocks_used") == 0)
        # Blocks that came in parts were computed again over all machines, and each compared its own.
        assert counted(one, CHECKS % "right") > 0
        assert counted(one, CHECKS % "wrong") == 0


def goes_around(spread: Spread, story: str) -> bool:
    """Have one conversation. Returns whether each machine had what the one before it knew."""
    said: list[Any] = [{"role": "user", "content": story}]
    known = dict[str, int]()
    """Tokens that a machine has of its own from an earlier turn, and a few more: fewer may be there without a fetch."""
    places = [spread.alone, spread.o, spread.q, spread.alone]
    holders = {"a": [spread.alone], "o": [spread.o, *spread.hosts], "q": spread.hosts}
    for turn, machine in enumerate(places):
        before = {one.name: (counted(one, FETCHED), counted(one, GIVEN), told(one)) for one in spread.all}
        answer, cached, tokens = ask(machine, said)
        if turn and cached < max(16 * LEAST, known.get(machine.name, 0)):
            return False
        if turn + 1 < len(places):
            share(ask, machine, said)
            knows(places[turn + 1], machine.name, before[places[turn + 1].name][2])
        assert ask(spread.alone, said, cache_salt="computed anew")[0] == answer
        # Where a stage was lost in mid prompt, the others have what they computed, and it alone fetches.
        if turn and not (
            all(counted(one, FETCHED) > before[one.name][0] for one in holders[machine.name])
            and all(counted(one, GIVEN) > before[one.name][1] for one in holders[places[turn - 1].name])
        ):
            return False
        known[machine.name] = tokens + 2 * 16
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{STORY[:700]} And then, {turn}?"}]
    return True
