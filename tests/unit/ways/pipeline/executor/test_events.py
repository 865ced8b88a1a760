"""What the log says of a pipeline names it."""

from __future__ import annotations

import pytest
from tests.fakes.clock import FakeClock

from paceline.core.ids import NodeId
from paceline.ways.pipeline.executor.events import PipelineWatch, RouteEvents
from paceline.ways.pipeline.executor.route import PipelineFault


def test_two_pipelines_in_one_log_can_be_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    one, other = (RouteEvents("2 to 5", PipelineWatch(), FakeClock()) for _ in range(2))
    for events in (one, other):
        events.lost(PipelineFault(NodeId("b"), "shard_unavailable", "gone"))
        events.restored()
    assert one.pipeline_id != other.pipeline_id
    for events in (one, other):
        assert sum(f"pipeline {events.pipeline_id}" in message for message in caplog.messages) == 2


def test_a_node_that_broke_a_pipeline_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    events = RouteEvents("2 to 5", PipelineWatch(), FakeClock())
    events.lost(PipelineFault(NodeId("b"), "shard_unavailable", "b can't be reached (the connection broke off)"))
    assert caplog.messages == [f"pipeline {events.pipeline_id} broke: b can't be reached (the connection broke off)"]
