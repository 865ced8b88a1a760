"""Matching of the two sides of a router's request: either first, by exact id before base id, only where the blocks are the prompt's, and never for longer than
they may wait. Time is an argument.
"""

from __future__ import annotations

from itertools import permutations
from math import inf

import pytest

from paceline.core.ids import NodeId
from paceline.ways.kv.lease import LEASE_S
from paceline.ways.kv.legs import MATCH_S, MOST_PROMPTS, AwaitedPrompt, LegEnd, LegTables, base_request_id

D, E = NodeId("d"), NodeId("e")
KEYS = tuple(bytes([place]) * 16 for place in range(6))
P_ID, D_ID = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"


@pytest.mark.parametrize(
    ("request_id", "base"),
    [
        ("chatcmpl-7f1c-0123abcd", "chatcmpl-7f1c"),
        ("cmpl-7f1c-3-0123abcd", "cmpl-7f1c-3"),
        ("cmpl-7f1c-3", "cmpl-7f1c-3"),
        ("cmpl-7f1c-3-0123ABCD", "cmpl-7f1c-3-0123ABCD"),
        ("cmpl-7f1c-3-0123abc", "cmpl-7f1c-3-0123abc"),
        ("cmpl-deadbeef-0123abcd", "cmpl-deadbeef"),
        ("-0123abcd", ""),
        ("0123abcd", "0123abcd"),
    ],
)
def test_what_an_engine_put_behind_an_id_is_left_out_and_the_prompts_place_is_not(request_id: str, base: str) -> None:
    assert base_request_id(request_id) == base


@pytest.mark.parametrize("first", ["prompt", "registration"])
@pytest.mark.parametrize("wanted", [KEYS, KEYS[2:], KEYS[-1:]])
@pytest.mark.parametrize(("asked", "had"), [(D_ID, P_ID), (P_ID, P_ID), ("cmpl-x-0", P_ID), (D_ID, "cmpl-x-0"), ("cmpl-x-0", "cmpl-x-0")])
def test_either_may_come_first(first: str, wanted: tuple[bytes, ...], asked: str, had: str) -> None:
    tables = LegTables()
    if first == "prompt":
        prompt, named = tables.begin(had, KEYS)
        one = tables.register(D, asked, wanted, 0.0)
        assert not named
    else:
        one = tables.register(D, asked, wanted, 0.0)
        assert not one.is_over
        prompt, named = tables.begin(had, KEYS)
        assert list(named) == [one]
    assert (one.is_over, one.prompt, prompt.takers, tables.awaited) == (True, prompt, 1, [])
    tables.computed(prompt, 1.0)
    tables.leave(one, has_all=True)
    assert (prompt.ended, tables.prompts, tables.next_s()) == (LegEnd.TAKEN, {}, inf)


def test_an_exact_id_comes_before_a_base_id() -> None:
    tables = LegTables()
    tables.begin("cmpl-x-0-aaaaaaaa", KEYS)
    exact, _ = tables.begin("cmpl-x-0-cccccccc", KEYS)
    assert tables.register(D, "cmpl-x-0-cccccccc", KEYS, 0.0).prompt is exact
    tables = LegTables()
    other, same = tables.register(D, "cmpl-x-0-bbbbbbbb", KEYS, 0.0), tables.register(E, "cmpl-x-0-cccccccc", KEYS, 0.0)
    exact, named = tables.begin("cmpl-x-0-cccccccc", KEYS)
    assert (list(named), same.prompt, other.is_over) == ([same], exact, False)


def test_prompts_of_one_request_are_told_apart_by_their_place() -> None:
    tables = LegTables()
    prompts = [tables.begin(f"cmpl-x-{place}-{place:08x}", KEYS)[0] for place in range(3)]
    found = [tables.register(D, f"cmpl-x-{place}-{place + 99:08x}", KEYS, 0.0).prompt for place in (2, 0, 1)]
    assert found == [prompts[2], prompts[0], prompts[1]]
    assert not tables.register(D, "cmpl-x-3-0000abcd", KEYS, 0.0).is_over


def test_a_name_with_another_prompt_is_no_match_and_is_not_waited_for() -> None:
    other = tuple(key[::-1] + b"x" for key in KEYS)
    for wanted in (other, KEYS[:3], (*other, *KEYS)):
        tables = LegTables()
        tables.begin(P_ID, KEYS)
        one = tables.register(D, D_ID, wanted, 0.0)
        assert (one.is_over, one.prompt) == (True, None)
        tables = LegTables()
        one = tables.register(D, D_ID, wanted, 0.0)
        prompt, _ = tables.begin(P_ID, KEYS)
        assert (one.is_over, one.prompt, prompt.takers) == (True, None, 0)
    # Of several of that base, the one whose prompt it is.
    tables = LegTables()
    tables.begin("cmpl-x-0-aaaaaaaa", other)
    right, _ = tables.begin("cmpl-x-0-cccccccc", KEYS)
    assert tables.register(D, D_ID, KEYS, 0.0).prompt is right


def test_one_that_waits_for_the_other_waits_so_long_and_no_longer() -> None:
    tables = LegTables()
    one = tables.register(D, D_ID, KEYS, 5.0)
    assert tables.next_s() == 5.0 + MATCH_S
    assert tables.expire(4.9 + MATCH_S) == ([], [])
    assert tables.expire(5.0 + MATCH_S) == ([], [one])
    assert (one.is_over, one.prompt) == (True, None)
    prompt, named = tables.begin(P_ID, KEYS)
    assert (list(named), tables.next_s(), tables.expire(1e9)) == ([], inf, ([], [])), "while it is computed its request bounds it"
    tables.computed(prompt, 100.0)
    assert tables.next_s() == 100.0 + LEASE_S
    assert tables.expire(99.0 + LEASE_S) == ([], [])
    assert tables.expire(100.0 + LEASE_S) == ([prompt], [])
    assert (prompt.ended, tables.prompts) == (LegEnd.EXPIRED, {})


def test_a_lease_does_not_end_under_a_node_that_takes_the_blocks() -> None:
    tables = LegTables()
    prompt, _ = tables.begin(P_ID, KEYS)
    one, two = tables.register(D, D_ID, KEYS, 0.0), tables.register(E, "cmpl-x-0-cccccccc", KEYS, 0.0)
    tables.computed(prompt, 0.0)
    assert (tables.expire(10 * LEASE_S), tables.next_s()) == (([], []), inf)
    tables.leave(one, has_all=False)
    assert tables.expire(10 * LEASE_S) == ([], [])
    tables.leave(two, has_all=False)
    assert tables.expire(10 * LEASE_S) == ([prompt], []), "what was not taken is held as long as its lease says"


def test_another_may_take_what_one_did_not_get() -> None:
    tables = LegTables()
    prompt, _ = tables.begin(P_ID, KEYS)
    tables.leave(tables.register(D, D_ID, KEYS, 0.0), has_all=False)
    assert tables.register(D, "cmpl-x-0-cccccccc", KEYS, 1.0).prompt is prompt


def test_a_prompt_that_is_over_is_over_once_and_so_is_one_who_waits() -> None:
    tables = LegTables()
    prompt, _ = tables.begin(P_ID, KEYS)
    one = tables.register(D, D_ID, KEYS, 0.0)
    tables.end(prompt, LegEnd.LEFT)
    tables.leave(one, has_all=True)
    assert (prompt.ended, tables.prompts) == (LegEnd.LEFT, {})
    waits = tables.register(D, "cmpl-y-0-bbbbbbbb", KEYS, 0.0)
    tables.leave(waits, has_all=False)
    assert tables.awaited == []
    prompt, named = tables.begin("cmpl-y-0-aaaaaaaa", KEYS)
    assert (list(named), prompt.takers) == ([], 0)


def test_prompts_are_bounded_and_the_oldest_makes_way() -> None:
    tables = LegTables()
    made = [tables.begin(f"cmpl-{number}-0-aaaaaaaa", KEYS)[0] for number in range(MOST_PROMPTS + 3)]
    assert [one.ended for one in made[:4]] == [LegEnd.EVICTED] * 3 + [None]
    assert len(tables.prompts) == MOST_PROMPTS
    again, _ = tables.begin("cmpl-9-0-aaaaaaaa", KEYS)
    assert (made[9].ended, tables.prompts["cmpl-9-0-aaaaaaaa"]) == (LegEnd.EVICTED, again)


def test_a_prompt_that_a_node_takes_makes_way_last() -> None:
    tables = LegTables()
    made = [tables.begin(f"cmpl-{number}-0-aaaaaaaa", KEYS)[0] for number in range(MOST_PROMPTS)]
    for number in (0, 1):
        tables.register(D, f"cmpl-{number}-0-bbbbbbbb", KEYS, 0.0)
    tables.begin("cmpl-x-0-aaaaaaaa", KEYS)
    assert [one.ended for one in made[:4]] == [None, None, LegEnd.EVICTED, None]
    for number in range(3, MOST_PROMPTS):
        tables.register(D, f"cmpl-{number}-0-bbbbbbbb", KEYS, 0.0)
    tables.register(D, "cmpl-x-0-bbbbbbbb", KEYS, 0.0)
    tables.begin("cmpl-y-0-aaaaaaaa", KEYS)
    assert [one.ended for one in made[:4]] == [LegEnd.EVICTED, None, LegEnd.EVICTED, None]


def test_in_whatever_order_things_happen_nothing_stays() -> None:
    """All orders of a prompt's begin, end and lease, and of two registrations' begin and end."""
    for order in permutations(range(5)):
        tables, now = LegTables(), 0.0
        prompt = None
        ones: list[AwaitedPrompt] = []
        for event in order:
            now += 1.0
            match event:
                case 0:
                    prompt, _ = tables.begin(P_ID, KEYS)
                case 1 if prompt is not None:
                    tables.computed(prompt, now)
                case 2 | 3:
                    ones.append(tables.register(D, f"cmpl-x-0-{event:08x}", KEYS, now))
                case _:
                    for one in ones:
                        tables.leave(one, has_all=False)
                    ones.clear()
        for one in ones:
            tables.leave(one, has_all=False)
        if prompt is not None and not prompt.is_computed:
            tables.end(prompt, LegEnd.LEFT)
        tables.expire(now + 2 * LEASE_S)
        assert (tables.prompts, tables.awaited, tables.next_s()) == ({}, [], inf)
        assert prompt is not None
        assert prompt.takers == 0
