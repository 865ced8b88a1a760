from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.clock import FakeClock

from paceline.server.responses.conversation import PLACE, Kept, KeptBounds, KeptItem, KeptResponses, keep_item
from paceline.server.responses.requests import AnyItem, CallItem, MessageItem


def said(text: str) -> KeptItem:
    return keep_item(MessageItem(role="user", content=text))


def response(name: str, before: Kept | None = None, text: str = "hi") -> Kept:
    return Kept(name, name.encode(), before.items if before else [], [said(text)], [said(text)])


def test_what_conversations_share_is_counted_once() -> None:
    kept = KeptResponses(KeptBounds(10, 1 << 20, 60.0), FakeClock())
    first = response("a")
    kept.put(first)
    alone = kept.size
    second = response("b", first)
    kept.put(second)
    assert kept.size == 2 * alone + 2 * PLACE  # the first's items have a place in the second's conversation
    assert kept.delete("a")
    assert kept.find("a") is None
    assert kept.size == 2 * alone + 2 * PLACE - first.own_size
    assert kept.item(first.input[0].id) is first.input[0]
    assert kept.delete("b")
    assert not kept.delete("b")
    assert kept.item(first.input[0].id) is None
    assert (kept.size, len(kept)) == (0, 0)


def test_what_was_used_least_recently_goes_first() -> None:
    kept = KeptResponses(KeptBounds(2, 1 << 20, 60.0), FakeClock())
    kept.put(response("a"))
    kept.put(response("b"))
    assert kept.find("a") is not None
    kept.put(response("c"))
    assert [name for name in "abc" if kept.find(name)] == ["a", "c"]


def test_age_counts_from_the_last_use() -> None:
    clock = FakeClock()
    kept = KeptResponses(KeptBounds(10, 1 << 20, 60.0), clock)
    kept.put(response("a"))
    kept.put(response("b"))
    clock.advance(40)
    assert kept.find("a") is not None
    clock.advance(40)
    assert kept.find("b") is None
    assert kept.find("a") is not None
    clock.advance(60)
    assert kept.find("a") is None
    assert kept.size == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), max_size=40))
def test_no_more_is_held_than_the_bounds_say(turns: list[tuple[int, int]]) -> None:
    kept = KeptResponses(KeptBounds(5, 20_000, 60.0), FakeClock())
    names: list[str] = []
    for number, (back, length) in enumerate(turns):
        before = kept.find(names[-back]) if 0 < back <= len(names) else None
        names.append(str(number))
        kept.put(response(names[-1], before, "x" * length))
        assert len(kept) <= 5
        assert kept.size <= 20_000
    for name in names:
        kept.delete(name)
    assert kept.size == 0


@pytest.mark.parametrize(("responses", "items", "letters"), [(1000, 1, 10), (100, 40, 0), (20, 1, 20_000)])
def test_what_is_counted_is_what_is_held(responses: int, items: int, letters: int) -> None:
    kept = KeptResponses(KeptBounds(10_000, 1 << 30, 60.0), FakeClock())
    tracemalloc.start()
    try:
        before: list[KeptItem] = []
        for number in range(responses):
            given = [said(f"{number} {place}" + "x" * letters) for place in range(items)]
            kept.put(Kept(f"r{number}", bytes(200), before[-2000:], given, [said("yes")]))
            before = [*before, *given]
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * held < kept.size


WIDE = "\N{GRINNING FACE}" + "x" * 20_000  # four bytes a letter in memory, one in JSON
TEXTS = [{"type": "input_text", "text": f"{place} and more"} for place in range(500)]


@pytest.mark.parametrize(
    "item",
    [
        MessageItem(role="user", content=WIDE),
        MessageItem.model_validate(
            {"role": "user", "content": [{"type": "input_text", "text": WIDE}, {"type": "input_text", "text": "x"}]}
        ),
        MessageItem.model_validate({"role": "user", "content": TEXTS}),
        CallItem(type="function_call", call_id="a", name="f", arguments=WIDE),
    ],
    ids=["wide", "wide parts", "many parts", "wide arguments"],
)
def test_items_are_counted_however_they_are_held(item: AnyItem) -> None:
    kept = KeptResponses(KeptBounds(10_000, 1 << 30, 60.0), FakeClock())
    written = item.model_dump_json()
    tracemalloc.start()
    try:
        for number in range(20):
            kept.put(Kept(f"r{number}", bytes(200), [], [keep_item(type(item).model_validate_json(written))], [said("yes")]))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * held < kept.size < 1.5 * held
