"""A search for machines: how long it lasts, whom it waits for, and what is said of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import cast

import pytest
from tests.fakes.clock import FakeClock

from paceline.core.errors import ExecutorUnavailable, PacelineError, PipelineError, PipelineStalled, ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId
from paceline.ways.pipeline.executor.route import Opening, PipelineFault, Route
from paceline.ways.pipeline.executor.search import ALONE_MOST_S, FORGET_S, LOOK_AGAIN_S, Fallback, PipelineLimits, Search

LIMITS = PipelineLimits(search_s=30.0, look_s=0.25, alone_s=30.0)


class Opened:
    """As much of a route as a search looks at."""

    def __init__(self) -> None:
        self.closed = False
        self.broken: PipelineFault | None = None

    def fault(self) -> PipelineFault | None:
        return self.broken

    def close(self) -> None:
        self.closed = True


ROUTE = cast(Route, Opened())
NOBODY = ShardUnavailable("No machine can run m", "Start one.")


class Router:
    """Says what it is told to: a route, how far one is on its way, or why there can be none."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.answer: Route | PipelineError | Opening = NOBODY
        self.looks = 0
        self.left_out: list[PipelineFault] = []

    def find(self, wait_s: float) -> Route | Opening:
        self.looks += 1
        self.clock.advance(wait_s)
        if isinstance(self.answer, PipelineError):
            raise self.answer
        return self.answer

    def lacks(self) -> str | None:
        return str(self.answer) if isinstance(self.answer, PipelineError) else None

    def forget_kv(self) -> None: ...

    def quarantine(self, fault: PipelineFault) -> None:
        self.left_out.append(fault)

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
    while search.look_for_route() is None:
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NOBODY, "shard_unavailable"),
        (WeightsMismatch("b has others"), "weights_mismatch"),
        (PipelineStalled("b says nothing"), "pipeline_stalled"),
        (PipelineError("b is busy"), "shard_unavailable"),
    ],
)
def test_requests_are_told_why_machines_that_are_there_are_of_no_use(
    search: Search, router: Router, error: PipelineError, code: str
) -> None:
    router.answer = error
    with pytest.raises(ExecutorUnavailable) as caught:
        look_to_the_end(search)
    assert caught.value.code == code
    assert error.message in caught.value.message


def test_requests_of_a_pipeline_that_stalled_and_found_no_other_machines_are_told_so(search: Search, router: Router) -> None:
    search.lost(PipelineFault(NodeId("b"), "pipeline_stalled", "b has let nothing through"))
    with pytest.raises(ExecutorUnavailable, match="b has let nothing through") as caught:
        look_to_the_end(search)
    assert caught.value.code == "pipeline_stalled"
    with pytest.raises(ExecutorUnavailable) as caught:  # a later request did not stall
        look_to_the_end(search)
    assert caught.value.code == "shard_unavailable"
    # One that breaks otherwise after a route was found has nothing to do with it.
    search.lost(PipelineFault(NodeId("b"), "pipeline_stalled", "b has let nothing through"))
    router.answer = ROUTE
    assert search.look_for_route() is ROUTE
    router.answer = NOBODY
    with pytest.raises(ExecutorUnavailable) as caught:
        look_to_the_end(search)
    assert caught.value.code == "shard_unavailable"


def test_a_later_search_waits_for_a_machine_that_gets_ready(search: Search, router: Router) -> None:
    in_vain(search, router)
    router.answer = Opening()
    assert [search.look_for_route() for _ in range(8)] == [None] * 8
    router.answer = ROUTE
    assert search.look_for_route() is router.answer


def test_nobody_is_waited_for_longer_than_a_search_lasts(search: Search, router: Router) -> None:
    in_vain(search, router)
    router.answer = Opening()
    began = router.clock.monotonic()
    with pytest.raises(ExecutorUnavailable, match="none answered in time"):
        look_to_the_end(search)
    assert router.clock.monotonic() - began >= LIMITS.search_s


def loading(done: int, *, total: int = 1000, advanced: int | None = None) -> Opening:
    return Opening(done, total, done if advanced is None else advanced, None, (NodeId("b"),))


def test_machines_that_load_further_bytes_are_waited_for_however_long_it_takes(search: Search, router: Router) -> None:
    began = router.clock.monotonic()
    for done in range(0, 1000, 50):
        router.answer = loading(done)
        assert search.look_for_route() is None
        assert search.opening == router.answer
        router.clock.advance(0.9 * LIMITS.search_s)
    assert router.clock.monotonic() - began > 10 * LIMITS.search_s
    router.answer = ROUTE
    assert search.look_for_route() is ROUTE
    assert search.opening is None


@pytest.mark.parametrize("again", [[410, 410, 410], [410, 0, 100, 400, 410, 0, 409]])
def test_machines_that_load_nothing_further_are_not_waited_for(search: Search, router: Router, again: list[int]) -> None:
    """Nor those whose load fails and begins anew, again and again."""

    def look_while_it_tries() -> None:
        most = 0
        for done in [*again, *again, *again]:
            most = max(most, done)
            router.answer = loading(done, advanced=most)
            search.look_for_route()
            router.clock.advance(0.4 * LIMITS.search_s)

    with pytest.raises(ExecutorUnavailable, match=r"b loaded nothing more \(\d+ % done\)"):
        look_while_it_tries()


@pytest.mark.parametrize(("done", "total", "percent"), [(0, 0, 0), (1000, 1000, 100)])
def test_machines_that_have_no_bytes_to_count_may_read_and_compile_kernels_for_a_while(
    search: Search, router: Router, done: int, total: int, percent: int
) -> None:
    router.answer = loading(done, total=total)
    began = router.clock.monotonic()
    with pytest.raises(ExecutorUnavailable, match=f"{percent} % done") as caught:
        look_to_the_end(search)
    assert caught.value.code == "pipeline_stalled"
    assert router.clock.monotonic() - began == pytest.approx(LIMITS.prepare_s, abs=1.0)


def test_machines_that_say_nothing_are_not_waited_for(search: Search, router: Router) -> None:
    router.answer = Opening()
    began = router.clock.monotonic()
    with pytest.raises(ExecutorUnavailable):
        look_to_the_end(search)
    assert router.clock.monotonic() - began == pytest.approx(LIMITS.search_s, abs=1.0)


def test_what_was_loaded_for_one_route_is_no_measure_for_the_next(search: Search, router: Router) -> None:
    router.answer = loading(900)
    search.look_for_route()
    router.answer = ROUTE
    search.look_for_route()
    search.lost(PipelineFault(None, "shard_unavailable", "gone"))
    for done in (10, 20, 30):
        router.answer = loading(done)
        assert search.look_for_route() is None
        router.clock.advance(0.9 * LIMITS.search_s)


def test_after_a_route_a_search_lasts_its_time_again(search: Search, router: Router) -> None:
    in_vain(search, router)
    router.answer = ROUTE
    assert search.look_for_route() is router.answer
    router.answer = NOBODY
    search.lost(PipelineFault(None, "shard_unavailable", "gone"))
    assert in_vain(search, router) >= LIMITS.search_s


class Going(Fallback):
    """One that is ready at once."""

    def __init__(self, clock: FakeClock, after: int | None = None) -> None:
        self.loaded = cast(Route, Opened())
        super().__init__(lambda: self.loaded, after, clock)


GONE = PipelineFault(None, "shard_unavailable", "gone")


def alone(router: Router, after: int | None = None) -> Search:
    """A search that ended with this machine alone."""
    fallback = Going(router.clock, after)
    search = Search(router, fallback, "3 to 5", LIMITS, router.clock)
    go_on_alone(search)
    return search


def go_on_alone(search: Search) -> None:
    search.lost(GONE)
    look_to_the_end(search)
    assert search.is_alone


class Loading(Fallback):
    """One that stands after a number of looks, or fails then."""

    def __init__(self, clock: FakeClock, looks: int, error: PacelineError | None = None) -> None:
        self.loaded, self.looks, self.error, self.begun_at, self.closed = cast(Route, Opened()), looks, error, -1.0, False
        self.clock = clock
        super().__init__(lambda: self.loaded, None, clock)

    @property
    def has_begun(self) -> bool:
        return self.begun_at >= 0

    def wait(self, seconds: float) -> Route | None:
        self.clock.advance(seconds)
        self.begun_at = self.clock.monotonic() if self.begun_at < 0 else self.begun_at
        self.looks -= 1
        if self.looks > 0:
            return None
        if self.error is not None:
            raise self.error
        return self.loaded

    def close(self) -> None:
        self.closed = True


MOMENT_S = 2 * LIMITS.look_s


def loses(router: Router, fallback: Fallback) -> tuple[Search, float]:
    """A search that begins with a loss, and when that was."""
    search = Search(router, fallback, "3 to 5", LIMITS, router.clock)
    search.lost(GONE)
    return search, router.clock.monotonic()


@pytest.mark.parametrize(
    ("answer", "begins_s"),
    [
        (NOBODY, 0.0),
        (WeightsMismatch("b has others"), 0.0),
        (Opening(), LIMITS.open_s),
        (Opening(9, 99, 9, None, (NodeId("b"),)), LIMITS.open_s),
    ],
    ids=["no machine", "an unlike machine", "a machine that says nothing", "a machine that loads"],
)
def test_after_a_loss_this_machine_loads_while_it_searches(router: Router, answer: PipelineError | Opening, begins_s: float) -> None:
    fallback = Loading(router.clock, looks=12)
    search, began = loses(router, fallback)
    router.answer = answer
    look_to_the_end(search)
    assert search.is_alone
    assert fallback.begun_at - began == pytest.approx(begins_s, abs=MOMENT_S)
    assert router.clock.monotonic() - began < begins_s + 12 * LIMITS.look_s + MOMENT_S


def test_machines_that_are_ready_first_are_used_and_what_is_loaded_here_is_closed(router: Router) -> None:
    fallback = Loading(router.clock, looks=1000)
    search, _ = loses(router, fallback)
    assert search.look_for_route() is None
    router.answer = ROUTE
    assert search.look_for_route() is ROUTE
    assert not search.is_alone
    assert fallback.closed


@pytest.mark.parametrize("search_s", [0.0, 30.0])
def test_a_search_goes_on_for_its_time_though_this_machine_can_t_load_the_layers(router: Router, search_s: float) -> None:
    fallback = Loading(router.clock, looks=3, error=PacelineError("9 GiB are missing"))
    search = Search(router, fallback, "3 to 5", replace(LIMITS, search_s=search_s), router.clock)
    search.lost(GONE)
    began = router.clock.monotonic()
    with pytest.raises(ExecutorUnavailable, match=r"No machine can run m; and not here: .*9 GiB"):
        look_to_the_end(search)
    assert router.clock.monotonic() - began == pytest.approx(max(search_s, 3 * LIMITS.look_s), abs=1.0)
    assert fallback.looks == 0, "it is tried once a search"
    router.answer = ROUTE
    assert search.look_for_route() is ROUTE


def test_at_its_start_a_pipeline_looks_for_machines_first(router: Router) -> None:
    fallback = Loading(router.clock, looks=1)
    search = Search(router, fallback, "3 to 5", LIMITS, router.clock)
    began = router.clock.monotonic()
    look_to_the_end(search)
    assert fallback.begun_at - began == pytest.approx(LIMITS.search_s, abs=1.0)


def fits(route: Route) -> bool:
    del route
    return True


def waits_alone_s(search: Search, router: Router) -> float:
    """For how long nobody is looked for; those found then take over."""
    began, looks = router.clock.monotonic(), router.looks
    while search.others_are_back(fits) is None and router.looks == looks:
        router.clock.advance(1.0)
    return router.clock.monotonic() - began


def test_after_a_while_alone_others_are_looked_for_now_and_then(router: Router) -> None:
    search = alone(router)
    assert waits_alone_s(search, router) == pytest.approx(LIMITS.alone_s, abs=1.0)
    assert waits_alone_s(search, router) == pytest.approx(LOOK_AGAIN_S, abs=1.0)
    assert search.is_alone
    router.clock.advance(LOOK_AGAIN_S)
    router.answer = Opening()  # they get ready
    assert search.others_are_back(fits) is None
    router.answer = ROUTE
    assert search.others_are_back(fits) is ROUTE
    assert not search.is_alone
    assert search.others_are_back(fits) is None
    # Who goes away again and again is looked for less and less often, up to a bound; and, after a long while, as at first.
    for waits in (60.0, 120.0, 240.0, 480.0, ALONE_MOST_S, ALONE_MOST_S):
        router.answer = NOBODY
        go_on_alone(search)
        router.answer = ROUTE
        assert waits_alone_s(search, router) == pytest.approx(waits, abs=1.0)
        assert not search.is_alone
    router.clock.advance(ALONE_MOST_S)
    router.answer = NOBODY
    go_on_alone(search)
    assert waits_alone_s(search, router) == pytest.approx(LIMITS.alone_s, abs=1.0)


def test_others_that_do_not_fit_do_not_take_over(router: Router) -> None:
    search, found = alone(router), Opened()
    router.answer = cast(Route, found)
    router.clock.advance(LIMITS.alone_s)
    assert search.others_are_back(lambda _: False) is None
    assert found.closed
    assert search.is_alone
    assert waits_alone_s(search, router) == pytest.approx(ALONE_MOST_S, abs=1.0)


def test_a_route_that_broke_before_anybody_took_it_is_not_taken(router: Router) -> None:
    search, found = alone(router), Opened()
    found.broken = GONE
    router.answer = cast(Route, found)
    router.clock.advance(LIMITS.alone_s)
    assert search.others_are_back(fits) is None
    assert found.closed
    assert search.is_alone
    assert router.left_out == [GONE, GONE]


def test_where_losses_ended_the_search_others_take_over_once_these_no_longer_count(router: Router) -> None:
    search = alone(router, after=1)
    router.answer = ROUTE
    router.clock.advance(LIMITS.alone_s)
    assert search.others_are_back(fits) is None
    router.clock.advance(FORGET_S)
    assert search.others_are_back(fits) is ROUTE
