"""Holders of one name with different contexts: the largest is shown, and a prompt goes where it fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.net.member.nodes import in_loop
from tests.unit.ways.forward.test_leaving import REQUEST, Fleet
from tests.unit.ways.forward.test_routes import ONE, A, B, C, card, offer, shared

from paceline.core.errors import ContextOverflow
from paceline.core.inference import ModelFacts, ServedModel
from paceline.core.no_tokenizer import NoTokenizer
from paceline.fleet.card import ModelOffer
from paceline.ways.forward.client import Described
from paceline.ways.forward.service import LoadedModel

SMALL, LARGE, OWN = shared(context=4096), shared(context=32_768), offer(10)


def fleet_of(*offers: ModelOffer | None, described: int = 8192, local: int = 0, on_disk: bool = False) -> Fleet:
    """A view of machines A to C, seen from A.

    Args:
        described: the context that another node told last.
        local: context of the model that A itself runs; 0: none.
    """
    fleet = Fleet(*(card(node_id, one) for node_id, one in zip((A, B, C), offers, strict=False) if one is not None))
    inference = fleet.inference
    inference._described["m", ONE] = Described(LoadedModel(replace(ONE.model, name="m"), "", 0, described), NoTokenizer())
    if local:
        model = ServedModel("m", 0, local, NoTokenizer(), "fp", ModelFacts(on_disk=on_disk))
        loaded = LoadedModel(replace(ONE.model, name="m"), "", 0, local)
        inference._local.show(cast("Any", SimpleNamespace(models=lambda: [model], stats=SimpleNamespace)), [loaded], {"m"})
    inference.look_again()
    return fleet


@pytest.mark.parametrize(
    ("offers", "described", "local", "expected"),
    [
        ((None, SMALL, LARGE), 8192, 0, 32_768),
        ((None, SMALL, SMALL), 32_768, 0, 4096),
        ((None, SMALL, shared()), 8192, 0, 8192),
        ((None, OWN, SMALL), 8192, 0, 8192),
        ((None, OWN, LARGE), 8192, 0, 32_768),
        ((SMALL, LARGE), 8192, 4096, 32_768),
        ((LARGE, SMALL), 8192, 2048, 2048 * 2),
        ((SMALL,), 8192, 2048, 2048),
        ((OWN, LARGE), 8192, 8192, 32_768),
    ],
    ids=[
        "two",
        "told long ago",
        "one unknown",
        "own elsewhere",
        "own is smaller",
        "own engine",
        "own card is old",
        "own alone",
        "own kernels",
    ],
)
@in_loop
async def test_the_largest_context_is_shown(offers: tuple[ModelOffer | None, ...], described: int, local: int, expected: int) -> None:
    (model,) = fleet_of(*offers, described=described, local=local).inference.models()
    assert model.max_context == expected


@pytest.mark.parametrize(
    ("offers", "tokens", "expected"),
    [
        ((None, SMALL, LARGE), 100, ["b", "c"]),
        ((None, SMALL, LARGE), 5000, ["c"]),
        ((SMALL, LARGE), 5000, ["b"]),
        ((OWN, LARGE), 9000, ["b"]),
        ((None, OWN, SMALL), 5000, ["b"]),
    ],
)
@in_loop
async def test_a_prompt_goes_where_it_fits(offers: tuple[ModelOffer | None, ...], tokens: int, expected: list[str]) -> None:
    fleet = fleet_of(*offers, local=8192 if offers[0] is not None else 0)
    nodes, found = fleet.started(), list[str]()
    fleet.inference._stream = cast("Any", lambda *_: None)
    request = replace(REQUEST, prompt_ids=(1,) * tokens)
    while (leg := nodes.leg(request, cast("Any", found), None)) is not None:
        found.append(leg.node_id)
    assert sorted(found) == expected
    with pytest.raises(ContextOverflow, match="context"):
        fleet_of(None, SMALL).started().leg(replace(REQUEST, prompt_ids=(1,) * 4093), [], None)


@pytest.mark.parametrize(
    ("offers", "on_disk"),
    [
        ((shared(load_s=5.0), shared(load_s=0.0)), True),
        ((shared(load_s=5.0), shared()), False),
        ((None, shared(load_s=5.0)), True),
        ((None, shared(load_s=5.0), OWN), False),
    ],
)
@in_loop
async def test_a_model_is_on_disk_alone_if_no_holder_has_loaded_it(offers: tuple[ModelOffer | None, ...], on_disk: bool) -> None:
    (model,) = fleet_of(*offers, local=4096 if offers[0] is not None else 0, on_disk=True).inference.models()
    assert model.facts.on_disk == on_disk
