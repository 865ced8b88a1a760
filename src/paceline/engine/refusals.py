"""Why a grammar is refused, in words that need no knowledge of the library; and which keyword of a schema is to blame.

Law: no text of the library reaches a client, but for its sentences on regular expressions, which are about the client's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from paceline.core.generation import Grammar, GrammarKind

TRIES: Final = 200
"""Compilations to find the keyword to blame. Raising it: a larger schema is looked through, and its refusal takes longer."""
_WORDS: Final[Mapping[str, str]] = {
    r"look-?around": "look-around and word boundaries are not supported in expressions",
    r"(?m)^\s*error: ([a-zA-Z][a-zA-Z ,<=-]{3,80})$": "an expression can't be followed: {0}",
    r"invalid regex|regex parse error": "an expression can't be followed",
    r"not disjoint|are disjoint": "two expressions of patternProperties may match the same name",
    r"min/maxProperties": "minProperties and maxProperties are followed only where all properties that are named are required",
    r"[Uu]nsatisfiable|is empty|No options|always empty": "it allows nothing",
    r"too many digits": "multipleOf has too many digits",
    r"circular": "a reference leads back to itself next to other keywords",
    r"oneOf": "nothing tells the branches of oneOf apart: write anyOf",
    r"does not exist|not present in a registry": "a reference leads nowhere",
    r"Unimplemented keys": "it uses keywords that are not supported",
    r'unknown name: "([\w-]{1,80})"': "the rule {0} is not defined",
    r"no start rule|Empty grammar": "there is no rule named start",
    r"special token": "it names a special token that the model does not have",
    r"(?i)invalid type": "it names a type that there is not",
    r"^(?:at )?(\d+)\((\d+)\): ": "it can't be read at line {0}, column {1}",
    r"(?i)too (large|complex|many|deep|big)|limit|fuel|size|exceed|overflow": "it is too large",
}
"""By expressions for what the library says; the first one that matches counts."""


class GrammarRefusal(NamedTuple):
    """Why a grammar can't be followed."""

    why: str
    """One line."""
    at: str = ""
    """The path in the request of the keyword to blame; empty if it is not known."""
    is_of_compiler: bool = False
    """The compiler refused the grammar, so that compiling its parts can tell which keyword is to blame."""


def in_own_words(text: str) -> str:
    """A refusal of the library's as a client is told it."""
    for theirs, ours in _WORDS.items():
        if match := re.search(theirs, text):
            return ours.format(*match.groups())
    return "it can't be followed"


def place_to_blame(grammar: Grammar, compiles: Callable[[Mapping[str, Any]], bool]) -> str:
    """Find the keyword for which a grammar is refused, by compiling parts of it. Only a process that may end should do this.

    Args:
        compiles: whether a schema alone is taken.

    Returns:
        Its path, or else what `place_to_name` returns.
    """
    left = [TRIES]

    def is_refused(schema: Mapping[str, Any]) -> bool:
        left[0] -= 1
        return left[0] >= 0 and not compiles(schema)

    for schema in _schemas(grammar):
        if isinstance(at := schema.get("$comment"), str) and is_refused(schema):
            return _deepest(schema, schema, at, is_refused)
    return place_to_name(grammar)


def place_to_name(grammar: Grammar) -> str:
    """Return the path of the only schema in a grammar; empty if there are several or none."""
    schemas = list(_schemas(grammar))
    return str(schemas[0].get("$comment", "")) if len(schemas) == 1 else ""


def _schemas(grammar: Grammar) -> Iterator[dict[str, Any]]:
    """The schemas of a grammar that say where they stood in the request."""
    texts: list[str] = []
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            texts = [grammar.text]
        case GrammarKind.TOOLS | GrammarKind.FORM:
            texts = [line.partition("%json ")[2] for line in grammar.text.splitlines() if '%json {"$comment"' in line]
        case _:
            pass
    for text in texts:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield cast("dict[str, Any]", found)


def _deepest(schema: Mapping[str, Any], root: Mapping[str, Any], at: str, is_refused: Callable[[Mapping[str, Any]], bool]) -> str:
    """The path of the smallest part that is refused by itself, and there of the keyword without which it is taken."""
    shared = {key: root[key] for key in ("$defs", "definitions", "components") if key in root}
    for path, part in _parts(schema, root):
        if "$ref" not in part and is_refused({**shared, **part}):
            return _deepest(part, root, f"{at}{path}", is_refused)
    for key in sorted(schema, key=lambda name: not name.startswith(("min", "max"))):  # bounds of what the others describe come first
        rest = {**shared, **{name: value for name, value in schema.items() if name != key}}
        if key not in shared and key not in {"$comment", "type"} and not is_refused(rest):
            return f"{at}.{key}"
    return at


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in schema.items():
        match value:
            case dict() if key in {"properties", "patternProperties", "$defs", "definitions"} and (key[0] != "d" or schema is root):
                for name, part in cast("dict[str, Any]", value).items():
                    if isinstance(part, dict):
                        yield f".{key}.{name}", cast("dict[str, Any]", part)
            case dict() if key in {"items", "additionalProperties"}:
                yield f".{key}", cast("dict[str, Any]", value)
            case list() if key in {"anyOf", "allOf", "prefixItems", "items"}:
                for place, part in enumerate(cast("list[Any]", value)):
                    if isinstance(part, dict):
                        yield f".{key}[{place}]", cast("dict[str, Any]", part)
            case _:
                pass
