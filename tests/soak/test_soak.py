"""Machines of a pipeline die at random tokens under many streams: every answer is complete and as one machine gives it, and nothing leaks.

`make soak` kills 200 times, and for five minutes at a pace, of the whole bundled model; `make test-all` 8 times, and for some seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.shallow_model import write_shallow
from tests.fleet.machines import Machine, until, until_nothing
from tests.fleet.open_files import open_files, unexplained
from tests.soak.soak import Soak, answer, asked, settle

from paceline.bench.fleet import LocalFleet

KILLS = int(os.environ.get("PACELINE_SOAK_KILLS", "8"))
MINUTES = int(os.environ.get("PACELINE_SOAK_MINUTES", "0"))
PACE_S = 5.0
SHORT_S = 10
SEED = int(os.environ.get("PACELINE_SOAK_SEED", "4"))
CLIENTS = 8
ENOUGH_TO_SEE = 50
"""Kills from which on memory says something."""
MOST_GROWTH = 1.05
FIFTH = int(os.environ.get("PACELINE_SOAK_LAYERS", "5")) // 5
"""Of the model's layers: all of it, or its first ones."""
SMALL = ("--threads", "1", "--context", "512", "--kv-tokens", "6144")

pytestmark = [pytest.mark.whole("machines are struck for minutes"), pytest.mark.timeout(180 + 30 * KILLS + 120 * MINUTES)]

Right = list[tuple[dict[str, Any], tuple[str, str]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow(tmp_path_factory.mktemp("model"), 5 * FIFTH)


@pytest.fixture(scope="module")
def right(model: Path) -> Right:
    """Requests, and what one machine answers."""
    alone = Machine("alone", Path(os.environ["PACELINE_HOME"]), options=())
    alone.up("--model", str(model), *SMALL)
    try:
        return [(body, answer(alone.node.url, body)) for body in asked(SEED, 16)]
    finally:
        alone.node.kill()


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[LocalFleet]:
    made = LocalFleet(4, 1, model)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def orchestrator(fleet: LocalFleet, model: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    options = ("--fleet-host", fleet.host, "--fleet-port", str(fleet.port), "--no-mdns")
    made = Machine(fleet.names[0], fleet.homes[fleet.names[0]], preset=fleet.preset, options=options)
    try:
        made.up("--model", str(model), *SMALL, "--pipeline", "--own-layers", str(FIFTH), "--throughput", *getattr(request, "param", ()))
        yield made
    finally:
        for up in made.running:
            up.kill()


def test_answers_survive_whoever_dies_and_nothing_is_left_behind(right: Right, orchestrator: Machine, fleet: LocalFleet) -> None:
    assert all(ended in {"stop", "length"} for _, (_, ended) in right)
    soak = Soak(fleet, orchestrator, right, CLIENTS, SEED)
    Soak(fleet, orchestrator, right, CLIENTS, SEED).run(0)
    settle(orchestrator)
    before = open_files(soak.pid)
    began_s = time.monotonic()
    soak.run(KILLS)
    if soak.tally.wrong:
        pytest.fail("\n".join([*soak.tally.wrong, *orchestrator.node.said[-20:]]))
    assert soak.tally.answers >= CLIENTS
    soak.check_all_run()
    until(lambda: {card.node_id for card in orchestrator.sight().view.cards} == set(fleet.names))
    settle(orchestrator)
    until_nothing(lambda: unexplained(orchestrator, fleet.pids.values(), before))
    stages = soak.sessions()
    sys.stdout.write(  # seen with -s
        f"\n{KILLS} kills in {time.monotonic() - began_s:.0f} s, {soak.tally.answers} answers, "
        f"{soak.tally.tokens} tokens, memory x {soak.growth:.3f}\n"
    )
    assert 1 <= stages <= 3, "the route that is in use, and no other"
    if KILLS >= ENOUGH_TO_SEE:
        assert soak.growth < MOST_GROWTH
    orchestrator.node.stop()
    until(lambda: soak.sessions() == 0)


@pytest.mark.parametrize(
    "orchestrator",
    [("--pin", f"local-1:0-{FIFTH - 1}", "--pin", f"local-2:{FIFTH}-{3 * FIFTH - 1}", "--pin", f"local-3:{3 * FIFTH}-{5 * FIFTH - 1}")],
    indirect=True,
    ids=["two stages and a spare"],
)
def test_under_a_fault_every_few_seconds_answers_end_in_every_minute(right: Right, orchestrator: Machine, fleet: LocalFleet) -> None:
    soak = Soak(fleet, orchestrator, right, CLIENTS, SEED)
    ended = soak.run_for(MINUTES or 1, PACE_S, 60 if MINUTES else SHORT_S)
    sys.stdout.write(f"\na kill every {PACE_S:g} s: answers in each minute: {ended}\n")  # seen with -s
    assert not soak.tally.wrong, "\n".join([*soak.tally.wrong, *orchestrator.node.said[-20:]])
    assert all(ended) or not MINUTES
