"""Promise 1 with drafts: whoever guesses, and however well, no byte of an answer changes, greedy or drawn.

A pair is a request and a configuration. 200 run on a tiny random model, and some on the bundled one; `make soak` runs 2,000 on that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.identity.drafted import PROPOSERS, RUNS, Configuration, Subject, bundled, configurations, tiny

from paceline.core.clock import SystemClock
from paceline.testing.clock import FakeClock

PAIRS = int(os.environ.get("PACELINE_SOAK_PAIRS", "200"))
SOAKS = "PACELINE_SOAK_PAIRS" in os.environ
EACH = -(-PAIRS // (2 * len(PROPOSERS) * len(RUNS)))
"""Requests of a configuration."""
REAL = (Configuration("auto", 2, 16, "preempted"), Configuration("ngram", 1, 1), Configuration("jacobi", 1, 16))

pytestmark = pytest.mark.timeout(600 + PAIRS)  # the first run on a machine compiles kernels


@pytest.fixture(scope="module")
def subject(paceline_home: object) -> Iterator[Subject]:
    # With a clock that stands still every draft is worth it; in the soak it is the machine's, so lengths are those of a day's work.
    made = bundled(SystemClock, 2 * EACH) if SOAKS else tiny(FakeClock)
    yield made
    made.close()


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("stages", [1, 2])
def test_same_answers(subject: Subject, proposer: str, stages: int) -> None:
    for place, config in enumerate(configurations(proposer, stages)):
        check(subject, config, first=place * EACH)
    drafted, accepted = (
        sum(sum(getattr(stats, name).values()) for stats in subject.stats[proposer]) for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted, "drafts that are never tried, never right or never wrong show nothing"


@pytest.mark.skipif(SOAKS, reason="the soak runs on nothing else")
def test_same_answers_of_the_bundled_model(paceline_home: object) -> None:
    subject = bundled(FakeClock, 4, answer=20)
    for config in REAL:
        check(subject, config, first=0, count=4)
    subject.close()


def check(subject: Subject, config: Configuration, first: int, count: int = EACH) -> None:
    requests = [subject.requests[place % len(subject.requests)] for place in range(first, first + count)]
    expected = {(request.request_id, index): subject.alone[request.request_id, index] for request in requests for index in range(request.n)}
    assert subject.run(config, requests) == expected, config
