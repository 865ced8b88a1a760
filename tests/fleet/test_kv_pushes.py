"""A prompt is computed at another machine, which may be killed or stopped meanwhile, as may the one that asked. The bytes are the same."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIError
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import Machine, free_port, have_shallow, machines, token_in, until
from tests.fleet.test_forwarding import metric
from tests.fleet.test_kv_moves import SMALL, STORY, ask, counted

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

PUSHED = 'paceline_kv_pushes_total{outcome="%s"}'
PREFILLED = 'paceline_kv_prefills_total{outcome="%s"}'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    with machines(tmp_path_factory.mktemp("push"), Home.from_environment().kernels, "p", "d") as (p, d):
        have_shallow(p, d)
        p.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        for machine in (p, d):
            machine.home.mkdir(exist_ok=True)
            (machine.home / "config.toml").write_text("[kv]\nnixl = false\n")  # as on two hosts
        p.up(*SMALL)
        p.node.stop()
        (d.home / "cache" / "speeds").mkdir(parents=True, exist_ok=True)
        # One is said to be slow with prompts, and the other quick, whatever this machine is.
        for measured in (p.home / "cache" / "speeds").iterdir():
            speeds = json.loads(measured.read_text())
            for machine, speed in ((p, 5000.0), (d, 50.0)):
                for each in speeds["speeds"].values():
                    each |= {"prefill_tokens_per_second": speed, "disturbed": False}
                (machine.home / "cache" / "speeds" / measured.name).write_text(json.dumps(speeds))
        p.up(*SMALL, "--role", "prefill", "--prefill-chunk", "32")
        d.run("join", token_in(p.run("token", "--address", "127.0.0.1")), "--name", "d")
        d.up(*SMALL, "--role", "decode")
        yield p, d


def said(begin: str) -> list[Any]:
    return [{"role": "user", "content": begin + STORY}]


def least(d: Machine) -> float:
    return counted(d, 'paceline_kv_push_least_tokens{node="p"}')


def test_a_prompt_is_computed_elsewhere_whoever_is_lost_meanwhile(pair: tuple[Machine, Machine]) -> None:
    p, d = pair
    until(lambda: least(d) > 0)
    planned = " ".join(d.run("plan", MODEL, "--prompt", "600").split())
    assert re.search(r"p: prompts of \d+ new tokens or more are computed there: .*; one of 600 goes there", planned)
    first = ask(d, said("One. "))
    until(lambda: counted(p, PREFILLED % "whole") == counted(d, PUSHED % "whole") == 1)
    assert counted(d, 'paceline_kv_peer_blocks_total{what="pushed"}') >= 20
    assert ask(d, said("One. "), cache_salt="computed anew") == first

    # One that is stopped and goes on later holds nothing for what was left meanwhile.
    with ThreadPoolExecutor(1) as pool:
        p.node.process.send_signal(signal.SIGSTOP)
        asking = pool.submit(ask, d, said("Two. "))
        until(lambda: counted(d, PUSHED % "silent") + counted(d, PUSHED % "watchdog") == 1 or asking.done())
        p.node.process.send_signal(signal.SIGCONT)
        second = asking.result()
    assert ask(d, said("Two. "), cache_salt="computed anew") == second
    until(lambda: metric(p, "paceline_kv_blocks_used") == 0 and metric(p, "paceline_requests_running") == 0)

    # The one that asked is killed, and started again.
    until(lambda: least(d) > 0)
    p.node.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, d, said("Three. "))
        until(lambda: metric(d, "paceline_requests_running") == 1 or asking.done())
        d.node.kill()
        p.node.process.send_signal(signal.SIGCONT)
        with pytest.raises(APIError):
            asking.result()
    until(lambda: metric(p, "paceline_kv_blocks_used") == 0 and metric(p, "paceline_requests_running") == 0)
    d.up(*SMALL, "--role", "decode")

    # One that is killed.
    until(lambda: least(d) > 0)
    p.node.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, d, said("Four. "))
        until(lambda: metric(d, "paceline_requests_running") == 1 or asking.done())
        p.node.kill()
        third = asking.result()
    assert ask(d, said("Four. "), cache_salt="computed anew") == third
    until(lambda: metric(d, "paceline_kv_blocks_used") == 0)
