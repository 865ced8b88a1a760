"""Prompts leave the home network only for a model that nothing at home has had lately, also where an answer moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop
from tests.unit.ways.forward.test_routes import OTHER, OUTSIDE, OUTSIDE_OTHER, A, B, C, card, offer

from paceline.core.errors import ModelAway
from paceline.core.generation import GenerationRequest
from paceline.core.ids import RequestId
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import Eligible, Use
from paceline.ways.forward import inference as forward
from paceline.ways.forward.inference import FleetInference
from paceline.ways.forward.known import LATELY_S
from paceline.ways.forward.routes import Meaning
from paceline.ways.forward.service import LocalModels

REQUEST = GenerationRequest(RequestId("r"), (1, 2, 3), 4)


class Fleet:
    """A node's view that tests change. No other node is called."""

    def __init__(self, *cards: NodeCard) -> None:
        self.cards, self.clock = cards, FakeClock()
        meter = SimpleNamespace(retried=0, forwarded=0, served=0)
        node = SimpleNamespace(
            node_id=A,
            meter=meter,
            listen=lambda _: None,
            found_wrong=lambda *_: None,
            eligible=lambda _: Eligible(Use.ANSWER, A, self.cards),
            view=dict,
        )
        self.inference = FleetInference(cast("Any", node), LocalModels(None, (), cast("Any", meter)), cast("Any", None), self.clock)
        self.inference._closed = True  # no tokenizer is fetched
        self.inference.look_again()

    def see(self, *cards: NodeCard) -> None:
        self.cards = cards
        self.inference.look_again()

    def holders(self, nodes: forward._Nodes, *left: Any) -> list[str]:
        """Every node that a request could go to, one after the other."""
        found: list[str] = []
        while (leg := nodes.leg(REQUEST, [*left, *found], None)) is not None:
            found.append(leg.node_id)
        return found

    def started(self) -> forward._Nodes:
        return forward._Nodes(self.inference, "m", self.inference._routes.get("m"), exact=False)


@in_loop
async def test_a_request_that_found_its_model_at_home_moves_to_no_engine_outside() -> None:
    fleet = Fleet(card(B, offer(10)), card(C, OUTSIDE))
    nodes = fleet.started()
    assert fleet.holders(nodes) == ["b"]
    fleet.see(card(C, OUTSIDE))
    assert fleet.holders(nodes) == []


@in_loop
async def test_a_request_for_what_is_outside_alone_may_move_home() -> None:
    fleet = Fleet(card(B, OUTSIDE), card(C, OUTSIDE))
    nodes = fleet.started()
    assert fleet.holders(nodes) == ["b", "c"]
    fleet.see(card(B, offer(10)), card(C, OUTSIDE))
    assert fleet.holders(nodes) == ["b"]


@pytest.mark.parametrize("outside", [OUTSIDE, OUTSIDE_OTHER], ids=["the same weights", "other weights"])
@in_loop
async def test_what_was_answered_at_home_a_moment_ago_is_not_sent_outside(outside: Any) -> None:
    fleet = Fleet(card(B, offer(10)))
    fleet.see()
    fleet.see(card(C, outside))
    with pytest.raises(ModelAway):
        fleet.inference.generate("m", REQUEST)
    fleet.clock.advance(LATELY_S)
    fleet.inference.generate("m", REQUEST)
    assert fleet.holders(fleet.started()) == ["c"]


@in_loop
async def test_the_meaning_of_a_name_is_that_at_home() -> None:
    fleet = Fleet(card(A, OUTSIDE_OTHER), card(B, OUTSIDE_OTHER), card(C, offer(10)))
    route = fleet.inference._routes["m"]
    assert [stop.node_id for stop in route.stops] == ["c"]
    assert route.meaning != Meaning(OTHER.model)
