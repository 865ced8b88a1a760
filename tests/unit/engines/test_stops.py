"""Stop texts end an answer wherever the engine cuts its pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.generation import FinishReason
from paceline.engines.contract import AnswerPiece
from paceline.engines.stops import until_stop


def cut(parts: list[str], stops: tuple[str, ...]) -> list[AnswerPiece]:
    async def pieces() -> AsyncGenerator[AnswerPiece]:
        yield AnswerPiece(tokens_read=1, prompt_tokens=3)
        for token, part in enumerate(parts):
            yield AnswerPiece(part, token_ids=(token,), n_tokens=1)
        yield AnswerPiece(finish=FinishReason.LENGTH, prompt_tokens=3)

    async def go() -> list[AnswerPiece]:
        return [piece async for piece in until_stop(pieces(), stops)]

    return asyncio.run(go())


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_answer_ends_before_the_first_stop_text(parts: list[str], stops: list[str]) -> None:
    text, first = "", None
    for part in parts:  # the first to be complete counts
        text += part
        first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        if first is not None:
            break
    found = cut(parts, tuple(stops))
    assert "".join(piece.text for piece in found) == text[:first]
    assert [piece.finish for piece in found[-1:]] == [FinishReason.LENGTH if first is None else FinishReason.STOP]
    assert found[-1].stopped_by_text == (first is not None)
    if first is None:
        assert [token for piece in found for token in piece.token_ids] == [*range(len(parts))]


@pytest.mark.parametrize(("parts", "count"), [(["one ", "two"], 2), (["x", "a"], 1)])
def test_only_text_that_may_begin_a_stop_text_is_held_back(parts: list[str], count: int) -> None:
    async def go() -> list[AnswerPiece]:
        async def pieces() -> AsyncGenerator[AnswerPiece]:
            for part in parts:
                yield AnswerPiece(part, n_tokens=1)
            await asyncio.sleep(60)

        answer, found = until_stop(pieces(), ("abc", "zz")), list[AnswerPiece]()
        async with asyncio.timeout(5):
            while sum(len(piece.text) for piece in found) < len("".join(parts).rstrip("a")):
                found.append(await anext(answer))
        await answer.aclose()
        return found

    assert len(asyncio.run(go())) == count
