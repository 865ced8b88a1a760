"""Promise 1 with drafts: whoever guesses, and however well, no byte of an answer changes, greedy or drawn.

A pair is a request and a configuration. 200 run on a tiny random model, and some on the bundled one; `make soak` runs 2,000 on that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest
from tests.fakes.clock import FakeClock
from tests.identity.draft_rounds import DISTINCT, FEW, PREEMPTED, PROPOSERS, ROUND, STAGES, Configuration, rounds_of, runs
from tests.identity.drafted import Subject, bundled, tiny

from paceline.core.clock import SystemClock

PAIRS = int(os.environ.get("PACELINE_SOAK_PAIRS", "200"))
SOAKS = "PACELINE_SOAK_PAIRS" in os.environ
ROUNDS = rounds_of(PAIRS)
REQUESTS = ROUND * min(ROUNDS, DISTINCT)
REAL = (Configuration("auto", 2, FEW, PREEMPTED), Configuration("ngram", 1, 1), Configuration("jacobi", 1, FEW))

pytestmark = pytest.mark.timeout(600 + PAIRS)  # the first run on a machine compiles kernels


@pytest.fixture(scope="module")
def subject(paceline_home: object) -> Iterator[Subject]:
    # With a clock that stands still every draft is worth it; in the soak it is the machine's, so lengths are those of a day's work.
    made = bundled(SystemClock, REQUESTS) if SOAKS else tiny(FakeClock, REQUESTS)
    yield made
    made.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("stages", STAGES)
def test_same_answers(subject: Subject, proposer: str, stages: int) -> None:
    for config, places in runs(proposer, stages, ROUNDS):
        check(subject, config, places)
    drafted, accepted = (
        sum(sum(getattr(stats, name).values()) for stats in subject.stats[proposer]) for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted, "drafts that are never tried, never right or never wrong show nothing"


@pytest.mark.skipif(SOAKS, reason="the soak runs on nothing else")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", REAL, ids=lambda config: config.proposer)
def test_same_answers_of_the_bundled_model(paceline_home: object, config: Configuration) -> None:
    subject = bundled(FakeClock, FEW, answer=20)
    check(subject, config, range(FEW))
    subject.close()


def check(subject: Subject, config: Configuration, places: Iterable[int]) -> None:
    requests = [subject.requests[place % len(subject.requests)] for place in places]
    expected = {(request.request_id, index): subject.alone[request.request_id, index] for request in requests for index in range(request.n)}
    assert subject.run(config, requests) == expected, config
