"""GBNF, the grammars of llama.cpp, as Lark's.

The library ships a converter. It takes no rule named `start`, no two names that differ in case or in `-` and `_`, no `.` for a line break, and some escapes
wrongly; so names, texts and classes are written in words that it takes first. A grammar without recursion becomes one expression, which is
followed exactly; in others the parts without recursion take as much text as they can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from paceline.core.errors import InvalidRequest

_RULE: Final = re.compile(r"(?m)^[ \t]*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=")
_WORDS: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[A-Za-z][A-Za-z0-9_-]*|\.')
_LETTER: Final = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES: Final[Mapping[str, str]] = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF: a rule has `::=`."""
    return _RULE.search(text) is not None


def gbnf_as_lark(text: str) -> str:
    """The grammar in Lark's words.

    Raises:
        InvalidRequest: it can't be read, or has no rule named root.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark  # it takes a while to import

    names: dict[str, str] = {}

    def word(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith("#"):
            return ""
        if found.startswith('"'):
            return _text(found[1:-1])
        if found.startswith("["):
            return _class(found[1:-1])
        if found == ".":
            return f"[{chr(1)}-{chr(0x10FFFF)}]"
        return names.setdefault(found, f"r{len(names)}x")

    try:
        rules = _WORDS.sub(word, text)
        if "root" not in names:
            raise ValueError("no root")
        return gbnf_to_lark(f"root ::= {names['root']}\n{rules}\n")
    except Exception as error:
        # The converter raises bare exceptions, with places in the text as it was rewritten.
        hint = "Send GBNF with a rule named root, every rule defined, or a Lark grammar with a rule named start."
        raise InvalidRequest("grammar: it has ::=, and can't be read as GBNF", hint, field="grammar") from error


def _letters(text: str) -> list[tuple[str, bool]]:
    """Letters, and whether each was escaped."""
    found: list[tuple[str, bool]] = []
    for match in _LETTER.finditer(text):
        *codes, escaped, plain = match.groups()
        code = next((code for code in codes if code), None)
        found.append((chr(int(code, 16)), True) if code else (plain, False) if plain else (_ESCAPES.get(escaped, escaped), True))
    return found


def _text(text: str) -> str:
    written = json.dumps("".join(letter for letter, _ in _letters(text)), ensure_ascii=False)
    if re.search(r"\\[bfu]", written.replace("\\\\", "")):
        raise ValueError("a control character in a text")
    return written


def _class(text: str) -> str:
    """A class of letters, in which all that means something to expressions but `^` in front and `-` between is escaped."""
    negated = "^" if text.startswith("^") else ""
    written = ""
    for letter, is_escaped in _letters(text.removeprefix("^")):
        means = letter in "\\]^&~[" or (letter == "-" and is_escaped) or letter < " "
        written += f"\\x{ord(letter):02x}" if means else letter
    return f"[{negated}{written}]"
