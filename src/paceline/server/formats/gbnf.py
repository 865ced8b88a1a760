"""GBNF, the grammars of llama.cpp, in the words of the matcher (Lark's, as llguidance reads them).

A grammar without recursion becomes one regular expression. In others, `lexemes` decides which parts the matcher's lexer may read, so that each text of
the grammar can be written to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice, pairwise
from typing import Final

from paceline.core.errors import InvalidRequest
from paceline.server.formats.expressions import (
    Alternation,
    Expression,
    Letters,
    Lexeme,
    Reference,
    Repeat,
    Rules,
    Sequence,
    in_order,
    is_pattern,
)
from paceline.server.formats.lexemes import Followed, followed_rules
from paceline.server.formats.overruns import NotFollowed

_RULE: Final = re.compile(r"(?m)^[ \t]*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=")
_WORD: Final = re.compile(
    r'\s+|#[^\n]*|(?P<text>"(?:\\.|[^"\\])*")|(?P<letters>\[(?:\\.|[^\]\\])*\])|(?P<mark>::=|[|()*+?.])'
    r"|(?P<count>\{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\})|(?P<name>[A-Za-z0-9_-]+)",
    re.DOTALL,
)
_LETTER: Final = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES: Final[Mapping[str, str]] = {"n": "\n", "r": "\r", "t": "\t"}
_COUNTS: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_SCALARS: Final = ((1, 0xD7FF), (0xE000, 0x10FFFF))
"""Letters of a text: the scalar values of Unicode but NUL."""
_DEPTH: Final = 40
"""Parentheses in each other. Raising it: the functions that walk an expression need more stack."""
_MOST_WORDS: Final = 20_000
"""Raising it: reading takes longer, some 40 us for each, and the matcher refuses larger grammars anyway."""
_KEPT: Final = 64
"""Converted grammars that are remembered. Raising it: more memory; requests that repeat a grammar wait less."""


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is GBNF: a rule has `::=`."""
    return _RULE.search(text) is not None


@lru_cache(_KEPT)
def gbnf_as_lark(text: str) -> str:
    """Return the grammar in Lark's words.

    Raises:
        InvalidRequest: it can't be read, has no rule named root, a rule of it never ends, or following it takes too much work.
    """
    try:
        rules = _Parser(text).rules()
    except ValueError as error:
        hint = "Send GBNF with a rule named root, every rule defined, or a Lark grammar with a rule named start."
        raise InvalidRequest(f"grammar: it has ::=, and can't be read as GBNF: {error}", hint, field="grammar") from None
    try:
        return _written(followed_rules(rules, "root"))
    except NotFollowed as error:
        raise InvalidRequest(
            f"grammar: {error}", "Send a grammar whose rules end, with fewer rules that begin alike.", field="grammar"
        ) from None


class _Parser:
    """Reads rules, whatever lines they stand on."""

    def __init__(self, text: str) -> None:
        self._words = list(islice(_words(text), _MOST_WORDS + 1))
        if len(self._words) > _MOST_WORDS:
            raise ValueError(f"it has more than {_MOST_WORDS} names, texts, classes and marks")
        self._at = 0

    def rules(self) -> Rules:
        """Read all rules.

        Raises:
            ValueError: the text is not a grammar; says why.
        """
        rules: dict[str, Expression] = {}
        while self._at < len(self._words):
            kind, name = self._take()
            if kind != "name" or self._take() != ("mark", "::="):
                raise ValueError(f"a rule should begin at {name[:30]!r}")
            rules[name] = self._choice(0)
        self._check_names(rules)
        return rules

    def _check_names(self, rules: Rules) -> None:
        if "root" not in rules:
            raise ValueError("no rule is named root")
        named = dict.fromkeys(word for kind, word in self._words if kind == "name")
        if missing := next((name for name in named if name not in rules), None):
            raise ValueError(f"no rule is named {missing[:50]}")

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        at = self._at + ahead
        return self._words[at] if at < len(self._words) else ("", "")

    def _take(self) -> tuple[str, str]:
        word = self._peek()
        self._at += 1
        return word

    def _choice(self, depth: int) -> Expression:
        if depth > _DEPTH:
            raise ValueError(f"more than {_DEPTH} parentheses in each other")
        parts = [self._sequence(depth)]
        while self._peek() == ("mark", "|"):
            self._take()
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while self._peek() not in {("", ""), ("mark", "|"), ("mark", ")")} and self._peek(1) != ("mark", "::="):
            part = self._item(depth)
            counts = self._counts()
            if counts is not None:
                part = Repeat(part, *counts) if counts[1] != 0 else Sequence(())
            parts.append(part)
        return in_order(parts)

    def _item(self, depth: int) -> Expression:
        kind, word = self._take()
        match kind, word:
            case "text", _:
                return Sequence(tuple(_text_letter(ord(letter)) for letter, _ in _letters(word[1:-1])))
            case "letters", _:
                return _class(word[1:-1])
            case "name", _:
                return Reference(word)
            case "mark", ".":
                return Letters(_SCALARS)
            case "mark", "(":
                inner = self._choice(depth + 1)
                if self._take() != ("mark", ")"):
                    raise ValueError("a parenthesis is not closed")
                return inner
            case _:
                raise ValueError(f"{word[:30]!r} has no place")

    def _counts(self) -> tuple[int, int | None] | None:
        kind, word = self._peek()
        if kind == "mark" and word in _COUNTS:
            self._take()
            return _COUNTS[word]
        if kind != "count":
            return None
        self._take()
        least, comma, most = (part.strip() for part in word[1:-1].partition(","))
        counts = int(least), int(most) if most else None if comma else int(least)
        if counts[1] is not None and counts[0] > counts[1]:
            raise ValueError(f"{word} allows no count")
        return counts


def _words(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 30]!r} is not part of a rule")
        at = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match.group()


def _letters(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each letter, and whether it was escaped."""
    for match in _LETTER.finditer(text):
        *codes, escaped, plain = match.groups()
        code = next((code for code in codes if code), None)
        if code is not None and int(code, 16) > _SCALARS[-1][1]:
            raise ValueError(f"{match.group()} is not a letter")
        yield (chr(int(code, 16)), True) if code else (plain, False) if plain else (_ESCAPES.get(escaped, escaped), True)


def _text_letter(code: int) -> Expression:
    found = _within([(code, code)], is_negated=False)
    if not found:
        raise ValueError(f"U+{code:04X} is not a letter")
    return Letters(found)


def _class(text: str) -> Expression:
    letters = list(_letters(text.removeprefix("^")))
    spans: list[tuple[int, int]] = []
    while letters:
        first = ord(letters.pop(0)[0])
        last = first
        if len(letters) > 1 and letters[0] == ("-", False):
            letters.pop(0)
            last = ord(letters.pop(0)[0])
        spans.append((first, last))
    found = _within(spans, is_negated=text.startswith("^"))
    if not found:
        raise ValueError(f"[{text[:30]}] allows no letter")
    return Letters(found)


def _within(spans: list[tuple[int, int]], *, is_negated: bool) -> tuple[tuple[int, int], ...]:
    """Return the scalar values within spans, or outside of them, as sorted spans that do not touch."""
    if is_negated:
        ends = [(0, -1), *_joined(spans), (0x110000, 0x110000)]
        spans = [(before + 1, after - 1) for (_, before), (after, _) in pairwise(ends)]
    cut = [(max(first, low), min(last, high)) for first, last in spans for low, high in _SCALARS]
    return tuple(_joined([span for span in cut if span[0] <= span[1]]))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        elif first <= last:
            joined.append((first, last))
    return joined


# ------------------------------------------------------------------------------------------------------------------- Lark's words


def _written(followed: Followed) -> str:
    rules = followed.rules
    names = {name: f"R{number}" if followed.is_regular else f"r{number}" for number, name in enumerate(rules)}
    bodies = (f"{names[name]}: {_rule(rule, names)}" for name, rule in rules.items())
    return "\n".join(["%llguidance {}", f"start: {names[followed.root]}", *bodies, ""])


def _rule(rule: Expression, names: Mapping[str, str]) -> str:
    match rule:
        case Lexeme(part):
            return f"/{_pattern(part)}/"
        case Reference(name):
            return names[name]
        case Sequence(()):
            return '""'
        case _ if is_pattern(rule):
            return f"/{_pattern(rule)}/"
        case Sequence(parts):
            return " ".join(_rule(part, names) for part in parts)
        case Alternation(parts):
            return f"({' | '.join(_rule(part, names) for part in parts)})"
        case Repeat(part, least, most):
            return f"({_rule(part, names)}){_count(least, most)}"
        case Letters():
            raise AssertionError("letters are a pattern")


def _pattern(part: Expression) -> str:
    """Return a regular expression."""
    match part:
        case Letters(((first, last),)) if first == last:
            return _letter(first)
        case Letters(spans):
            return f"[{''.join(_letter(first) if first == last else f'{_letter(first)}-{_letter(last)}' for first, last in spans)}]"
        case Sequence(parts):
            return "".join(map(_pattern, parts))
        case Alternation(parts):
            return f"(?:{'|'.join(map(_pattern, parts))})"
        case Repeat(inner, least, most):
            return f"(?:{_pattern(inner)}){_count(least, most)}"
        case _:
            raise AssertionError(f"{part} is not a pattern")


def _letter(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{code:x}}}"


def _count(least: int, most: int | None) -> str:
    for mark, counts in _COUNTS.items():
        if counts == (least, most):
            return mark
    return f"{{{least},{'' if most is None else most}}}"
