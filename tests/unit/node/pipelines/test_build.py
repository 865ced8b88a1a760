"""Layers that no machine could ever run are refused before any is looked for."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.plan import Pin
from paceline.node.pipeline_settings import PipelineSettings
from paceline.node.pipelines.build import PipelineOrder, check_layers

BEE = NodeId("bee")


def order(own_layers: int | None, *spans: LayerRange | None) -> PipelineOrder:
    return PipelineOrder(PipelineSettings(), tuple(Pin(BEE, span) for span in spans), own_layers)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (order(30), "--own-layers 30 leaves none"),
        (order(99), "--own-layers 99 leaves none"),
        (order(None, LayerRange(5, 41)), "bee layers 5 to 40, and m has 30"),
        (order(None, LayerRange(30, 31)), "bee layers 30 to 30"),
    ],
)
def test_layers_that_are_not_there(asked: PipelineOrder, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_layers(asked, "m", 30)


@pytest.mark.parametrize("asked", [order(None), order(0), order(29), order(None, None), order(1, LayerRange(1, 30))])
def test_layers_that_are(asked: PipelineOrder) -> None:
    check_layers(asked, "m", 30)
