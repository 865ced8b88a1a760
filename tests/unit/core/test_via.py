"""Requests carry the nodes that they went through, and none goes through one node twice or through more than four."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidRequest, RequestLoop
from paceline.core.via import MARK, MOST_NODES, leads_back, listed_via, new_mark, outside, read_via, through, write_via

A, B, C, D, E = (f"{name}~{place:016x}" for place, name in enumerate(("a", "b", "c", "", "e")))


def test_a_way_grows_to_four_nodes_and_no_further() -> None:
    via: tuple[str, ...] = ()
    for mark in (A, B, C, D):
        via = through(via, mark)
    assert via == (A, B, C, D)
    assert len(via) == MOST_NODES
    with pytest.raises(RequestLoop):
        through(via, E)


@pytest.mark.parametrize("via", [(A,), (A, B), (B, A), (B, A, C), outside((A, B))])
def test_a_second_pass_is_refused_and_the_loop_named(via: tuple[str, ...]) -> None:
    with pytest.raises(RequestLoop) as refused:
        through(via, A)
    assert refused.value.message.endswith(f" -> {A}")


@pytest.mark.parametrize("via", [(), (A,), (B, C), (B, A, C), outside((B, A)), (B, C, D), (B, C, D, E)])
def test_a_model_leads_back_if_a_request_for_it_would_be_refused(via: tuple[str, ...]) -> None:
    refuses = False
    asked: tuple[str, ...] = ()
    for mark in (A, *via):
        try:
            asked = through(asked, mark)
        except RequestLoop:
            refuses = True
    assert leads_back(via, A) == refuses


@pytest.mark.parametrize(
    ("entry", "found"),
    [([A, outside((B,))[0]], (A, *outside((B,)))), (None, ()), ("a", ()), ([1, None, "x y", A], (A,)), ([A] * 99, (A,) * (MOST_NODES + 1))],
)
def test_the_way_in_a_list_of_models_is_read_from_any_server(entry: object, found: tuple[str, ...]) -> None:
    assert listed_via(entry) == found


def test_nodes_of_two_fleets_may_have_one_name() -> None:
    assert through((new_mark("desk"),), new_mark("desk"))


@given(st.lists(st.text(max_size=80).map(new_mark), max_size=MOST_NODES))
def test_a_header_is_read_as_it_was_written(marks: list[str]) -> None:
    assert read_via(write_via(tuple(marks))) == tuple(marks)
    assert all(MARK.fullmatch(mark) for mark in (*marks, *outside(tuple(marks))))
    assert not any("~" in mark for mark in outside(tuple(marks)))


@pytest.mark.parametrize("text", ["x", "a b", f"{A},,{B}", f"{A};{B}", "\x1b", "~" + "0" * 16, ", ".join([A] * 40), "0" * 17])
def test_other_headers_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_via(text)
