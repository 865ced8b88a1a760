"""Answers of models whose markers are special tokens: what is read is the text that a chunk brings, with the markers where their tokens stand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.sequence import TextStream
from paceline.server.call import ChoiceReader, Reading
from paceline.server.formats.format import Content, Format, Part, Reasoning, Thinking
from paceline.server.formats.reader import AnswerReader

OPEN, CLOSE, END = 0, 1, 2
SPELLED = {OPEN: b"[THINK]", CLOSE: b"[/THINK]"}
PIECES = (b"", b"", b"", b"so", b" ", b"st", b"op", b"\xe2\x82", b"\xac", b"o", b"p s")
FORMAT = Format("marked", thinking=Thinking(("[THINK]",), ("[/THINK]",), anywhere=True))


class Pieces:
    """A vocabulary of a few tokens."""

    size, eos_ids = len(PIECES), frozenset({END})

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


def answer(tokens: Sequence[int], cuts: Sequence[int], stop: Sequence[str]) -> tuple[list[Part], int, str]:
    """What is read of an answer whose deltas have so many tokens each, how many of them are reasoning, and its text as the engine gives it."""
    request = GenerationRequest(RequestId("r"), (1,), 100, SamplingParams(), stop=tuple(stop))
    stream, reader = TextStream(Pieces(), stop), ChoiceReader(Reading(FORMAT, {}, False, True, SPELLED), Pieces(), request)
    parts: list[Part] = []
    text, delta, said, sizes = "", list[int](), "", iter(cuts)
    size = next(sizes, 1)
    for token in tokens:
        delta.append(token)
        ended = token == END or stream.stopped
        said += "" if ended else stream.push(token)
        if ended or stream.stopped:
            break
        if len(delta) >= size:
            parts += reader.read(GenerationChunk(RequestId("r"), 0, tuple(delta), said))
            text, delta, said, size = text + said, [], "", next(sizes, 1)
    said += stream.flush()
    reason = FinishReason.STOP if stream.stopped or tokens[-1:] == [END] else FinishReason.LENGTH
    parts += reader.read(GenerationChunk(RequestId("r"), 0, tuple(delta), said, finish_reason=reason))
    return parts, reader.reasoning_tokens, text + said


def joined(parts: Sequence[Part]) -> list[tuple[type[Part], str]]:
    runs: list[tuple[type[Part], str]] = []
    for part in parts:
        assert isinstance(part, Content | Reasoning)
        if runs and runs[-1][0] is type(part):
            runs[-1] = (type(part), runs[-1][1] + part.text)
        else:
            runs.append((type(part), part.text))
    return runs


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    st.lists(st.integers(1, 6), max_size=12),
    st.lists(st.sampled_from(["stop", "so", "o s", "€", "[THINK]", "[/THINK]", "p[/T"]), max_size=2),
)
def test_parts_follow_from_the_engines_text_however_it_is_cut(tokens: list[int], cuts: list[int], stop: list[str]) -> None:
    whole, reasoned, text = answer(tokens, [len(tokens) + 1], stop)
    parts, tokens_of_reasoning, same_text = answer(tokens, cuts, stop)
    assert (joined(parts), tokens_of_reasoning, same_text) == (joined(whole), reasoned, text)
    read = "".join(part.text for part in whole if isinstance(part, Content | Reasoning))
    for marker in SPELLED.values():  # one that opens or closes nothing is text
        read = read.replace(marker.decode(), "")
    assert "".join(read.split()) == "".join(text.split()), "only blanks beside markers are left out"


@pytest.mark.parametrize(
    ("token", "finish", "is_cut"),
    [
        (END, FinishReason.STOP, False),
        (3, FinishReason.STOP, True),
        (END, FinishReason.LENGTH, True),
        (END, FinishReason.ABORT, True),
        (END, FinishReason.ERROR, True),
        (None, FinishReason.STOP, True),
        (None, FinishReason.ERROR, True),
    ],
)
def test_only_a_token_that_ends_answers_is_the_models_own_end(
    monkeypatch: pytest.MonkeyPatch, token: int | None, finish: FinishReason, is_cut: bool
) -> None:
    ends: list[bool] = []

    def end(self: AnswerReader, *, is_cut: bool, has_failed: bool) -> list[Part]:
        assert has_failed == (finish in {FinishReason.ABORT, FinishReason.ERROR})
        ends.append(is_cut)
        return []

    monkeypatch.setattr(AnswerReader, "end", end)
    reader = ChoiceReader(Reading(FORMAT, {}, False, True, SPELLED), Pieces(), GenerationRequest(RequestId("r"), (1,), 100))
    reader.read(GenerationChunk(RequestId("r"), 0, () if token is None else (token,), "", finish_reason=finish))
    assert ends == [is_cut]


@pytest.mark.parametrize("stop", ["[THINK]", "[/THINK]"])
def test_a_marker_that_is_a_stop_string_too_takes_no_text_with_it(stop: str) -> None:
    parts, reasoned, _ = answer([OPEN, 5, CLOSE, 3, 6, END], [1] * 9, [stop])
    assert joined(parts) == [(Reasoning, "st"), (Content, "soop")]
    assert reasoned == 2


def test_a_stop_string_that_a_marker_stands_in_ends_the_text_where_it_begins() -> None:
    parts, _, text = answer([3, 5, CLOSE, 6, 3], [1] * 9, ["stop"])
    assert (text, joined(parts)) == ("so", [(Content, "so")])
