"""The metrics' page keeps its names, types, labels and helps: dashboards and alerts are written against them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from tests.fakes.fleets import TestFleet
from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference
from tests.unit.machine.weights.conftest import new_home  # noqa: F401
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.net.member.test_engine_offers import SHAPE
from tests.unit.ways.draft.proposers import Scripted
from tests.unit.ways.pipeline.host.test_serving import Homes, nodes

from paceline.core.clock import SystemClock
from paceline.core.model import ModelRef
from paceline.core.stats import EngineStats
from paceline.machine.capability import WarmModel
from paceline.machine.speed import Speed
from paceline.server.metrics import Meter, MetricsPage
from paceline.ways.draft.service import drafting_alone
from paceline.ways.draft.sources import NodeDrafts
from paceline.ways.pipeline.host.serving import Hosting

RECORDED = Path(__file__).parents[2] / "data" / "metrics"
"""Written anew by `PACELINE_RECORD=1 pytest`: a change of it is a change that users see."""


class Busy(ScriptedInference):
    """Has something to tell of everything that is counted by a label."""

    def stats(self) -> EngineStats:
        return EngineStats(
            drafted_tokens={"ngram": 2},
            accepted_tokens={"ngram": 1},
            draft_blocks={"ngram": 1},
            kept_blocks={"read": 1},
            finished={"stop": 1},
        )


def outline(collectors: Sequence[Collector]) -> str:
    """What a page declares, family by family, with the labels that its samples have. What the process itself measures is the library's."""
    meter = Meter()
    meter.answers["/v1/models", 200] += 1
    page = MetricsPage(Busy(), meter)
    page.add(*collectors)
    lines: list[str] = []
    for family in sorted(text_string_to_metric_families(page.render().decode()), key=lambda family: family.name):
        if not family.name.startswith(("process_", "python_")):
            samples = {f"{sample.name}({','.join(sample.labels)})": None for sample in family.samples}
            lines += [f"# HELP {family.name} {family.documentation}", f"# TYPE {family.name} {family.type}", f"  {' '.join(samples)}"]
    return "\n".join([*lines, ""])


def check_recorded(name: str, told: str) -> None:
    if os.environ.get("PACELINE_RECORD"):
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / name).write_text(told)
    assert told == (RECORDED / name).read_text()


@in_loop
async def test_a_page_of_a_node_alone() -> None:
    check_recorded("alone.txt", outline(()))
    drafts = NodeDrafts("draft", SystemClock(), in_fleet=False)
    async with drafting_alone(drafts, ByteTokenizer(), ()) as metrics:
        check_recorded("alone_with_drafts.txt", outline(metrics))


@in_loop
async def test_a_page_of_a_node_in_a_fleet_with_a_pipeline_layers_for_others_and_drafts(new_home: Homes) -> None:  # noqa: F811
    async with nodes(TestFleet(), ("other", new_home("other"), None), ("node", new_home("node"), Hosting(threads=1))) as (_, node):
        drafts = NodeDrafts("draft", SystemClock(), in_fleet=True)
        speed = Speed(1.0, 1.0, "test", holds_identity=True, vocabulary="")
        warm = WarmModel(ModelRef("d" * 64, "int4", "echo"), SHAPE, 100, 1 << 20, speed)
        node.drafting.attach(drafts, warm, ByteTokenizer(), EngineStats)
        node.drafting._pool.add("draft", Scripted())  # pyright: ignore[reportPrivateUsage]
        drafts.meter.of("draft")
        drafts.meter.failures["other", "UNAVAILABLE"] += 1
        node.pipelines.open["0a1b2c3d", "echo"] = lambda: 1
        assert node.shards is not None
        node.shards.meter.latency.observe("echo:0-5", 1.0)
        for counts in (node.fleet.rpcs.answered, node.fleet.rpcs.failed, node.fleet.rpcs.open):
            counts.update(Counter(["Capability/Exchange"]))
        await until(lambda: bool(node.fleet.links))
        check_recorded("fleet.txt", outline(node.collectors))
