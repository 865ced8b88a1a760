"""Prompts that ask for the text between two others, in the tokens that models were shown it with: data, a line a family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.errors import InvalidRequest
from paceline.core.text import Tokenizer

MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
)
"""What stands before the text before, before the text behind, and before the answer."""


def infill_ids(tokenizer: Tokenizer, before: Sequence[int], behind: str) -> list[int]:
    """The ids of a prompt whose answer goes between two texts.

    Args:
        before: ids of the first, with what the model wants before a text.

    Raises:
        InvalidRequest: the model has no tokens for it.
    """
    for names in MARKS:
        ids = [tokenizer.encode(name, add_special=False) for name in names]
        if all(len(one) == 1 for one in ids):
            (prefix,), (suffix,), (middle,) = ids
            first = tokenizer.encode("")  # what the model wants before a text stands before the mark, too
            start = len(first) if list(before[: len(first)]) == first else 0
            return [*before[:start], prefix, *before[start:], suffix, *tokenizer.encode(behind, add_special=False), middle]
    raise InvalidRequest(
        "suffix: this model has no tokens to fill in the middle with", "Leave it out, or ask a model made for code.", field="suffix"
    )
