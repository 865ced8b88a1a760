"""Control tokens found by their spelling: vocabulary entries that end an answer or frame a turn, although the model's files give them another type.

`turn_marks` finds the entries that the chat template writes around turns. A mark that is not a single entry, such as `USER:`, stays text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

logger = logging.getLogger(__name__)

_MESSAGE_END: Final = "<|end|>"
END_TOKENS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", _MESSAGE_END)
"""Tokens that end an answer in the families that run here, even if a model's files do not say so."""
_LAST_MESSAGE_ENDS: Final = ("<|return|>", "<|call|>")
"""Ends of the last message. In a vocabulary that has both, an answer is several messages, and `<|end|>` ends all but the last one."""
MAX_MARK_LETTERS: Final = 64
"""Characters of the longest mark. Raising it: more look-ups in texts that have no marks."""


def end_ids(special: Mapping[str, int], named: Collection[int]) -> frozenset[int]:
    """Return the ids of the tokens that end an answer.

    Args:
        special: ids of the special tokens, by their spelling.
        named: tokens that the model's files name as ends.
    """
    found = {*named, *(special[name] for name in END_TOKENS if name in special)}
    if all(name in special for name in _LAST_MESSAGE_ENDS):
        found -= {special.get(_MESSAGE_END)}
        found |= {special[name] for name in _LAST_MESSAGE_ENDS}
    return frozenset(found)


def is_mark(name: str) -> bool:
    """Return whether an entry may be a mark: it begins and ends with a sign, and contains a letter or a digit."""
    return (
        2 < len(name) <= MAX_MARK_LETTERS
        and not any(end.isalnum() or end.isspace() for end in (name[0], name[-1]))
        and any(map(str.isalnum, name))
    )


def control_marks(encoder: Encoder, marks: Collection[str] = (), named: Collection[str] = ()) -> list[str]:
    """Return the spellings of entries that are control tokens but have another type in the file, in the order of their ids.

    Args:
        marks: entries that the chat template writes around turns.
        named: tokens that the model's files name as first, last and so on.
    """
    names = {*END_TOKENS, *marks, *filter(is_mark, named)}
    names -= {token.content for token in encoder.get_added_tokens_decoder().values() if token.special}
    found = {name: token_id for name in names if (token_id := encoder.token_to_id(name)) is not None}
    return sorted(found, key=lambda name: found[name])


def with_control_marks(encoder: Encoder, marks: Collection[str], named: Collection[str], path: Path) -> Encoder:
    """Return an encoder in which the marks are control tokens: no message can spell a mark, and no answer shows one.

    Args:
        marks, named: as for `control_marks`.
        path: the file that the vocabulary came from, for the log.
    """
    names = control_marks(encoder, marks, named)
    if not names:
        return encoder
    from tokenizers import Tokenizer

    parts: dict[str, Any] = json.loads(encoder.to_str())
    fields = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    known = {token["content"]: token for token in parts["added_tokens"]}
    for name in names:
        token = known.setdefault(name, {"id": encoder.token_to_id(name), "content": name, **fields})
        token["special"] = True
    parts["added_tokens"] = sorted(known.values(), key=lambda token: token["id"])
    _forget_merges(parts["model"], names)
    logger.info("%s: %s are control tokens, though the file gives them another type", path.name, ", ".join(names))
    return Tokenizer.from_str(json.dumps(parts, ensure_ascii=False))


def _forget_merges(model: dict[str, Any], names: Collection[str]) -> None:
    """Remove the merges that produce these entries from a text that spells them."""
    if merges := model.get("merges"):
        model["merges"] = [pair for pair in merges if ("".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1)) not in names]
