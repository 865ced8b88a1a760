"""A batch is waited for as long as such batches take, and not much longer."""

from __future__ import annotations

from paceline.ways.pipeline.executor.search import MARGIN, SMALL, BatchTimeouts


def test_before_anything_came_the_plan_is_believed() -> None:
    assert BatchTimeouts().of(512) == 0
    assert BatchTimeouts(0.01).of(512) == MARGIN * 5.12


def test_a_long_prefill_is_waited_for_as_single_rows_take_until_one_was_seen() -> None:
    timeouts = BatchTimeouts()
    timeouts.took(1, 0.02)
    assert timeouts.of(512) == MARGIN * 512 * 0.02
    timeouts.took(512, 0.512)
    assert timeouts.of(512) == MARGIN * 0.512
    assert timeouts.of(1) == MARGIN * 0.02


def test_a_batch_is_given_the_time_that_its_way_takes_over_a_slow_link() -> None:
    timeouts = BatchTimeouts(0.01)
    timeouts.carried(8 << 20, 2.0)
    timeouts.carried(1000, 0.5)  # which says nothing of the link
    assert timeouts.of(512, 3 * (8 << 20)) == MARGIN * (5.12 + 6.0)


def test_a_machine_that_turns_slow_is_not_taken_for_an_ordinary_one() -> None:
    timeouts = BatchTimeouts()
    for _ in range(50):
        timeouts.took(1, 0.01)
    timeouts.took(1, 1.0)
    assert timeouts.of(1) < 0.5
    for _ in range(50):
        timeouts.took(SMALL, SMALL * 1.0)
    assert timeouts.of(1) > 3.9  # but for one that stays so
