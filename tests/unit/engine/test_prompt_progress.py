"""How far an engine says that prompts are read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import EngineBench
from tests.unit.engine.test_engine import request

from paceline.core.generation import PROMPT_PROGRESS, Notice, PromptReading
from paceline.core.ids import RequestId


def steps_of(bench: EngineBench, step_s: float, n: int = 40) -> tuple[list[int], list[tuple[int, int]]]:
    """Take steps of that length: what notices said was read, and what the stats said before each step."""
    read, totals = list[int](), list[tuple[int, int]]()
    for _ in range(n):
        if not bench.engine.has_work:
            break
        stats = bench.engine.stats()
        totals.append((stats.reading_tokens_read, stats.reading_tokens))
        bench.clock.advance(step_s)
        told = [PromptReading.of_notice(notice) for chunk in bench.step() for notice in chunk.notices]
        read += [reading.tokens_read for reading in told if reading is not None]
    stats = bench.engine.stats()
    assert (stats.reading_tokens_read, stats.reading_tokens) == (0, 0)
    return read, totals


@pytest.mark.parametrize(
    ("step_s", "fields", "read"),
    [
        (1.0, {}, [16, 32]),  # every 2 s
        (9.0, {}, [8, 16, 24, 32]),  # steps longer than that: after each
        (0.1, {}, []),  # quick enough
        (9.0, {"n": 3}, [8, 16, 24, 32]),  # once, for all sequences
        (9.0, {"max_tokens": 0, "scores_prompt": True}, [8, 16, 24, 32]),
    ],
)
def test_a_prompt_that_takes_long_says_how_far_it_is(step_s: float, fields: dict[str, Any], read: list[int]) -> None:
    bench = EngineBench(clock=FakeClock(), n_blocks=64)
    bench.add(request(n_prompt=40, **{"max_tokens": 2, **fields}))
    said, totals = steps_of(bench, step_s)
    assert said == read
    assert [each for each in totals if each[1]] == [(each, 40) for each in (8, 16, 24, 32)]


def test_only_what_is_read_of_a_prompt_in_the_cache_counts_from_there() -> None:
    bench = EngineBench(clock=FakeClock())
    bench.run(request("first", n_prompt=40, max_tokens=1))
    bench.add(request("second", n_prompt=40, max_tokens=1))
    said, _ = steps_of(bench, 9.0)
    assert said in ([], [36])


def test_a_request_that_was_left_is_read_no_more() -> None:
    bench = EngineBench(clock=FakeClock())
    bench.add(request(n_prompt=40))
    bench.step()
    bench.engine.abort(RequestId("r"))
    assert steps_of(bench, 9.0)[0] == []


@pytest.mark.parametrize(
    "detail", [{}, {"tokens": 8}, {"tokens_read": 9, "tokens": 8}, {"tokens_read": -1, "tokens": 8}, {"tokens_read": "1", "tokens": 8}]
)
def test_a_notice_of_another_node_may_be_wrong(detail: dict[str, str | int | float]) -> None:
    assert PromptReading.of_notice(Notice(PROMPT_PROGRESS, detail)) is None
    assert PromptReading.of_comment(PromptReading(3, 8).comment().decode().strip()) == PromptReading(3, 8)
