"""Words break at a terminal's edge, however the text comes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.terminal import WordWrap


def wrapped(pieces: list[str], columns: int) -> str:
    wrap = WordWrap(columns)
    return "".join([*map(wrap.feed, pieces), wrap.end()])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("one\ntwo three", "one\ntwo three"),
        ("a    b", "a    b"),
        ("  indented", "  indented"),
        ("abcdefghijklm no", "abcdefghijklm no"),
        ("日本語 日本", "日本語\n日本"),
    ],
)
def test_breaks(text: str, shown: str) -> None:
    assert wrapped([text], 10 if "indented" in text or "three" in text or "日" in text else 11) == shown


@given(st.text("ab \n日", max_size=60), st.lists(st.integers(0, 60)), st.integers(4, 20))
def test_no_word_is_changed_and_pieces_do_not_matter(text: str, cuts: list[int], columns: int) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    shown = wrapped(pieces, columns)
    assert shown == wrapped([text], columns)
    assert shown.split() == text.split()


def test_a_word_wider_than_the_terminal_stays_one_however_it_comes() -> None:
    assert wrapped(["aaaa", "a", " b"], 4) == wrapped(["aaaaa b"], 4) == "aaaaa b"
