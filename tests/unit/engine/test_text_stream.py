"""Text comes out whole, whatever the cut, and never reaches into a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.null_backend import ByteVocabulary
from tests.sampling import examples

from paceline.engine.sequence import TextStream


def stream(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], str, bool]:
    """Push pieces until a stop, then flush: texts as pushed, text of the flush, whether stopped."""
    text = TextStream(ByteVocabulary(len(pieces) + 1, frozenset(), pieces), stop)
    pushed: list[str] = []
    for token in range(len(pieces)):
        pushed.append(text.push(token))
        if text.stopped:
            return pushed, "", True
    rest = text.flush()
    return pushed, rest, text.stopped


def reference(data: bytes, stop: Sequence[str]) -> str:
    """Cut where, read character by character, a stop string is complete first; the longest of those complete at once."""
    text = data.decode("utf-8", "replace")
    for end in range(len(text) + 1):
        complete = [s for s in stop if s and text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(
    st.binary(max_size=60) | st.text("aé語🚴", max_size=30).map(str.encode), st.lists(st.text("aé語🚴�", max_size=4), max_size=3), st.data()
)
@settings(max_examples=examples(300))
def test_any_cut_gives_the_reference(data: bytes, stop: list[str], cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.lists(st.integers(0, len(data)), max_size=20)))
    pieces = [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]
    pushed, rest, stopped = stream(pieces, stop)
    expected = reference(data, stop)
    assert "".join(pushed) + rest == expected
    assert stopped == (expected != data.decode("utf-8", "replace"))


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=examples(300))
def test_nothing_is_held_back_longer_than_needed(data: str, stop: list[str]) -> None:
    text = TextStream(ByteVocabulary(128, frozenset(), [bytes([i]) for i in range(128)]), stop)
    emitted = ""
    for n, char in enumerate(data, 1):
        emitted += text.push(ord(char))
        if text.stopped:
            break
        held = data[len(emitted) : n]
        assert data[:n] == emitted + held
        assert any(s.startswith(held) for s in stop), "text is held back that begins no stop string"
        assert not any(s.startswith(data[start:n]) for s in stop for start in range(len(emitted))), "part of a stop string may be out"


def test_characters_come_whole() -> None:
    pushed, rest, _ = stream([b"\xf0\x9f", b"\x9a", b"\xb4!"])
    assert (pushed, rest) == (["", "", "🚴!"], "")


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert stream([b"a", b"\xc3"]) == (["a", ""], "\ufffd", False)


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    assert stream([b"ab", b"\xc3"], ["b\ufffd"]) == (["a", ""], "", True)


def test_a_stop_string_over_several_tokens_is_removed() -> None:
    assert stream([b"one\n", b"\nU", b"ser:", b" x"], ["\n\nUser:"]) == (["one", "", ""], "", True)


def test_a_false_start_comes_out() -> None:
    assert stream([b"one\n", b"\nU", b"nder", b"\n"], ["\n\nUser:"]) == (["one", "", "\n\nUnder", ""], "\n", False)
