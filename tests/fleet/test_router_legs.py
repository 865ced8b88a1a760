"""A router that knows nothing of the fleet parts requests between two machines, as vLLM's do: a prompt here, its answer there. Either machine may be killed
before, between and after. The bytes are those of one machine.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import BOUND_S, Machine, free_port, have_shallow, machines, meet, token_in, until
from tests.fleet.test_forwarding import metric
from tests.fleet.test_kv_moves import SMALL, STORY, counted

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

PUSHED = 'paceline_kv_pushes_total{outcome="%s"}'
ROUTED = 'paceline_kv_routed_prompts_total{outcome="%s"}'
WAITING = 'paceline_kv_routed_waiting{what="%s"}'
BODY = {"model": MODEL, "temperature": 0.8, "seed": 5, "ignore_eos": True}
LONG_S = 3 * BOUND_S


class Router:
    """Sends each part of a request where it belongs, under one name."""

    def __init__(self, p: Machine, d: Machine) -> None:
        self.p, self.d = p, d
        self.pool = ThreadPoolExecutor(8)
        self._names = (f"router-{number}" for number in count())

    def name(self) -> str:
        return next(self._names)

    def prefill(self, name: str | None, path: str, **asked: Any) -> Future[httpx.Response]:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None, "remote_port": None}
        return self._post(self.p, name, path, {**asked, "max_tokens": 1, "kv_transfer_params": params})

    def decode(self, name: str | None, path: str, told: dict[str, Any] | None = None, **asked: Any) -> Future[httpx.Response]:
        params = told or {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p"}
        return self._post(self.d, name, path, {"max_tokens": 12, **asked, "kv_transfer_params": params})

    def alone(self, path: str, **asked: Any) -> Any:
        """At D, without P."""
        return texts(self._post(self.d, None, path, {"max_tokens": 12, **asked, "cache_salt": "computed anew"}).result())

    def _post(self, to: Machine, name: str | None, path: str, body: dict[str, Any]) -> Future[httpx.Response]:
        headers = {} if name is None else {"X-Request-Id": name}
        url = f"{to.node.url}/v1/{path}"
        return self.pool.submit(lambda: httpx.post(url, json={**BODY, **body}, headers=headers, timeout=LONG_S))


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer.json()["choices"]]


def outcome(answer: httpx.Response) -> str:
    return answer.json()["kv_transfer_params"]["outcome"]


def chat(begin: str, **fields: Any) -> dict[str, Any]:
    return {"path": "chat/completions", "messages": [{"role": "user", "content": begin + STORY}], **fields}


def at_rest(*nodes: Machine) -> None:
    """Nothing is pinned, leased, waited for or run."""
    for one in nodes:
        until(lambda one=one: counted(one, WAITING % "prompts") == counted(one, WAITING % "nodes") == 0)
        until(lambda one=one: metric(one, "paceline_kv_blocks_used") == 0 and metric(one, "paceline_requests_running") == 0)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with machines(tmp_path_factory.mktemp("router"), Home.from_environment().kernels, "p", "d") as (p, d):
        have_shallow(p, d)
        p.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        p.up(*SMALL)
        p.node.stop()
        (d.home / "cache" / "speeds").mkdir(parents=True, exist_ok=True)
        # Both are said to be quick with prompts, so that no plan would have one compute, or fetch, for the other.
        for measured in (p.home / "cache" / "speeds").iterdir():
            speeds = json.loads(measured.read_text())
            for speed in speeds["speeds"].values():
                speed |= {"prefill_tokens_per_second": 1e6, "disturbed": False}
            for machine in (p, d):
                (machine.home / "cache" / "speeds" / measured.name).write_text(json.dumps(speeds))
        p.up(*SMALL, "--role", "prefill", "--prefill-chunk", "32")
        d.run("join", token_in(p.run("token", "--address", "127.0.0.1")), "--name", "d")
        d.up(*SMALL, "--role", "decode")
        meet(p, d)
        yield Router(p, d)


def test_either_part_may_come_first_and_the_bytes_are_those_of_one_machine(router: Router) -> None:
    p, d = router.p, router.d
    for first in ("p", "d", "both"):
        name, asked = router.name(), chat(f"{first}. ")
        if first == "p":
            prompt = router.prefill(name, **asked)
            assert texts(prompt.result())
            answer = router.decode(name, **asked)
        elif first == "d":
            answer = router.decode(name, **asked)
            until(lambda: counted(p, WAITING % "nodes") == 1)
            prompt = router.prefill(name, **asked)
        else:
            answer, prompt = router.decode(name, **asked), router.prefill(name, **asked)
        assert texts(answer.result()) == router.alone(**asked)
        assert (outcome(answer.result()), prompt.result().headers["x-request-id"]) == ("whole", name)
        told = prompt.result().json()["kv_transfer_params"]
        assert (told["do_remote_prefill"], told["remote_engine_id"], told["tp_size"]) == (True, "p", 1)
    until(lambda: counted(p, ROUTED % "taken") == counted(d, PUSHED % "whole") == 3)
    at_rest(p, d)


def test_what_p_answered_is_handed_on_and_several_prompts_keep_apart(router: Router) -> None:
    p, d = router.p, router.d
    before = counted(d, PUSHED % "whole")
    asked = chat("Handed on. ")
    told = router.prefill(None, **asked).result().json()["kv_transfer_params"]
    for handed in (told, {**told, "remote_engine_id": None}):
        answer = router.decode(None, told=handed, **asked).result()
        assert texts(answer) == router.alone(**asked)
        assert outcome(answer) == ("whole" if handed is told else "unasked"), "by then it was here"

    # Several prompts of one call, and several answers of one prompt.
    name = router.name()
    several: dict[str, Any] = {"path": "completions", "prompt": [f"{place}: {STORY}" for place in range(3)]}
    prompt, answer = router.prefill(name, **several), router.decode(name, n=2, **several)
    assert len(texts(prompt.result())) == 3
    assert texts(answer.result()) == router.alone(n=2, **several)
    until(lambda: counted(d, PUSHED % "whole") == before + 1 + 3)
    at_rest(p, d)


def test_a_router_that_confuses_itself_costs_time_and_clients_hear_how_it_went(router: Router) -> None:
    p, d = router.p, router.d
    name, asked = router.name(), chat("Twice. ")
    asking = [router.decode(name, **asked), router.prefill(name, **asked), router.decode(name, **asked), router.prefill(name, **asked)]
    assert texts(asking[0].result()) == texts(asking[2].result()) == router.alone(**asked)
    name = router.name()
    assert texts(router.prefill(name, **chat("Of this. ")).result())
    answer = router.decode(name, **chat("Of that. ")).result()
    assert (texts(answer), outcome(answer)) == (router.alone(**chat("Of that. ")), "unmatched")

    # In a stream, clients that ask for events hear it. Both parts are any client's requests.
    name, asked = router.name(), chat("Events. ", stream=True, stream_options={"include_events": True})
    router.prefill(name, **chat("Events. ")).result()
    stream = router.decode(name, **asked).result().text
    events = [line for line in stream.splitlines() if line.startswith("data: {") and '"kv_transfer"' in line]
    assert [json.loads(line[6:])["detail"]["outcome"] for line in events] == ["whole"]
    for machine, leg in ((d, {"do_remote_decode": True}), (p, {"do_remote_decode": True, "do_remote_prefill": True})):
        refused = router._post(machine, None, "completions", {"prompt": "x", "max_tokens": 1, "kv_transfer_params": leg}).result()  # pyright: ignore[reportPrivateUsage]
        assert refused.status_code == 400, refused.text
    at_rest(p, d)  # what nobody took was held for half a minute


def test_p_that_never_comes_or_is_killed_costs_time(router: Router) -> None:
    p, d = router.p, router.d
    # P's part never comes.
    asked = chat("Nobody. ")
    answer = router.decode(router.name(), **asked).result()
    assert (texts(answer), outcome(answer)) == (router.alone(**asked), "unmatched")

    # P is killed once it has computed the prompt, before D has it.
    name, asked = router.name(), chat("Too late. ")
    assert texts(router.prefill(name, **asked).result())
    p.node.process.send_signal(signal.SIGSTOP)
    late = router.decode(name, **asked)
    until(lambda: metric(d, "paceline_requests_running") == 1 or late.done())
    p.node.kill()
    assert texts(late.result()) == router.alone(**asked)
    assert outcome(late.result()) in {"handshake_failed", "write_failed", "silent"}

    # P is gone before anything: its part fails at the router, D's is answered.
    name, asked = router.name(), chat("Gone. ")
    with pytest.raises(httpx.TransportError):
        router.prefill(name, **asked).result()
    answer = router.decode(name, **asked).result()
    assert (texts(answer), outcome(answer)) == (router.alone(**asked), "handshake_failed")
    at_rest(d)
    p.up(*SMALL, "--role", "prefill", "--prefill-chunk", "32")
    meet(p, d)


def test_d_that_is_killed_leaves_nothing_behind(router: Router) -> None:
    """Killed while it waits for P, whose part comes then: that is held for as long as its lease says, and is cache after that."""
    p, d = router.p, router.d
    expired = counted(p, ROUTED % "expired")
    name, asked = router.name(), chat("Who asked? ")
    lost = router.decode(name, **asked)
    until(lambda: counted(p, WAITING % "nodes") == 1)
    d.node.kill()
    with pytest.raises(httpx.TransportError):
        lost.result()
    until(lambda: counted(p, WAITING % "nodes") == 0)
    assert texts(router.prefill(name, **asked).result())
    d.up(*SMALL, "--role", "decode")
    meet(p, d)
    until(lambda: counted(p, ROUTED % "expired") == expired + 1)
    at_rest(p, d)
    # All goes on as before.
    name, asked = router.name(), chat("And then? ")
    prompt, last = router.prefill(name, **asked), router.decode(name, **asked)
    assert texts(last.result()) == router.alone(**asked)
    assert (outcome(last.result()), prompt.result().status_code) == ("whole", 200)
    at_rest(p, d)
