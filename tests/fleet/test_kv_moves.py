"""A conversation goes on at another machine: with the KV of the first one while that lives, and without it once it is gone. The bytes are the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import Machine, free_port, have_shallow, machines, token_in, until
from tests.fleet.test_forwarding import client_of, metric

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

SMALL = ("--fleet-port", "0", "--context", "2048", "--kv-tokens", "8192", "--threads", "1", "--model", MODEL)
STORY = " ".join(f"On day {day} the riders went {day * 7 % 31} miles and drank {day * 5 % 11} cups of tea." for day in range(1, 25))
FETCHED = 'paceline_kv_peer_blocks_total{what="fetched"}'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    with machines(tmp_path_factory.mktemp("kv"), Home.from_environment().kernels, "a", "b") as (a, b):
        have_shallow(a, b)
        a.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        for machine in (a, b):
            machine.home.mkdir(exist_ok=True)
            (machine.home / "config.toml").write_text("[kv]\nnixl = false\n")  # as on two hosts
        a.up(*SMALL)
        a.node.stop()
        # Both are slow with prompts, so that fetching pays however busy this machine is.
        for measured in (a.home / "cache" / "speeds").iterdir():
            speeds = json.loads(measured.read_text())
            for speed in speeds["speeds"].values():
                speed |= {"prefill_tokens_per_second": 50.0, "disturbed": False}
            measured.write_text(json.dumps(speeds))
            (b.home / "cache" / "speeds").mkdir(exist_ok=True)
            (b.home / "cache" / "speeds" / measured.name).write_text(json.dumps(speeds))
        a.up(*SMALL)
        b.run("join", token_in(a.run("token", "--address", "127.0.0.1")), "--name", "b")
        b.up(*SMALL)
        yield b, a


def ask(machine: Machine, said: list[Any], **extra: Any) -> str:
    """What that machine itself answers, however much faster another one seems to be."""
    answer = client_of(machine).chat.completions.create(
        model=MODEL,
        messages=said,
        temperature=0.8,
        seed=5,
        max_tokens=12,
        extra_body={"ignore_eos": True, "ways": ["alone"], **extra},
    )
    return answer.choices[0].message.content or ""


def counted(machine: Machine, name: str) -> float:
    """0 where nothing was counted under that label yet."""
    try:
        return metric(machine, name)
    except IndexError:
        return 0.0


def told(machine: Machine) -> float:
    return counted(machine, "paceline_kv_peer_prefixes")


def share(ask: Callable[[Machine, list[Any]], object], machine: Machine, said: list[Any]) -> None:
    """Have two more conversations there that begin like one: only such beginnings are told to other machines."""
    for tail in ("Count the cups of tea", "Name the miles of road"):
        asks = f"{said[-1]['content']} {tail} of each day, {' and then of the day behind it' * 6}."
        ask(machine, [*said[:-1], {"role": "user", "content": asks}])


def test_a_conversation_moves_and_its_first_machine_is_killed(pair: tuple[Machine, Machine]) -> None:
    here, there = pair
    until(lambda: "b" in there.sees() and "a" in here.sees())
    said: list[Any] = [{"role": "user", "content": STORY}]
    first = ask(there, said)
    share(ask, there, said)
    until(lambda: counted(here, 'paceline_kv_peer_least_tokens{node="a"}') > 0 and told(here) > 0)
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    second = ask(here, said)
    until(lambda: counted(here, FETCHED) >= 20)
    assert ask(here, said, cache_salt="computed anew") == second
    # What another machine has and stops to give, before a byte of it or in the middle, is computed.
    before = told(here)
    other: list[Any] = [{"role": "user", "content": STORY[::-1]}]
    answer = ask(there, other)
    share(ask, there, other)
    other += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    until(lambda: told(here) > before)
    there.node.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, here, other)
        until(lambda: metric(here, "paceline_requests_running") == 1 or asking.done())
        there.node.kill()
        third = asking.result()
    assert ask(here, other, cache_salt="computed anew") == third
    said += [{"role": "assistant", "content": second}, {"role": "user", "content": "Who was first?"}]
    fourth = ask(here, said)
    assert ask(here, said, cache_salt="computed anew") == fourth
    until(lambda: metric(here, "paceline_kv_blocks_used") == 0)
