"""A pipeline's metrics have the names that dashboards know, and say what happened."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import EngineBench

from paceline.core.generation import GenerationRequest
from paceline.core.ids import NodeId, RequestId
from paceline.core.model import LayerRange
from paceline.ways.pipeline.executor.route import PipelineFault, RouteStage
from paceline.ways.pipeline.meter import MeteredEngine, PipelineMeter, pipeline_metrics


def page(meter: PipelineMeter) -> list[str]:
    registry = CollectorRegistry()
    registry.register(pipeline_metrics(meter, None))
    return generate_latest(registry).decode().splitlines()


def test_what_happened_to_a_pipeline_is_counted() -> None:
    meter = PipelineMeter()
    meter.constructed(0.2, failover=False)
    meter.lost(PipelineFault(NodeId("b"), "shard_unavailable", "gone"))
    meter.constructed(1.2, failover=True)
    meter.stepped(0.007)
    meter.hopped(RouteStage(NodeId("b"), LayerRange(2, 4), "m:2-3", "n", holds_identity=True), 0.002, 5)
    meter.lost(PipelineFault(NodeId("c"), "shard_unavailable", "gone"))
    meter.fell_back()
    lines = page(meter)
    assert 'paceline_pipeline_construct_ms_bucket{le="250.0",opening="first"} 1.0' in lines
    assert 'paceline_pipeline_construct_ms_sum{opening="failover"} 1200.0' in lines
    assert "paceline_pipeline_step_ms_sum 7.0" in lines
    assert 'paceline_pipeline_hop_ms_count{node="b",shard_id="m:2-3"} 5.0' in lines
    assert 'paceline_pipeline_hop_ms_sum{node="b",shard_id="m:2-3"} 10.0' in lines
    assert "paceline_pipelines_lost_total 2.0" in lines
    assert "paceline_failovers_total 1.0" in lines
    assert "paceline_fallback_to_local_total 1.0" in lines
    assert "paceline_shard_corruption_detected_total 0.0" in lines


def test_requests_are_timed_from_their_arrival_by_their_tokens() -> None:
    clock, meter, bench = FakeClock(), PipelineMeter(), EngineBench()
    engine = MeteredEngine(bench.engine, meter, clock)
    engine.add(GenerationRequest(RequestId("a"), (1, 2, 3), 5, n=2, ignore_eos=True))
    engine.add(GenerationRequest(RequestId("b"), (4, 5), 4, ignore_eos=True))
    engine.add(GenerationRequest(RequestId("c"), (4, 5, 6), 4, ignore_eos=True))
    engine.abort(RequestId("c"))
    while engine.has_work:
        clock.advance(0.5)
        engine.submit()
        engine.collect()
        engine.check_invariants()
    lines = page(meter)
    assert "paceline_first_token_ms_count 2.0" in lines, "one a request, none for who went away before"
    assert 'paceline_first_token_ms_bucket{le="400.0"} 0.0' in lines
    assert "paceline_tokens_per_second_count 2.0" in lines
    total = next(float(line.split()[1]) for line in lines if line.startswith("paceline_tokens_per_second_sum"))
    assert 2.0 < total <= 2.0 + 2 * 2.25, "two choices of four more tokens every half second, and one of three"


def test_an_answer_that_goes_on_with_some_of_its_sequences_is_forgotten_at_its_end() -> None:
    bench = EngineBench()
    engine = MeteredEngine(bench.engine, PipelineMeter(), FakeClock())
    engine.add(GenerationRequest(RequestId("a"), (1, 2, 3), 5, n=2, ignore_eos=True, so_far={1: (4,)}))
    while engine.has_work:
        engine.submit()
        engine.collect()
    assert not engine._timed
