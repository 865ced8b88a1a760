"""Log probabilities as OpenAI writes them, with the text of each token."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.generation import TokenLogprob
from paceline.core.text import Vocabulary

LOWEST_LOGPROB = -9999.0
"""How OpenAI writes the logarithm of zero, which JSON can't hold."""

Spelled = tuple[str, list[int]]
"""A token's text, with U+FFFD where it is a part of a character, and its bytes."""


class TokenTexts:
    """Spells the tokens of one choice, from first to last, so that their texts joined are the choice's text."""

    def __init__(self, vocabulary: Vocabulary, *, has_space: bool = False) -> None:
        """Stand before the first token.

        Args:
            has_space: the choice begins a text, and the vocabulary begins a text with a space that is not part of it.
        """
        self._vocabulary, self._has_space = vocabulary, has_space

    def take(self, token_id: int, others: Sequence[int] = ()) -> list[Spelled]:
        """Go behind the next token. Returns the texts of this token and of others that could stand in its place."""
        pieces = [self._vocabulary.token_bytes(each) for each in (token_id, *others)]
        if self._has_space:
            self._has_space = not pieces[0]
            pieces = [piece.removeprefix(b" ") for piece in pieces]
        return [(piece.decode("utf-8", "replace"), list(piece)) for piece in pieces]


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(LOWEST_LOGPROB, logprob)


def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """Return a choice's `logprobs`, in chat's shape."""
    return {"content": [{**own, "top_logprobs": others} for own, others in logprob_entries(texts, logprobs)], "refusal": None}


def logprob_entries(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> list[tuple[dict[str, object], list[dict[str, object]]]]:
    """Return an entry for each token, and for each that was likeliest in its place."""
    found: list[tuple[dict[str, object], list[dict[str, object]]]] = []
    for one in logprobs:
        spelled = texts.take(one.token_id, [token_id for token_id, _ in one.top])
        values = [one.logprob, *(logprob for _, logprob in one.top)]
        entries: list[dict[str, object]] = [
            {"token": text, "logprob": finite(logprob), "bytes": raw} for (text, raw), logprob in zip(spelled, values, strict=True)
        ]
        found.append((entries[0], entries[1:]))
    return found


def completion_logprobs(
    texts: TokenTexts, logprobs: Sequence[TokenLogprob], offset: int, first: int | None = None
) -> tuple[dict[str, object], int]:
    """Return a choice's `logprobs` in the shape of `/v1/completions`, and the text offset (in characters) after them.

    Args:
        first: a token before them that has none; null is its.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    if first is not None:
        tokens.append(texts.take(first)[0][0])
        offsets.append(offset)
        offset += len(tokens[0])
        top.append(None)
    for one in logprobs:
        (text, _), *others = texts.take(one.token_id, [token_id for token_id, _ in one.top])
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # Two ids may read the same; the likelier comes first and stays.
        alternatives: dict[str, float] = {}
        for (other, _), (_, logprob) in zip(others, one.top, strict=True):
            alternatives.setdefault(other, finite(logprob))
        top.append(alternatives)
    shown: dict[str, object] = {
        "tokens": tokens,
        "token_logprobs": [*([] if first is None else [None]), *(finite(one.logprob) for one in logprobs)],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return shown, offset
