"""Prompts computed elsewhere, and machines that are killed, stopped, left, wrong or slow in the middle of it: the bytes are the same, nothing stays held, and
no block is written that nobody holds. Machines are real processes whose freed blocks are poisoned (`kv_saboteur.py`).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from select import select
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import APIError
from tests.fakes.shallow_model import MODEL
from tests.fleet.kv_machines import Saboteur, prefilled, pushed, saboteurs
from tests.fleet.machines import BOUND_S, until
from tests.fleet.test_forwarding import metric
from tests.fleet.test_kv_moves import SMALL, ask, counted

from paceline.ways.kv.lease import LeaseEnd
from paceline.ways.kv.pushing import PushEnd

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

FIRST = 5
"""Blocks that are sent before something happens."""
STORY = " ".join(f"On day {day} the riders went {day * 7 % 31} miles and drank {day * 5 % 11} cups of tea." for day in range(1, 17))
NUMBERS = count()


def start(machine: Saboteur) -> None:
    machine.up(*SMALL, *(("--role", "prefill", "--prefill-chunk", "32") if machine.name == "p" else ("--role", "decode")))


@dataclass(slots=True)
class Trio:
    """`p` computes prompts for `d` and `e`."""

    p: Saboteur
    d: Saboteur
    e: Saboteur

    def whole(self) -> None:
        """All run, and have their prompts computed by P."""
        for machine in (self.p, self.d, self.e):
            if not machine.is_up:
                start(machine)
        for machine in (self.d, self.e):
            until(lambda machine=machine: counted(machine, 'paceline_kv_push_least_tokens{node="p"}') > 0)

    @contextmanager
    def limited(self, what: str, value: str) -> Generator[None]:
        """All run, P with a limit that its home sets; afterwards it is stopped and has none."""
        if self.p.is_up:
            self.p.node.stop()
        (self.p.home / what).write_text(value)
        try:
            self.whole()
            yield
        finally:
            self.p.node.stop()
            (self.p.home / what).unlink()

    def at_rest(self) -> None:
        """Nothing is held, leased or wrong anywhere."""
        for machine in (self.p, self.d, self.e):
            for what in ("paceline_kv_blocks_used", "paceline_requests_running", "paceline_kv_leases"):
                until(lambda machine=machine, what=what: metric(machine, what) == 0)
            assert not machine.violations


@dataclass(slots=True)
class Asked:
    """A prompt that P came to the middle of."""

    at: Saboteur
    said: list[Any]
    answer: Future[str]

    def check(self) -> None:
        """It is answered as it would be without P."""
        assert self.answer.result() == ask(self.at, self.said, cache_salt="computed anew")


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with saboteurs(tmp_path_factory.mktemp("faults"), {"p": 5000.0, "d": 5.0, "e": 5.0}, start) as (p, d, e):
        yield Trio(p, d, e)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def new_prompt() -> list[Any]:
    return [{"role": "user", "content": f"{next(NUMBERS)}. {STORY}"}]


def put(pool: ThreadPoolExecutor, at: Saboteur) -> Asked:
    said = new_prompt()
    return Asked(at, said, pool.submit(ask, at, said))


def begin(trio: Trio, pool: ThreadPoolExecutor, deed: str, at: Saboteur) -> Asked:
    """Have prompts computed until one is struck: a peer that failed before is not asked for a moment."""
    trio.p.will(deed)
    while True:
        asked = put(pool, at)
        until(lambda answer=asked.answer: trio.p.did or answer.done())
        if trio.p.did:
            return asked


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("deed", "here", "there"),
    [
        ("damaged", PushEnd.DAMAGED, None),
        ("another", PushEnd.DAMAGED, None),
        ("close", PushEnd.WRITE_FAILED, LeaseEnd.WRITE_FAILED),
        ("forget", PushEnd.WRITE_FAILED, LeaseEnd.NOT_COMPUTED),
    ],
)
def test_what_comes_wrong_or_not_at_all_is_computed(
    trio: Trio, pool: ThreadPoolExecutor, deed: str, here: PushEnd, there: LeaseEnd | None
) -> None:
    trio.whole()
    before, before_there = pushed(trio.d, here), 0.0 if there is None else prefilled(trio.p, there)
    begin(trio, pool, f"{deed} {FIRST}", trio.d).check()
    until(lambda: pushed(trio.d, here) > before)
    if there is not None:
        until(lambda: prefilled(trio.p, there) > before_there)
    trio.at_rest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_the_one_that_computes_is_lost_in_the_middle(trio: Trio, pool: ThreadPoolExecutor, lost: signal.Signals) -> None:
    trio.whole()
    before = pushed(trio.d, PushEnd.SILENT)
    asked = begin(trio, pool, f"hold {FIRST}", trio.d)
    if lost is signal.SIGKILL:
        trio.p.node.kill()
        asked.check()
        trio.p.goes_on()
    else:
        trio.p.node.process.send_signal(signal.SIGSTOP)
        until(lambda: pushed(trio.d, PushEnd.SILENT) > before)
        asked.check()
        # What it writes once it runs again is late: the blocks are others' by then.
        other = pool.submit(ask, trio.d, [{"role": "user", "content": STORY[::-1]}])
        trio.p.goes_on()
        trio.p.node.process.send_signal(signal.SIGCONT)
        assert other.result() == ask(trio.d, [{"role": "user", "content": STORY[::-1]}], cache_salt="computed anew")
    trio.whole()
    trio.at_rest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_the_one_that_asked_is_lost_in_the_middle(trio: Trio, pool: ThreadPoolExecutor, lost: signal.Signals) -> None:
    trio.whole()
    before = prefilled(trio.p, LeaseEnd.LEFT)
    asked = begin(trio, pool, f"hold {FIRST}", trio.d)
    if lost is signal.SIGKILL:
        trio.d.node.kill()
        until(lambda: prefilled(trio.p, LeaseEnd.LEFT) > before)
        trio.p.goes_on()
        with pytest.raises(APIError):
            asked.answer.result()
    else:
        trio.d.node.process.send_signal(signal.SIGSTOP)
        trio.p.goes_on()
        until(lambda: metric(trio.p, "paceline_kv_leases") == 0)  # all is sent, or nobody takes it
        trio.d.node.process.send_signal(signal.SIGCONT)
        asked.check()
    trio.whole()
    trio.at_rest()


def test_an_answer_is_left_while_its_blocks_are_written(trio: Trio) -> None:
    trio.whole()
    before = pushed(trio.d, PushEnd.LEFT), prefilled(trio.p, LeaseEnd.LEFT)
    trio.p.will(f"hold {FIRST}")
    place = urlsplit(trio.d.node.url)
    while not trio.p.did:
        said = {"model": MODEL, "messages": new_prompt(), "max_tokens": 12}
        with closing(HTTPConnection(place.hostname or "", place.port, timeout=BOUND_S)) as asking:
            asking.request("POST", "/v1/chat/completions", json.dumps(said), {"Content-Type": "application/json"})
            until(lambda asking=asking: trio.p.did or bool(select([asking.sock], [], [], 0)[0]))
    until(lambda: pushed(trio.d, PushEnd.LEFT) > before[0] and prefilled(trio.p, LeaseEnd.LEFT) > before[1])
    trio.p.goes_on()
    other: list[Any] = [{"role": "user", "content": STORY[::-1]}]
    assert ask(trio.d, other) == ask(trio.d, other, cache_salt="computed anew")
    trio.at_rest()


def test_a_lease_ends_while_a_block_is_written(trio: Trio, pool: ThreadPoolExecutor) -> None:
    with trio.limited("lease_s", "4.0"):
        asked = begin(trio, pool, f"hold {FIRST}", trio.d)
        until(lambda: prefilled(trio.p, LeaseEnd.EXPIRED) >= 1)
        asked.check()
        until(lambda: pushed(trio.d, PushEnd.LEASE_EXPIRED) >= 1)
        trio.p.goes_on()
        trio.at_rest()


def test_prompts_beyond_what_is_taken_of_one_node_are_refused_and_computed(trio: Trio, pool: ThreadPoolExecutor) -> None:
    with trio.limited("most_leases", "2"):  # one of each node
        before, asked = pushed(trio.d, PushEnd.REFUSED), list[Asked]()
        while pushed(trio.d, PushEnd.REFUSED) == before:  # the first may be over before the next is asked for
            asked = [put(pool, trio.d) for _ in range(4)]
            wait(each.answer for each in asked)
        for each in asked:
            each.check()
        trio.at_rest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("deed", [f"hold {FIRST}", "dial 0"])
def test_one_whose_blocks_or_handshake_hang_holds_up_no_other(trio: Trio, pool: ThreadPoolExecutor, deed: str) -> None:
    trio.whole()
    before = pushed(trio.e, PushEnd.WHOLE)
    held = begin(trio, pool, deed, trio.d)
    while pushed(trio.e, PushEnd.WHOLE) == before:
        put(pool, trio.e).check()
    assert (trio.p.home / "held").exists()
    trio.p.goes_on()
    held.check()
    trio.at_rest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("deed", ["hold 0", "last 0"])
@pytest.mark.parametrize("name", ["p", "d"])
def test_one_is_killed_before_the_first_block_or_after_the_last(trio: Trio, pool: ThreadPoolExecutor, name: str, deed: str) -> None:
    trio.whole()
    at_first = deed == "hold 0"
    here, there = PushEnd.WRITE_FAILED if at_first else PushEnd.WHOLE, LeaseEnd.LEFT
    before, before_there = pushed(trio.d, here), prefilled(trio.p, there)
    asked = begin(trio, pool, deed, trio.d)
    if name == "p":
        trio.p.node.kill()
        asked.check()
        until(lambda: pushed(trio.d, here) > before)
    else:
        trio.d.node.kill()
        until(lambda: prefilled(trio.p, there) > before_there)
        # Behind the last block D may have answered by then.
        with pytest.raises(APIError) if at_first else suppress(APIError):
            asked.answer.result()
    trio.p.goes_on()
    trio.whole()
    trio.at_rest()


def test_a_registration_that_reaches_nobody_is_computed(trio: Trio, pool: ThreadPoolExecutor) -> None:
    before = pushed(trio.d, PushEnd.HANDSHAKE_FAILED)
    while pushed(trio.d, PushEnd.HANDSHAKE_FAILED) == before:  # one that D has known to be gone is not asked
        trio.whole()
        trio.p.node.process.send_signal(signal.SIGSTOP)
        asked = put(pool, trio.d)
        until(lambda asked=asked: counted(trio.d, "paceline_requests_running") == 1 or asked.answer.done())
        trio.p.node.kill()
        asked.check()
    start(trio.p)
    trio.whole()
    trio.at_rest()


def test_the_one_that_computes_calls_one_that_answers_no_handshake(trio: Trio, pool: ThreadPoolExecutor) -> None:
    trio.whole()
    before = prefilled(trio.p, LeaseEnd.WRITE_FAILED)
    while prefilled(trio.p, LeaseEnd.WRITE_FAILED) == before:
        trio.whole()
        asked = begin(trio, pool, "dial 0", trio.d)
        trio.d.node.process.send_signal(signal.SIGSTOP)
        trio.p.goes_on()
        until(lambda: metric(trio.p, "paceline_kv_leases") == 0)
        trio.d.node.process.send_signal(signal.SIGCONT)
        asked.check()
    trio.whole()
    trio.at_rest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_clocks_that_jump_end_no_lease(trio: Trio, pool: ThreadPoolExecutor, jump: float) -> None:
    trio.whole()
    before = pushed(trio.d, PushEnd.WHOLE)
    while pushed(trio.d, PushEnd.WHOLE) == before:
        for machine in (trio.p, trio.d):
            (machine.home / "clock_s").unlink(missing_ok=True)
        held = begin(trio, pool, f"hold {FIRST}", trio.d)
        (trio.p.home / "clock_s").write_text(str(jump))
        (trio.d.home / "clock_s").write_text(str(-jump))
        trio.p.goes_on()
        held.check()
    for machine in (trio.p, trio.d):
        (machine.home / "clock_s").unlink()
    trio.at_rest()
