"""Machines behind a door are struck at random tokens under many streams: every answer is complete and as one machine gives it.

`make soak` strikes 200 times; `make test-all` 8 times.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fleet.machines import until
from tests.soak.moving import DOWN_S, MOST_BETWEEN, Clients, Right, Trio, asked, trio
from tests.soak.soak import answer

FAULTS = int(os.environ.get("PACELINE_SOAK_FAULTS", "8"))
SEED = int(os.environ.get("PACELINE_SOAK_SEED", "4"))
CLIENTS = 8

pytestmark = [pytest.mark.whole("machines are struck for minutes"), pytest.mark.timeout(300 + 30 * FAULTS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shallow_gguf: Path) -> Iterator[Trio]:
    with trio(tmp_path_factory.mktemp("moving"), shallow_gguf) as made:
        yield made


@pytest.fixture(scope="module")
def right(whole: Trio) -> Right:
    """Requests, and what a machine answers that nothing happens to."""
    one = whole.runs[0]
    found = [(body, whole.places.at(one.name, lambda body=body: answer(one.node.url, body))) for body in asked(SEED, 16)]
    assert all(ended in {"stop", "length"} for _, (_, ended) in found)
    return found


def rested(whole: Trio) -> None:
    """Wait until nothing runs any more, anywhere."""
    for machine in whole.runs:
        for left in ("paceline_requests_running", "paceline_kv_blocks_used"):
            until(lambda machine=machine, left=left: whole.metric(machine, left) == 0)


def check(clients: Clients, whole: Trio) -> None:
    if clients.seen.wrong:
        said = [line for machine in (whole.door, *whole.runs) for line in machine.node.said[-10:]]
        pytest.fail("\n".join([*clients.seen.wrong, *said]))
    assert clients.seen.answers >= CLIENTS
    rested(whole)


def test_no_answer_is_lost_whatever_machines_suffer(whole: Trio, right: Right) -> None:
    rng = random.Random(SEED)
    faults = [whole.faults[number % len(whole.faults)] for number in range(FAULTS)]
    rng.shuffle(faults)
    began_s = time.monotonic()
    with Clients(whole, right, CLIENTS, SEED) as clients:
        for fault in faults:
            clients.wait_for_tokens(rng.randint(1, MOST_BETWEEN))
            if clients.seen.wrong:
                break
            whole.strike(fault, rng.choice(whole.runs), rng.uniform(*DOWN_S))
        clients.wait_for_tokens(MOST_BETWEEN)
    seen = clients.seen
    sys.stdout.write(  # seen with -s
        f"\n{FAULTS} faults in {time.monotonic() - began_s:.0f} s, {seen.answers} answers, {seen.tokens} tokens, "
        f"{whole.metric(whole.door, 'paceline_fleet_retried_total'):.0f} moves, longest silence {seen.longest_s:.1f} s\n"
    )
    check(clients, whole)


def test_every_node_restarts_and_only_answers_that_outlast_their_doors_drain_end(whole: Trio, right: Right) -> None:
    """The door too, which holds the clients' connections: what it has begun it ends, and clients that ask again are answered once it is back."""
    with Clients(whole, right, CLIENTS, SEED) as clients:
        for machine in whole.runs:
            clients.wait_for_tokens(MOST_BETWEEN)
            whole.strike("stop", machine, 0.0)
        clients.may_be_refused = True
        for options in (("--drain-s", "0.1"), ()):  # the first stop drains for long, the second does not
            clients.wait_for_tokens(MOST_BETWEEN)
            whole.restart_door(*options)
            clients.wait_for_answers()
    sys.stdout.write(f"\n{clients.seen.answers} answers, of which {clients.seen.outlasted} outlasted their door's drain\n")
    check(clients, whole)
