"""Prompts for answers that fill a gap between two texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.errors import InvalidRequest
from paceline.core.text import Tokenizer

MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Refact, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
"""Marks before the text before the gap, before the text behind it, and before the answer. None: the text behind comes first, and the answer goes on with
the text before."""


def infill_ids(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], behind: str) -> list[list[int]]:
    """Return the ids of prompts for answers that fill a gap between two texts.

    Args:
        prompts: ids of the texts before, with the tokens that the model wants before a text.

    Raises:
        InvalidRequest: the model has no tokens for it.
    """
    prefix, suffix, middle = tokenizer.infill_tokens or _named(tokenizer)
    first = tokenizer.encode("")  # what the model wants before a text stands before the mark, too
    rest = tokenizer.encode_inside(behind)
    filled: list[list[int]] = []
    for before in prompts:
        start = len(first) if list(before[: len(first)]) == first else 0
        begun, text = before[:start], before[start:]
        around = [suffix, *rest, prefix, *text] if middle is None else [prefix, *text, suffix, *rest, middle]
        filled.append([*begun, *around])
    return filled


def _named(tokenizer: Tokenizer) -> tuple[int, int, int | None]:
    """Return the marks, found by what they spell."""

    def one(name: str) -> int | None:
        ids = tokenizer.encode(name, add_special=False)
        return ids[0] if len(ids) == 1 else None

    for names in MARKS:
        prefix, suffix, middle = (None if name is None else one(name) for name in names)
        if prefix is not None and suffix is not None and (middle is not None or names[2] is None):
            return prefix, suffix, middle
    raise InvalidRequest(
        "suffix: this model has no tokens to fill in the middle with", "Leave it out, or ask a model made for code.", field="suffix"
    )
