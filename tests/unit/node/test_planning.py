from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.seeded_models import write_gguf

from paceline.core.errors import ConfigError, ModelFileError, ModelNotFound, PlacementError, UnsupportedModel
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, ModelSpec, RopeSpec
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.plan import ALONE, Pin, PlanRequest, Way
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.node import planning
from paceline.node.ways import explained, parse_pin, plan_request
from paceline.ways.draft.price import DRAFT
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.splits import PIPELINE
from paceline.ways.tensor.price import TENSOR

SHAPE = ModelShape(24, 2048, 100 << 20, 300 << 20, 2048, 32768)
OFFER = ModelOffer("m", Role.VERIFIER, "int4", 20.0, 200.0, "d" * 64, shape=SHAPE)


def card(name: str, free: int, *links: Link) -> NodeCard:
    return NodeCard(
        NodeId(name), 1, (), b"\x01", 1, 0, memory_free_bytes=free << 30, memory_total_bytes=16 << 30, models=(OFFER,), links=links
    )


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("desk", Pin(NodeId("desk"))),
        ("desk:0-15", Pin(NodeId("desk"), LayerRange(0, 16))),
        ("a:b:3-3", Pin(NodeId("a:b"), LayerRange(3, 4))),
    ],
)
def test_a_pin(text: str, pin: Pin) -> None:
    assert parse_pin(text) == pin


@pytest.mark.parametrize(
    "text", ["", ":", "desk:", "desk:1", "desk:-", "desk:1-", "desk:-1-2", "desk:a-b", ":1-2", "desk:²-³", "desk:1-" + "9" * 5000]
)
def test_no_pin(text: str) -> None:
    with pytest.raises(ConfigError, match="is no machine"):
        parse_pin(text)


def test_this_machine_is_a_fleet_of_one() -> None:
    made = explained(PlanRequest("SmolLM2"))
    assert made.plan.chosen.model_id == "smollm2-135m"
    assert made.plan.chosen.way == ALONE
    assert any("this machine is alone" in line for line in made.lines)


def test_a_pipeline_takes_others() -> None:
    with pytest.raises(PlacementError) as caught:
        explained(PlanRequest("SmolLM2", ways=frozenset({PIPELINE})))
    assert "paceline join" in caught.value.hint


def test_a_path_is_a_name(bundled_gguf: Path, tmp_path: Path) -> None:
    assert explained(PlanRequest(str(bundled_gguf))).plan.chosen.model_id == "smollm2-135m"
    (tmp_path / "copy.gguf").symlink_to(bundled_gguf)
    assert explained(PlanRequest(str(tmp_path / "copy.gguf"))).plan.chosen.model_id == "copy"


def test_what_cannot_run_on_the_machine_that_has_it_is_not_said_to_be_missing(tmp_path: Path) -> None:
    spec = ModelSpec(
        model_type="qwen3", n_layers=1, hidden=72, n_heads=2, n_kv_heads=1, head_dim=32, ffn=96, vocab=512, max_context=1024, rms_eps=1e-5,
        rope=RopeSpec(10_000.0), tied_head=True, qk_norm=True,
    )  # fmt: skip
    path = write_gguf(tmp_path / "odd.gguf", spec, "BF16")
    for view in (None, lambda: [card("ant", 8)]):
        with pytest.raises(UnsupportedModel, match="hidden is not a multiple of 32"):
            explained(PlanRequest(str(path)), view)


def test_what_is_no_model_is_said_to_be_none_of_it_and_not_of_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# Words")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    for view in (None, lambda: [card("ant", 8)]):
        with pytest.raises(ModelNotFound, match=r"no file or folder '/.*/gone\.gguf'"):
            explained(PlanRequest(str(tmp_path / "gone.gguf")), view)
        with pytest.raises(ModelFileError, match=r"README\.md is no model: it is not a GGUF file") as refused:
            explained(PlanRequest("README.md"), view)
        assert "folder with safetensors" in refused.value.hint
        with pytest.raises(ModelFileError, match=r"cut\.gguf is not a usable model file"):
            explained(PlanRequest("cut.gguf"), view)
        with pytest.raises(PlacementError, match="No machine that is seen here has the model 'org/nobody'") as missing:
            explained(PlanRequest("org/nobody"), view)
        assert "`paceline pull org/name`" in missing.value.hint
    (tmp_path / "m").write_text("a file that has the name of a model of the fleet")
    assert explained(PlanRequest("m"), lambda: [card("ant", 8)]).plan.chosen.model_id == "m"


def test_drafts_are_run() -> None:
    fleet = [card("ant", 2, Link(NodeId("bee"), "x:1", 0.001, 1e8)), card("bee", 2)]
    small = replace(fleet[0].models[0], model_id="small", role=Role.PROPOSER, tokens_per_second=1000.0, vocabulary="v")
    fleet = [replace(one, models=tuple(replace(offer, vocabulary="v") for offer in one.models)) for one in fleet]
    fleet = [replace(one, memory_free_bytes=1 << 40, models=(*one.models, small)) for one in fleet]
    made = explained(PlanRequest("m", ways=frozenset({DRAFT})), lambda: fleet)
    assert made.plan.chosen.way == DRAFT
    assert not any("does not run" in line for line in made.lines)


def test_a_live_view_is_planned_over() -> None:
    fleet = [card("ant", 2, Link(NodeId("bee"), "x:1", 0.001, 1e8)), card("bee", 2)]
    made = explained(PlanRequest("m"), lambda: fleet)
    assert made.plan.chosen.way == PIPELINE
    assert not any("alone" in line for line in made.lines if line.startswith("note: this machine"))
    said = json.loads(json.dumps(made.as_json()))
    assert said["chosen"]["stages"][0]["instance"] == "01"
    assert said["request"]["ways"] == ["alone", "draft", "pipeline", "tensor"]
    assert said["explanation"] == list(made.lines)


@pytest.mark.parametrize(
    ("ways", "enabled", "expected"),
    [
        (None, True, {"alone", "draft", "pipeline", "tensor"}),
        (None, False, {"alone", "draft"}),
        ({"alone", "pipeline"}, False, {"alone"}),
        ({"pipeline"}, True, {"pipeline"}),
        ({"pipeline", "tensor"}, False, None),
    ],
)
def test_every_plan_keeps_to_the_settings_file(ways: set[str] | None, enabled: bool, expected: set[str] | None) -> None:
    asked = None if ways is None else frozenset(map(Way, ways))
    settings = PipelineSettings(enabled=enabled, min_host_trust=Trust.TRUSTED, max_shards_per_request=3)
    if expected is None:
        with pytest.raises(ConfigError, match=r"config\.toml"):
            plan_request(PipelineOrder(settings), "m", lengths=(9, 9), ways=asked)
        return
    for own in (None, NodeId("a")):
        made = plan_request(PipelineOrder(settings, exact=True), "m", own=own, lengths=(9, 9), ways=asked)
        assert made.ways == expected
        assert (made.min_host_trust, made.exact, made.max_shards) == (Trust.TRUSTED, True, 3)


class Access:
    """A node that sees these cards."""

    node_id = NodeId("ant")

    def __init__(self, *cards: NodeCard) -> None:
        self._cards = cards

    def cards(self) -> tuple[NodeCard, ...]:
        return self._cards

    def trust(self) -> dict[NodeId, Trust]:
        return {}


@pytest.mark.parametrize(
    ("tensor_on", "pins"),
    [
        ((None, NodeId("bee")), {"bee"}),
        ((None, NodeId("bee"), NodeId("cat")), {"bee", "cat"}),
        ((), None),
        ((None, None), None),  # ranks of this machine alone
        ((None, None, NodeId("bee")), None),
    ],
)
def test_ranks_that_were_named_are_a_constraint_of_every_plan(
    tensor_on: tuple[NodeId | None, ...], pins: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PlanRequest] = []
    monkeypatch.setattr(planning, "plan", lambda cards, request, trust: seen.append(request))
    asked = planning.Constraints(frozenset({ALONE}), PipelineOrder(PipelineSettings(enabled=False)))
    planning.plan_here(Access(card("ant", 2)), "m", NodeSettings("m", tensor_on=tensor_on), asked)  # type: ignore[arg-type]
    (made,) = seen
    assert made.orchestrator == "ant"
    if pins is None:
        assert (made.ways, made.pins) == ({ALONE}, ())
    else:
        assert (made.ways, {pin.node_id for pin in made.pins}, made.proposer) == ({TENSOR}, pins, None)


@pytest.mark.parametrize(("role", "asker", "answers"), [("prefill", None, False), ("prefill", "bee", True), ("verifier", None, True)])
def test_a_machine_that_reads_prompts_alone_is_planned_to_answer_by_none_of_its_copies(role: str, asker: str | None, answers: bool) -> None:
    bee = card("bee", 12)
    bee = replace(bee, models=(replace(OFFER, role=Role(role), weights="bf16", warm=True), OFFER))
    own = None if asker is None else NodeId(asker)
    made = explained(PlanRequest("m", ways=frozenset({ALONE}), orchestrator=own), lambda: [card("ant", 12), bee])
    chosen = [made.plan.chosen, *made.plan.runners_up]
    assert ("bee" in {choice.stages[0].node_id for choice in chosen}) == answers
