"""Messages about refused grammars, in words that need no knowledge of the library; and the search for the keyword of a schema to blame.

Law: no text of the library reaches a client, except its sentences on regular expressions, which are about the client's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from paceline.core.generation import Grammar, GrammarKind

TRIES: Final = 200
"""Compilations to find the keyword to blame, at most. Raising it: larger schemas are searched completely, and their refusals take longer."""
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
"""Our messages, by expressions for the library's; the first expression that matches counts."""


class GrammarRefusal(NamedTuple):
    """The reason why a grammar can't be followed."""

    why: str
    """The reason, in one line."""
    at: str = ""
    """Path of the keyword to blame in the request; empty if it is not known."""
    is_of_compiler: bool = False
    """The compiler refused the grammar, so compiling its parts can find the keyword to blame."""


def in_own_words(text: str) -> str:
    """Return the message for clients that stands for a refusal of the library."""
    for theirs, ours in _WORDS.items():
        if match := re.search(theirs, text):
            return ours.format(*match.groups())
    return "it can't be followed"


def place_to_blame(grammar: Grammar, compiles: Callable[[Mapping[str, Any]], bool]) -> str:
    """Find the keyword for which a grammar is refused, by compiling parts of it. Only a process that may be ended by a grammar should do this.

    Args:
        compiles: returns whether the library accepts a schema on its own.

    Returns:
        The keyword's path, or else the result of `place_to_name`.
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
    """Yield the schemas of a grammar that have a comment with their place in the request."""
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
    """Return the path of the smallest part that is refused on its own, extended by the keyword without which that part is accepted."""
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
