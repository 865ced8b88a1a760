"""What a person allows of pipelines, and what `paceline up` does where a model does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from tests.unit.ways.pipeline.routes.test_choosing import CARDS, PINNED

from paceline.core.clock import SystemClock
from paceline.core.errors import PipelineDisabled, ShardUnavailable
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes.build import PipelineSlots, build_engine_over
from paceline.ways.pipeline.routes.fleet_access import choose


def test_no_more_pipelines_begin_here_than_are_allowed_at_once() -> None:
    slots = PipelineSlots()
    give_back, _ = slots.take(2), slots.take(2)
    with pytest.raises(ShardUnavailable, match="2 pipelines") as refused:
        slots.take(2)
    assert "max_concurrent_pipelines" in refused.value.hint
    give_back()
    give_back()
    assert slots.taken == 1
    slots.take(2)


def test_no_more_shards_are_taken_than_a_request_may_use() -> None:
    assert len(choose(CARDS, {}, PINNED, frozenset())) == 2
    with pytest.raises(ShardUnavailable, match="may use 1") as refused:
        choose(CARDS, {}, replace(PINNED, request=replace(PINNED.request, max_shards=1)), frozenset())
    assert refused.value.code == "shard_unavailable"


def test_where_pipelines_are_switched_off_none_is_built() -> None:
    nobody = cast("Any", None)
    with pytest.raises(PipelineDisabled) as refused:
        build_engine_over(NodeSettings("m"), PipelineOrder(PipelineSettings(enabled=False)), nobody, nobody, nobody, SystemClock())
    assert refused.value.code == "pipeline_disabled"


def test_the_command_line_comes_before_the_file() -> None:
    file = PipelineSettings(enabled=True, fallback_to_local=True)
    assert file.overridden() == file
    said = file.overridden(enabled=False, fallback_to_local=False)
    assert (said.enabled, said.fallback_to_local) == (False, False)
    assert PipelineSettings().overridden(fallback_to_local=True).fallback_to_local
