"""Two machines of one user on one host: KV is read out of the other's memory, whichever of them is stopped or killed. The bytes are the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.fleet.machines import Machine, free_port, have_shallow, machines, token_in, until
from tests.fleet.test_forwarding import metric
from tests.fleet.test_kv_moves import SMALL, STORY, ask, counted, share, told

from paceline.net.nixl import is_installed
from paceline.store.home import Home

pytestmark = [
    pytest.mark.sampled(1, by="file", among="KV between machines"),
    pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install --no-deps nixl-cu12"),
]

THROUGH = 'paceline_kv_transport_bytes_total{transport="%s",what="%s"}'
LEAST_PUSHED = 'paceline_kv_push_least_tokens{node="p"}'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    """One that is quick with prompts, and one that is slow."""
    with machines(tmp_path_factory.mktemp("nixl"), Home.from_environment().kernels, "p", "d") as (p, d):
        have_shallow(p, d)
        p.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        p.up(*SMALL)
        p.node.stop()
        (d.home / "cache" / "speeds").mkdir(parents=True, exist_ok=True)
        for measured in (p.home / "cache" / "speeds").iterdir():
            speeds = json.loads(measured.read_text())
            for machine, speed in ((p, 5000.0), (d, 50.0)):
                for each in speeds["speeds"].values():
                    each |= {"prefill_tokens_per_second": speed, "disturbed": False}
                (machine.home / "cache" / "speeds" / measured.name).write_text(json.dumps(speeds))
        p.up(*SMALL, "--prefill-chunk", "32")
        d.run("join", token_in(p.run("token", "--address", "127.0.0.1")), "--name", "d")
        d.up(*SMALL)
        yield p, d


def knows(d: Machine) -> None:
    """It would have prompts computed at the other."""
    until(lambda: counted(d, LEAST_PUSHED) > 0)


def said(begin: str) -> list[Any]:
    return [{"role": "user", "content": begin + STORY}]


def test_kv_is_read_out_of_the_other_s_memory_whoever_is_lost_meanwhile(pair: tuple[Machine, Machine]) -> None:
    p, d = pair
    knows(d)

    def comes(begin: str) -> bool:
        """Ask for something new, computed at the other; whether it came by NIXL, which both load after they serve."""
        before = counted(d, THROUGH % ("nixl", "taken"))
        answer = ask(d, said(begin))
        assert ask(d, said(begin), cache_salt="computed anew") == answer
        return counted(d, THROUGH % ("nixl", "taken")) > before

    turn = iter(range(1000))
    until(lambda: comes(f"Pushed {next(turn)}. "))
    assert counted(d, "paceline_kv_nixl_failures_total") == 0
    until(lambda: metric(p, "paceline_kv_blocks_used") == 0)

    # A conversation that the other had goes on here.
    known = told(d)
    story = said("Fetched. ")
    first = ask(p, story)
    share(ask, p, story)
    until(lambda: told(d) > known)
    before = counted(d, THROUGH % ("nixl", "taken"))
    story += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    second = ask(d, story)
    assert ask(d, story, cache_salt="computed anew") == second
    until(lambda: counted(d, THROUGH % ("nixl", "taken")) > before)

    # The one that computes is stopped, and goes on; then it is killed.
    for number, then in enumerate((signal.SIGCONT, signal.SIGKILL)):
        knows(d)
        p.node.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask, d, said(f"Stopped {number}. "))
            until(lambda: metric(d, "paceline_requests_running") == 1 or asking.done())  # noqa: B023
            if then is signal.SIGCONT:
                answer = asking.result()
                p.node.process.send_signal(then)
            else:
                p.node.kill()
                answer = asking.result()
        assert ask(d, said(f"Stopped {number}. "), cache_salt="computed anew") == answer
        until(lambda: metric(d, "paceline_kv_blocks_used") == 0)
    # It comes back, with another door and other memory, and is read as before.
    p.up(*SMALL, "--prefill-chunk", "32")
    knows(d)
    until(lambda: comes(f"Again {next(turn)}. "))
    until(lambda: metric(d, "paceline_kv_blocks_used") == 0)
