"""Prompts that a pipeline computes for a machine, and for another pipeline, among real processes: the bytes of one machine, whichever of them is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from openai import APIError, InternalServerError
from tests.fleet.kv_machines import Saboteur, prefilled, pushed, saboteurs
from tests.fleet.machines import SHALLOW, Machine, until
from tests.fleet.test_forwarding import client_of, metric
from tests.fleet.test_kv_moves import SMALL, counted

from paceline.ways.kv.lease import LeaseEnd
from paceline.ways.kv.pushing import PushEnd

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

STORY = " ".join(f"On day {day} the riders went {day * 7 % 31} miles and drank {day * 5 % 11} cups of tea." for day in range(1, 25))
PUSHED = 'paceline_kv_peer_blocks_total{what="pushed"}'
LEAST = 'paceline_kv_push_least_tokens{node="p"}'
NUMBERS = count()
LOST = (PushEnd.WRITE_FAILED, PushEnd.SILENT, PushEnd.WATCHDOG, PushEnd.HANDSHAKE_FAILED)
SPEEDS = {"d": 5.0, "h": 5000.0, "p": 5000.0, "o": 5.0}


def start(machine: Saboteur) -> None:
    (machine.home / "config.toml").write_text("[pipeline]\nkeep_spares = false\nsearch_seconds = 150\n\n[kv]\nnixl = false\n")
    (machine.home / "prompts_per_s").write_text(str(SPEEDS[machine.name]))
    match machine.name:
        case "d":
            machine.up(*SMALL, "--ways", "alone", "--draft", "off", "--role", "decode")
        case "h":
            machine.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", "0")
        case name:
            role = "prefill" if name == "p" else "decode"
            machine.up("--pipeline", "--pin", f"{name}:0-0", "--pin", "h:1-2", "--draft", "off", "--role", role, *SMALL)


@dataclass(slots=True)
class Fleet:
    """`d` alone, and the pipelines of `p`, which computes prompts, and of `o`; `h` holds layers of both."""

    d: Saboteur
    h: Saboteur
    p: Saboteur
    o: Saboteur

    def ask(self, at: Machine, said: str, **extra: Any) -> tuple[str, int]:
        asked: dict[str, Any] = {"ignore_eos": True, "ways": ["alone" if at.name == "d" else "pipeline"], **extra}
        messages: list[Any] = [{"role": "user", "content": said}]
        while True:
            try:
                answer = client_of(at).chat.completions.create(
                    model=SHALLOW, messages=messages, temperature=0.8, seed=5, max_tokens=12, extra_body=asked
                )
                break
            except InternalServerError as error:
                if error.status_code != 503:  # a pipeline that a busy machine lost is opened anew
                    raise
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0

    def waits_for_p(self, at: Machine) -> None:
        """A machine would have prompts computed by P. How fast a pipeline is with prompts is known once it has run."""
        while not counted(at, LEAST) and at.name == "o":
            self.ask(at, STORY[:200], cache_salt=str(next(NUMBERS)))
        until(lambda: counted(at, LEAST) > 0)

    def alike(self, said: str, answer: tuple[str, int]) -> None:
        assert self.ask(self.d, said, cache_salt="computed anew")[0] == answer[0]

    def at_rest(self) -> None:
        """Nothing is held, leased or wrong anywhere."""
        for machine in (self.d, self.p, self.o):
            for what in ("paceline_kv_blocks_used", "paceline_requests_running", "paceline_kv_leases"):
                until(lambda machine=machine, what=what: metric(machine, what) == 0)
        assert not any(machine.violations for machine in (self.d, self.h, self.p, self.o))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with saboteurs(tmp_path_factory.mktemp("spans"), SPEEDS, start) as (d, h, p, o):
        made = Fleet(d, h, p, o)
        yield made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["d", "o"])
def test_a_pipeline_computes_a_prompt_for_another_and_may_be_lost_meanwhile(fleet: Fleet, name: str) -> None:
    at = fleet.d if name == "d" else fleet.o
    fleet.waits_for_p(at)
    # One that fails by being late, as on a machine that does much else, is tried again.
    cached = 0
    while cached <= 16 * 20:
        fleet.waits_for_p(at)
        said = f"{next(NUMBERS)}. {STORY}"
        answer = fleet.ask(at, said)
        fleet.alike(said, answer)
        cached = answer[1]
    assert pushed(at, PushEnd.WHOLE) >= 1
    until(lambda: prefilled(fleet.p, LeaseEnd.WHOLE) >= 1)
    for holder in (at,) if name == "d" else (at, fleet.h):
        assert counted(holder, PUSHED) >= 20
    fleet.at_rest()

    # P is stopped while D asks.
    fleet.waits_for_p(at)
    fleet.p.node.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(fleet.ask, at, said := f"{next(NUMBERS)}. {STORY}")
        until(lambda: counted(at, "paceline_requests_running") == 1 or asking.done())
        until(lambda: asking.done() or bool(sum(pushed(at, end) for end in (PushEnd.SILENT, PushEnd.WATCHDOG))))
        fleet.p.node.process.send_signal(signal.SIGCONT)
        answer = asking.result()
    fleet.alike(said, answer)
    fleet.at_rest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", ["p", "d", "o"])
def test_one_that_is_killed_in_the_middle_leaves_no_byte_and_no_lease(fleet: Fleet, lost: str) -> None:
    at = fleet.d if lost == "d" else fleet.o
    before, left = sum(pushed(at, end) for end in LOST), prefilled(fleet.p, LeaseEnd.LEFT)
    fleet.p.will("hold 3")
    with ThreadPoolExecutor(1) as pool:
        while not fleet.p.did:  # one that fails by being late is tried again
            fleet.waits_for_p(at)
            asking = pool.submit(fleet.ask, at, said := f"{next(NUMBERS)}. {STORY}")
            until(lambda asking=asking: fleet.p.did or asking.done())
        (fleet.p if lost == "p" else at).node.kill()
        if lost == "p":
            answer = asking.result()
            fleet.alike(said, answer)
            assert sum(pushed(at, end) for end in LOST) > before
        else:
            with pytest.raises(APIError):
                asking.result()
            until(lambda: prefilled(fleet.p, LeaseEnd.LEFT) > left)
    fleet.p.goes_on()
    start(fleet.p if lost == "p" else at)
    fleet.waits_for_p(at)
    said = f"{next(NUMBERS)}. {STORY}"
    fleet.alike(said, fleet.ask(at, said))
    fleet.at_rest()
