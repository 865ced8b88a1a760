"""A pipeline of two real nodes, one of them killed for good: the other goes on alone where it may, with the same bytes."""

from __future__ import annotations

import pytest

from paceline.cli.membership import fleet_settings
from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError
from paceline.core.ids import NodeId
from paceline.fleet.plan import Pin
from paceline.node.bench_node import BenchNode
from paceline.node.fault_bench import answer, requests
from paceline.node.local_fleet import LocalFleet
from paceline.node.pipeline_settings import PipelineSettings
from paceline.node.pipelines.build import PipelineOrder
from paceline.node.settings import DEFAULT_MODEL, NodeSettings
from paceline.store.home import Home

PROMPTS = [tuple(range(10 + 7 * n, 60 + 9 * n)) for n in range(3)]


@pytest.mark.parametrize("allowed", [True, False])
def test_the_last_machine_that_is_left_goes_on_alone(monkeypatch: pytest.MonkeyPatch, *, allowed: bool) -> None:
    fleet, clock = LocalFleet(2, 1), SystemClock()
    monkeypatch.setenv("PACELINE_HOME", str(fleet.homes["local-1"]))
    node = None
    try:
        node = BenchNode(fleet_settings(fleet.port, fleet.host, (), fleet.preset, mdns=False, needed=True), Home.from_environment(), clock)
        node.wait_for(["local-2"])
        pipelines = PipelineSettings(enabled=True, search_seconds=6)
        if allowed:
            pipelines = PipelineSettings(enabled=True, fallback_to_local=True, fallback_to_local_after_failures=1)
        order = PipelineOrder(pipelines, (Pin(NodeId("local-1")), Pin(NodeId("local-2"))), 12)
        built = node.build(NodeSettings(DEFAULT_MODEL, context=512, kv_tokens=4096, threads=1), order)
        try:
            asked = requests(PROMPTS, 24)
            right = answer(built.engine, asked, clock).tokens
            if not allowed:
                with pytest.raises(PacelineError):
                    answer(built.engine, asked, clock, 8, lambda: fleet.kill("local-2"))
                return
            seen = answer(built.engine, asked, clock, 8, lambda: fleet.kill("local-2"))
            assert seen.replayed
            assert seen.tokens == right
            assert [(stage.node_id, stage.layers.start) for stage in built.executor.stages] == [("local-1", 12)]
            built.engine.check_invariants()
        finally:
            built.executor.close()
    finally:
        if node is not None:
            node.close()
        fleet.close()
