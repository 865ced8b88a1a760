"""A search for machines: how long it lasts, whom it waits for, and what is said of it."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from paceline.core.errors import ExecutorUnavailable, ShardUnavailable
from paceline.parallel.limits import PipelineLimits
from paceline.parallel.route import Fault, Route
from paceline.parallel.search import Search
from paceline.testing.clock import FakeClock

LIMITS = PipelineLimits(search_s=30.0, look_s=0.25)
ROUTE = cast(Route, object())
NOBODY = ShardUnavailable("No machine can run m", "Start one.")


class Router:
    """Says what it is told to: a route, None while somebody gets ready, or why nobody can."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.answer: Route | ShardUnavailable | None = NOBODY

    def find(self, wait_s: float) -> Route | None:
        self.clock.advance(wait_s)
        if isinstance(self.answer, ShardUnavailable):
            raise self.answer
        return self.answer

    def quarantine(self, fault: Fault) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def router() -> Router:
    return Router(FakeClock())


@pytest.fixture
def search(router: Router) -> Search:
    return Search(router, None, "3 to 5", LIMITS, router.clock)


def in_vain(search: Search, router: Router) -> float:
    """Look until it is over; how long that took."""
    began = router.clock.monotonic()
    with pytest.raises(ExecutorUnavailable) as caught:
        look_to_the_end(search)
    assert str(caught.value) == "No machines are left for layers 3 to 5: No machine can run m. Start one."
    return router.clock.monotonic() - began


def look_to_the_end(search: Search) -> None:
    while search.look() is None:
        pass


def test_a_search_lasts_its_time_and_the_next_one_ends_at_once(search: Search, router: Router, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert in_vain(search, router) >= LIMITS.search_s
        assert in_vain(search, router) == LIMITS.look_s
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "looking for machines for layers 3 to 5 for 30 s: No machine can run m. Start one.",
        "no machines are left for layers 3 to 5: No machine can run m. Start one.",
    ]


def test_a_later_search_waits_for_a_machine_that_gets_ready(search: Search, router: Router) -> None:
    in_vain(search, router)
    router.answer = None
    assert [search.look() for _ in range(8)] == [None] * 8
    router.answer = ROUTE
    assert search.look() is router.answer


def test_nobody_is_waited_for_longer_than_a_search_lasts(search: Search, router: Router) -> None:
    in_vain(search, router)
    router.answer = None
    began = router.clock.monotonic()
    with pytest.raises(ExecutorUnavailable, match="none answered in time"):
        look_to_the_end(search)
    assert router.clock.monotonic() - began >= LIMITS.search_s


def test_after_a_route_a_search_lasts_its_time_again(search: Search, router: Router) -> None:
    in_vain(search, router)
    router.answer = ROUTE
    assert search.look() is router.answer
    router.answer = NOBODY
    search.lost(Fault(None, "shard_unavailable", "gone"))
    assert in_vain(search, router) >= LIMITS.search_s
