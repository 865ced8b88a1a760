"""Requests spread over machines by what is under way there, go where their prefix is, and not to a machine that was lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes.clock import FakeClock

from paceline.core.errors import NodeStopping, NodeUnreachable, Overloaded, PacelineError
from paceline.core.ids import NodeId
from paceline.fleet.card import EngineOffer
from paceline.node.serving import shown_at_engine, shown_load
from paceline.ways.forward.routes import MOST_PREFIXES, PREFIX_TOKENS, REMEMBERED, Prompt, RouteStop, Sharing, crowding, prefix_keys

DOOR, B, C = NodeId("a"), NodeId("b"), NodeId("c")
SHORT = Prompt((1, 2, 3))
LONG = Prompt(tuple(range(1000)))


def stop(node_id: NodeId, expected_s: float | None = 1.0) -> RouteStop:
    return RouteStop(node_id, b"1", "n", ("x:1",), expected_s)


STOPS = [stop(B), stop(C)]


class Door:
    def __init__(self) -> None:
        self.clock, self.heard, self.load = FakeClock(), dict[NodeId, float](), 0
        self.sharing = Sharing(DOOR, lambda: self.load, self.heard.get, self.clock)

    def send(self, stops: list[RouteStop] = STOPS, prompt: Prompt = SHORT) -> RouteStop:
        chosen = self.sharing.choose(stops, prompt, ())
        assert chosen is not None
        self.sharing.began(chosen.node_id, prompt)
        return chosen


def test_equal_machines_share_requests() -> None:
    door = Door()
    sent = [door.send([stop(B), stop(C, 1.2)]) for _ in range(8)]
    assert [one.node_id for one in sent].count(B) == 4
    for one in sent:
        if one.node_id == C:
            door.sharing.ended(one, None)
    assert [door.send().node_id for _ in range(4)] == [C] * 4


def test_a_slower_machine_has_its_share_once_the_faster_one_is_busy() -> None:
    door = Door()
    sent = [door.send([stop(B), stop(C, 2.0)]).node_id for _ in range(9)]
    assert sent == [B, B, B, C, B, B, C, B, B]
    assert [Door().send([stop(B, 4.0), stop(C, None)]).node_id for _ in range(1)] == [B]


def test_one_that_is_there_for_prompts_is_asked_where_the_others_are_lost() -> None:
    door, prefills = Door(), replace(stop(B, 0.1), prefills=True)
    sent = [door.send([prefills, stop(C, 4.0)]) for _ in range(4)]
    assert [one.node_id for one in sent] == [C] * 4
    door.sharing.ended(sent[0], NodeUnreachable("gone"))
    assert door.send([prefills, stop(C, 4.0)]).node_id == B


def test_what_a_card_says_counts_where_it_is_more_than_was_sent_from_here() -> None:
    door = Door()
    assert door.send([replace(STOPS[0], under_way=3), STOPS[1]]).node_id == C


def test_a_card_says_roughly_how_much_is_under_way() -> None:
    assert [shown_load(sequences) for sequences in (0, 3, 4, 15, 16, 63, 64)] == [0, 0, 4, 4, 16, 16, 64]
    assert [shown_at_engine(sequences) for sequences in (0, 1, 2, 3, 4, 7, 8, 100)] == [0, 1, 2, 2, 4, 4, 8, 64]


def at_engine(node_id: NodeId, expected_s: float | None = 1.0, load_s: float = 0.0, **engine: int) -> RouteStop:
    return replace(stop(node_id, expected_s), engine=EngineOffer("llama-server", ("ids",), **engine), load_s=load_s)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (at_engine(B, capacity=1), at_engine(C, 1.9), [B, C, B, C]),
        (at_engine(B, capacity=1), at_engine(C, 2.5), [B, B, C, B]),
        (at_engine(B, slots=1), at_engine(C, 1.9), [B, C, B, C]),
        (at_engine(B, slots=8, capacity=1), at_engine(C, 1.9), [B, C, B, C]),
        (at_engine(B, capacity=4), at_engine(C, 1.9), [B, B, C, B]),
        (at_engine(B, load_s=20.0), at_engine(C, 5.0), [C, C, C, C]),
        (at_engine(B, load_s=3.0), at_engine(C, 5.0), [B, B, B, C]),
        (at_engine(B, None, load_s=20.0), at_engine(C, None), [C] * 4),
    ],
    ids=[
        "one at once",
        "slower by more",
        "as it says",
        "measured comes first",
        "several at once",
        "a load",
        "a short load",
        "not measured",
    ],
)
def test_an_engine_that_is_full_is_a_queue_and_a_load_takes_its_time(first: RouteStop, second: RouteStop, expected: list[NodeId]) -> None:
    door = Door()
    assert [door.send([first, second]).node_id for _ in range(4)] == expected


def test_a_full_engine_never_looks_less_busy_than_one_of_unknown_capacity_that_runs_as_many() -> None:
    for at_once in range(1, 9):
        factors = [crowding(load, at_once) for load in range(40)]
        assert factors == sorted(factors)
        assert factors[0] == 1
        assert all(crowding(load, at_once) >= crowding(load, 0) for load in range(at_once + 1))


def test_a_machine_with_the_model_keeps_requests_until_it_is_busy() -> None:
    door = Door()
    stops = [stop(DOOR), stop(B)]
    assert door.send(stops).node_id == DOOR
    door.load = 5
    assert door.send(stops).node_id == B


def test_a_conversation_stays_where_its_prefix_is_unless_others_have_much_less_to_do() -> None:
    door = Door()
    first = door.send(prompt=LONG)
    door.sharing.ended(first, None)
    again = Prompt((*LONG.ids, 7, 8, 9))
    busy = [door.send([first], SHORT)]
    assert door.send(prompt=again) == first
    busy += [door.send([first], SHORT) for _ in range(4)]
    assert door.send(prompt=again) != first
    other = Prompt(tuple(reversed(LONG.ids)))
    assert door.sharing.choose(STOPS, other, ()) != first


def chosen(stops: list[RouteStop], prompt: Prompt, **held: float) -> NodeId:
    found = Door().sharing.choose(stops, prompt, (), lambda: {NodeId(name): share for name, share in held.items()})
    assert found is not None
    return found.node_id


def test_a_prompt_goes_where_most_of_its_prefix_lies_if_that_is_faster() -> None:
    quick, slow = replace(stop(B), token_s=0.001), replace(stop(C, 2.0), token_s=0.004)
    assert chosen([quick, slow], LONG) == B
    # 2 s for the prompt at B, whole, against 6 s at C: what C holds must save two thirds of it.
    assert chosen([quick, slow], LONG, c=0.7) == B
    assert chosen([quick, slow], LONG, c=0.9) == C
    assert chosen([quick, slow], LONG, b=0.5, c=0.9) == B
    assert chosen([quick, slow], SHORT, c=0.9) == B


def test_what_this_node_could_fetch_keeps_a_request_here() -> None:
    own, other = replace(stop(DOOR), token_s=0.002), replace(stop(B), token_s=0.002)
    assert chosen([own, other], LONG, b=0.9) == B
    assert chosen([own, other], LONG, a=0.88, b=0.9) == DOOR


@pytest.mark.parametrize("other", [replace(LONG, model="another"), replace(LONG, salt="another")])
def test_a_prompt_of_another_model_or_salt_is_no_prefix(other: Prompt) -> None:
    """The machine holds nothing for it, and where it goes would tell what was asked under another salt."""
    door = Door()
    first = door.send([STOPS[1]], prompt=LONG)
    door.sharing.ended(first, None)
    assert door.sharing.choose(STOPS, LONG, ()) == first
    assert door.sharing.choose(STOPS, other, ()) == STOPS[0]


@pytest.mark.parametrize("error", [NodeUnreachable("gone"), NodeStopping("stopping")])
def test_a_machine_that_was_lost_comes_last_until_it_is_heard_of(error: PacelineError) -> None:
    door = Door()
    door.heard |= {B: door.clock.monotonic(), C: door.clock.monotonic()}
    door.clock.advance(10)
    door.sharing.ended(door.send(), error)
    assert {door.send().node_id for _ in range(4)} == {C}
    assert door.sharing.choose(STOPS, SHORT, {C}) == STOPS[0], "one is better than none"
    assert door.send([replace(STOPS[0], instance=b"2"), STOPS[1]]).node_id == B, "it started anew"
    door.sharing.ended(STOPS[0], error)
    door.clock.advance(1)
    door.heard[B] = door.clock.monotonic()
    assert door.send().node_id == B


def test_a_machine_that_refuses_is_not_lost() -> None:
    door = Door()
    door.sharing.ended(door.send(), Overloaded("busy", retry_after_s=1))
    assert door.send().node_id == B


def test_none_is_chosen_where_all_were_left() -> None:
    assert Door().sharing.choose(STOPS, SHORT, {B, C}) is None
    assert Door().sharing.choose([], SHORT, ()) is None


def test_what_is_remembered_is_bounded() -> None:
    assert len(prefix_keys(Prompt(range(100 * PREFIX_TOKENS * MOST_PREFIXES)))) == MOST_PREFIXES
    assert prefix_keys(LONG) == prefix_keys(Prompt((*LONG.ids, 1)))
    door = Door()
    for salt in range(REMEMBERED // MOST_PREFIXES + 1):
        door.send(prompt=Prompt(tuple(range(salt, salt + PREFIX_TOKENS * MOST_PREFIXES))))
    assert len(door.sharing._prefixes) == REMEMBERED
