"""What a node of a fleet learns of its own models while it runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.fleet.test_engines import engine_offer
from tests.unit.machine.weights.conftest import new_home, sharded  # noqa: F401
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.test_serving import Homes, card_of, nodes

from paceline.core.ids import NodeId
from paceline.fleet.card import Device, ModelOffer, NodeCard
from paceline.machine.capability import CapabilityReport
from paceline.node import serving
from paceline.store.home import Home


@in_loop
async def test_a_model_that_comes_while_a_node_runs_is_read_and_one_that_could_not_be_is_again(
    sharded: tuple[Home, str],  # noqa: F811
    new_home: Homes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(serving, "LEARN_S", 0.01)
    giver, digest = sharded
    home = new_home("node")
    home.digests.parent.mkdir(parents=True)
    home.digests.write_text("a file, so that nothing can be kept there")
    async with nodes(TestFleet(), ("node", home, None)) as (node,):
        shutil.copytree(giver.models, home.models)
        node._portrait.look()  # pyright: ignore[reportPrivateUsage]  as once a minute
        await until(lambda: "could not keep anything" in caplog.text)
        await until(
            lambda: any("can't be computed, and without it other machines can't share the model" in what for what in node.fleet.failing)
        )
        home.digests.unlink()
        await until(lambda: digest in {offer.digest for offer in card_of(node, "node").models})
        await until(lambda: node.fleet.failing == ())


@pytest.mark.parametrize(
    ("left", "shown"),
    [(None, (8 << 30, 4 << 30)), (1 << 30, (1 << 30, 1 << 30)), (6 << 30, (6 << 30, 4 << 30)), (0, (0, 0)), (-5, (0, 0))],
)
def test_what_models_may_take_is_all_that_a_card_says_is_free(left: int | None, shown: tuple[int, int]) -> None:
    seen = NodeCard(NodeId("a"), 1, (), b"", 1, 0, memory_free_bytes=8 << 30, devices=(Device("b", "gpu", 8 << 30, 4 << 30, 0),))
    portrait = serving.Portrait(SimpleNamespace(card=lambda *_: seen), left_bytes=lambda: left)  # type: ignore[arg-type]
    card = portrait.card((), ())
    assert (card.memory_free_bytes, card.devices[0].memory_free_bytes) == shown


def test_the_memory_of_an_engine_is_neither_free_nor_paceline_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = CapabilityReport(NodeId("a"), Home(tmp_path))
    for kind in {type(device) for device in report._devices}:
        monkeypatch.setattr(kind, "free_bytes", lambda _: 7 << 30)
    offers: list[ModelOffer] = []
    portrait = serving.Portrait(report, engines=lambda: tuple(offers))
    portrait.look()
    alone = portrait.card((), ())
    offers += [engine_offer(), engine_offer(name="n")]
    portrait.look()
    shared = portrait.card((), ())
    assert [offer.model_id for offer in shared.models if offer.engine is not None] == ["m", "n"]
    assert replace(shared, models=alone.models, version=alone.version) == alone
