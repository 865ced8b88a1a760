"""How far a route on its way is: what counts as progress, and how long it will need."""

from __future__ import annotations

from tests.fakes.clock import FakeClock

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.ways.pipeline.executor.route import StageLoading
from paceline.ways.pipeline.host.loading import LoadMeter
from paceline.ways.pipeline.routes.opening import StageLoads

BEE, CAT = LayerSpan(NodeId("bee"), LayerRange(0, 3)), LayerSpan(NodeId("cat"), LayerRange(3, 6))


def test_it_is_as_far_as_all_its_machines_are_and_takes_as_long_as_the_slowest() -> None:
    clock = FakeClock()
    loads = StageLoads(clock)
    loads.begin([BEE, CAT])
    assert (loads.opening.nodes, loads.opening.percent, loads.opening.seconds_left) == ((), 0, None)
    loads.note_progress(BEE, StageLoading(0, 200))
    loads.note_progress(CAT, StageLoading(100, 200))  # which had half of it from before
    clock.advance(10)
    loads.note_progress(BEE, StageLoading(40, 200))
    assert loads.opening.seconds_left is None, "nothing is known of the other"
    loads.note_progress(CAT, StageLoading(150, 200))
    opening = loads.opening
    assert (opening.nodes, opening.bytes_done, opening.bytes_total) == (("bee", "cat"), 190, 400)
    assert opening.seconds_left == 40
    assert str(opening) == "47 %, 40 s left"
    clock.advance(30)
    assert loads.opening.seconds_left == 160, "nothing came since"
    loads.opened(CAT)
    assert (loads.opening.nodes, loads.opening.bytes_done) == (("bee",), 240)


def test_a_load_that_begins_anew_has_gained_nothing_until_it_is_beyond_where_it_was() -> None:
    loads = StageLoads(FakeClock())
    for most in (50, 50, 60):
        loads.begin([BEE])
        for done in (0, most // 2, most):
            loads.note_progress(BEE, StageLoading(done, 100))
        assert loads.opening.advanced == most
    loads.begin([CAT])
    loads.note_progress(CAT, StageLoading(1, 100))
    assert loads.opening.advanced == 61
    loads.end()
    assert loads.opening.advanced == 0


def test_before_the_first_byte_and_behind_the_last_kernels_are_read_and_compiled() -> None:
    loads = StageLoads(FakeClock())
    loads.begin([BEE])
    assert not loads.opening.counts_no_bytes, "it has said nothing: it may be asleep"
    loads.note_progress(BEE, StageLoading(0, 0))
    assert loads.opening.counts_no_bytes
    assert loads.opening.nodes == ("bee",)
    loads.note_progress(BEE, StageLoading(0, 100))
    assert not loads.opening.counts_no_bytes
    loads.note_progress(BEE, StageLoading(100, 100))
    assert loads.opening.counts_no_bytes


def test_a_stage_that_compiles_says_so_whenever_it_does() -> None:
    """Kernels are compiled before the first byte, between the last that was fetched and the first that is packed, and behind the last."""

    def compiles(meter: LoadMeter) -> bool:
        loads = StageLoads(FakeClock())
        loads.begin([BEE])
        loads.note_progress(BEE, StageLoading(*meter.progress))
        return loads.opening.counts_no_bytes

    meter, behind = LoadMeter(), LoadMeter()
    behind.wait_for(meter)
    steps = (
        (lambda: None, True),
        (lambda: meter.fetched.show(10, 100), False),
        (lambda: meter.fetched.show(100, 100), True),
        (lambda: meter.packed.show(10, 100), False),
        (lambda: meter.packed.show(100, 100), True),
    )
    done = 0
    for step, is_compiling in steps:
        step()
        assert compiles(meter) is compiles(behind) is is_compiling
        assert meter.progress[0] >= done
        done = meter.progress[0]
