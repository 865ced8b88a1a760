"""Finds the marks of turns: vocabulary entries that a chat template writes around each message.

The template renders a few probe chats, in the process that limits templates. A mark is an entry that only blanks, other marks and single words (roles)
separate from a probe's text. The source of a template is not enough to find marks, because templates build them from pieces and macros.

Marks inside the assistant's turn (of thoughts, calls, results) are text that models write and clients read, not marks of turns. So only the first marks of
the assistant's turn count, as many as begin the user's. The mark before a tool's result counts only if a mark of turns follows the result.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import PacelineError
from paceline.store.bounded_tokenizer import ProcessLost, TokenizerProcess
from paceline.store.chats import ChatTemplate
from paceline.store.control_marks import MAX_MARK_LETTERS, is_mark
from paceline.store.tokenizer import ModelTokenizer, byte_alphabet, pack_tokenizer
from paceline.store.tokenizer_child import limit_of, write_time

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

logger = logging.getLogger(__name__)

KEPT: Final = 32
"""Number of templates with remembered probe texts, so that models with the same template render it once. Raising it: a few kilobytes more for each."""
_ROLES: Final = ("system", "user", "assistant", "model", "tool", "developer", "human", "bot", "gpt", "ipython")
_SYSTEM, _USER, _ANSWER, _NEXT, _RESULT = ("58120393746", "90317465528", "27741906835", "61958820374", "43382017596")
"""Texts of the probe chats. They are digits, because templates may change letters, and no template contains such a number."""
_TEXTS: Final = re.compile(f"({_SYSTEM}|{_USER}|{_ANSWER}|{_NEXT}|{_RESULT})")
_WORD: Final = re.compile(r"\w+|\s+")
_EDGE: Final = "edge"
_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}},
}
_CALL: Final[Mapping[str, Any]] = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {}}}


def _chats() -> Iterator[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]]:
    """Yield the messages and the tools of each probe chat."""
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    result = {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": _RESULT}
    yield [user], ()
    yield [user, answer], ()
    yield [user, answer, {"role": "user", "content": _NEXT}], ()
    yield [{"role": "system", "content": _SYSTEM}, user, answer], ()
    yield [user, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, result, answer], (_TOOL,)


def turn_marks(encoder: Encoder, template: ChatTemplate) -> set[str]:
    """Return the spellings of the entries that frame turns in a model's templates.

    A template is rendered only if its source may write a mark that is not a special token. That blocks for about 0.3 s. If a template fails, it gives no
    entries, and a warning is logged.
    """
    special = {token.content for token in encoder.get_added_tokens_decoder().values() if token.special}
    signs = [name for name in encoder.get_vocab(with_added_tokens=True) if not name[-1:].isalnum()]
    names = [name.lower() for name in signs if is_mark(name) and name not in special]
    found = set[str]()
    for source in {template.source, template.tool_source or template.source}:
        if not any(_may_write(source.lower(), name) for name in names):
            continue
        try:
            texts = rendered_texts(source, tuple(sorted(template.special_tokens.items())))
        except (PacelineError, ProcessLost, OSError) as error:
            logger.warning(
                "%s: its chat template renders no probe chat (%s): its marks may be spelled in messages", template.path.name, error
            )
        else:
            found |= framing(lambda name: encoder.token_to_id(name) is not None, texts)
    return found


def _may_write(source: str, name: str) -> bool:
    """Return whether a template's source contains mark `name`, or both parts of it around a role, as in `<|user|>`. Both are in lower case."""
    if name in source:
        return True
    return any(role in name and all(half in source for half in (name.partition(role)[0], name.partition(role)[2])) for role in _ROLES)


@lru_cache(KEPT)
def rendered_texts(source: str, special_tokens: tuple[tuple[str, str], ...]) -> tuple[str | None, ...]:
    """Return the rendered text of each probe chat; None for a chat that the template refuses.

    Raises:
        PacelineError: the template's process can't be started.
        ProcessLost: the template exceeds its limits of time or memory.
    """
    template = ChatTemplate(Path("template"), source, dict(special_tokens))
    process = TokenizerProcess(pack_tokenizer(ModelTokenizer(template.path, _bytes(), frozenset(), template)))
    try:
        return tuple(_text(process, chat, tools) for chat, tools in _chats())
    finally:
        process.end()


def _text(process: TokenizerProcess, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
    given = {"tools": tools, "switches": {}, "salt": "", "continues": False, "begins_turn": False}
    data = json.dumps({"messages": chat, "now": write_time(datetime(2026, 1, 1, tzinfo=UTC)), "given": given}).encode()
    try:
        return bytes(process.ask(data, limit_of(len(data)))).decode("utf-8", "replace")
    except PacelineError:
        return None


def _bytes() -> Encoder:
    """Return an encoder with the text's bytes as ids, so that the process's answer can be read as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    encoder = Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    return encoder


@dataclass(frozen=True, slots=True)
class _Gap:
    """The marks that a template writes between two consecutive probe texts."""

    behind: Sequence[str]
    """The marks directly behind the first text; all marks if only marks, blanks and roles are between the two texts."""
    before: Sequence[str]
    """The marks directly before the second text; all marks in the same case."""

    @property
    def is_whole(self) -> bool:
        return self.behind is self.before


_NONE: Final = _Gap((), ())


def framing(is_entry: Callable[[str], bool], texts: Sequence[str | None]) -> set[str]:
    """Return the marks around turns that are entries of the vocabulary.

    Args:
        is_entry: returns whether the vocabulary has an entry with this spelling.
        texts: the texts of the probe chats, as `rendered_texts` returns them.
    """
    alone, answered, again, instructed, calling = ({} if text is None else dict(_gaps(text, is_entry)) for text in texts)
    # `begun` marks begin a turn of the user; `ended` is the place in `opening` where the user's turn is over.
    told = again.get((_ANSWER, _NEXT), _NONE).behind
    begun = len(told) - _same(told, answered.get((_ANSWER, _EDGE), _NONE).behind)
    opening = answered.get((_USER, _ANSWER), _NONE).behind
    ended = _same(opening, alone.get((_USER, _EDGE), _NONE).behind)
    found = {*opening[ended : ended + begun]}
    for chat in (alone, answered, again, instructed):
        for (before, behind), gap in chat.items():
            if behind in {_SYSTEM, _USER, _NEXT}:
                is_own = gap.is_whole or before != _EDGE  # other words there are the template's own, and may name any mark
                found.update(gap.before if is_own else gap.before[-max(1, begun) :])
            if before != _EDGE:
                found.update(gap.behind[:1])
    ends = next((gap.behind[:1] for (before, _), gap in calling.items() if before == _RESULT), ())
    if ends and ends[0] in found:
        found.update(mark for (_, behind), gap in calling.items() if behind == _RESULT for mark in gap.before[-1:])
    return found


def _same(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of marks that two sequences have in common at their beginning."""
    return next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def _gaps(text: str, is_entry: Callable[[str], bool]) -> Iterator[tuple[tuple[str, str], _Gap]]:
    """Yield each pair of consecutive probe texts and the gap between them. `_EDGE` stands for the beginning and the end of the whole."""
    pieces = _TEXTS.split(text)
    texts = [_EDGE, *pieces[1::2], _EDGE]
    for (before, behind), piece in zip(pairwise(texts), pieces[::2], strict=True):
        words = list(_words(piece, is_entry))
        first, last = list(_run(words)), list(_run(words[::-1]))[::-1]
        marks, other = ([word for word in run if is_mark(word)] for run in (first, last))
        yield (before, behind), _Gap(marks, marks if len(first) == len(words) else other)


def _words(text: str, is_entry: Callable[[str], bool]) -> Iterator[str]:
    """Yield the marks, words, signs and blanks of a text."""
    at = 0
    while at < len(text):
        length = 0
        if not (text[at].isalnum() or text[at].isspace()):
            ends = range(min(len(text), at + MAX_MARK_LETTERS), at + 2, -1)
            length = next((end - at for end in ends if is_mark(text[at:end]) and is_entry(text[at:end])), 0)
        if not length and (word := _WORD.match(text, at)):
            length = word.end() - at
        yield text[at : at + (length or 1)]
        at += length or 1


def _run(words: Sequence[str]) -> Iterator[str]:
    """Yield the words up to the first sign, or up to a second word that no mark separates from the one before."""
    was_word = False
    for word in words:
        if is_mark(word):
            was_word = False
        elif not word.isspace():
            if was_word or not word[0].isalnum():
                return
            was_word = True
        yield word
