"""Take a JSON schema apart for grammars that are not JSON's: into schemas without references and choices, and into members of objects.

Law: what is left allows no value that the schema does not allow. What can't be taken apart so is refused with its path.
Schemas come as `schema.followed_schema` leaves them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from paceline.server.formats.schema_shapes import refusal_of
from paceline.server.formats.schema_types import resolve_reference
from paceline.server.formats.schema_values import NOTHING, merged, values_of

_MOST: Final = 1024
"""Number of schemas that one schema is split into. Raising it: schemas with parts that refer to each other take longer."""
_MOST_REPEATS: Final = 2
_LONGEST_NAME: Final = 64
_MOST_TRIED: Final = 1024
"""Names that are tried against expressions, each pair once: a pair takes 64**3 steps at most. Raising them: a schema takes a thread for longer."""
_LETTER: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATS: Final = re.compile(r"[*+?{]")
_UNTRIED: Final = re.compile(r"\(\?|\)[*+?{]")
"""Look-around and other groups of Python's own, and groups that repeat."""
_OF: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset({"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength", "allOf"}),
}
"""Keywords that are about values of one type."""


class Leaf(NamedTuple):
    """A schema without references and choices; its `allOf` are patterns. One with keywords of a type names its type."""

    fields: dict[str, Any]
    at: str
    """Its path in the request."""


class NamedMember(NamedTuple):
    """A named member of an object."""

    key: str
    schema: object
    at: str
    is_required: bool


def place_of(schema: Mapping[str, Any]) -> str:
    """Return a schema's path in the request."""
    at = schema.get("$comment")
    return at if isinstance(at, str) else "tools"


def leaves(schema: object, root: Mapping[str, Any], at: str) -> list[Leaf]:
    """Return schemas of which a value follows one; one at least.

    Raises:
        InvalidRequest: it can't be taken apart, or allows nothing.
    """
    try:
        if found := _leaves(schema, root, at, [_MOST]):
            return found
    except RecursionError:
        raise refusal_of(at, "it refers to itself again and again", "Send a smaller schema.") from None
    raise refusal_of(at, "it allows nothing", "Leave it out, or send a schema that something is of.")


def _leaves(schema: object, root: Mapping[str, Any], at: str, left: list[int]) -> list[Leaf]:
    """Do so for one schema. `left`: how many may yet be looked at, counted down."""
    left[0] -= 1
    if left[0] < 0:
        raise refusal_of(at, "it has too many choices, or refers to itself alone", "Send a smaller schema.")
    if not isinstance(schema, Mapping):
        return [] if schema is False else [Leaf({}, at)]
    fields = {key: value for key, value in cast("Mapping[str, Any]", schema).items() if key not in NOTHING}
    found: list[Leaf] | None = None
    if "$ref" in fields:
        target = resolve_reference(str(fields.pop("$ref")), root)
        if target is None:
            raise refusal_of(f"{at}.$ref", "the reference leads nowhere", "Put what it leads to into $defs.")
        found = _leaves(target, root, at, left)
    for keyword in ("anyOf", "oneOf"):
        if keyword in fields:
            options = cast("list[object]", fields.pop(keyword))
            listed = [leaf for place, option in enumerate(options) for leaf in _leaves(option, root, f"{at}.{keyword}[{place}]", left)]
            found = listed if found is None else _both(found, listed, at, keyword)
    parts = cast("list[object]", fields.get("allOf", []))
    if "allOf" in fields and not all(isinstance(part, dict) and [*cast("Mapping[str, Any]", part)] == ["pattern"] for part in parts):
        del fields["allOf"]
        for place, part in enumerate(parts):
            one = _leaves(part, root, f"{at}.allOf[{place}]", left)
            found = one if found is None else _both(found, one, at, "allOf")
    rest = [Leaf(_typed(fields), at)]
    return rest if found is None else _both(found, rest, at, "allOf") if fields else found


def _both(some: list[Leaf], others: list[Leaf], at: str, keyword: str) -> list[Leaf]:
    """Return schemas for what each of some, and each of others, allow both."""
    found: list[Leaf] = []
    if len(some) * len(others) > _MOST:
        raise refusal_of(f"{at}.{keyword}", "it has too many choices", "Send a smaller schema.")
    for one in some:
        for other in others:
            kinds, others_kinds = (
                {kinds} if isinstance(kinds := each.fields.get("type", []), str) else set(kinds) for each in (one, other)
            )
            both = kinds | others_kinds if not kinds or not others_kinds else kinds & others_kinds
            if kinds and others_kinds and not both and not {"integer", "number"} <= kinds | others_kinds:
                continue
            fields = merged(one.fields, other.fields)
            if fields is None:
                why = "what stands next to it can't be followed together with it in this model's format"
                raise refusal_of(f"{at}.{keyword}", why, "Write it into each branch.")
            found.append(Leaf(_typed(fields), one.at if len(some) > 1 else other.at))
    return found


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    """Name the types that a schema's keywords are about, if it names none: less is allowed then, and nothing in silence."""
    if {"type", "enum", "const"} & fields.keys():
        return fields
    kinds = [kind for kind, keywords in _OF.items() if keywords & fields.keys()]
    return {**fields, "type": kinds[0] if len(kinds) == 1 else kinds} if kinds else fields


def listed_values(leaf: Leaf) -> list[object] | None:
    """Return the values that `const` or `enum` list. None: there is neither."""
    if not {"const", "enum"} & leaf.fields.keys():
        return None
    values = values_of({**leaf.fields}, lambda fields: cast("Mapping[str, Any]", fields))
    if values is None:
        keyword = next(key for key in leaf.fields if key not in {"const", "enum", "type"})
        raise refusal_of(f"{leaf.at}.{keyword}", "it can't be followed next to enum or const in this model's format")
    return values


def members(leaf: Leaf) -> list[NamedMember]:
    """Return the named members of an object, in order. Where there are none, `free_members` says what others may be.

    Raises:
        InvalidRequest: a keyword can't be followed by naming members.
    """
    fields, at = leaf
    properties = cast("dict[str, object]", fields.get("properties", {}))
    required = cast("list[str]", fields.get("required", []))
    patterns = cast("dict[str, object]", fields.get("patternProperties", {}))
    found = [NamedMember(key, value, f"{at}.properties.{key}", key in required) for key, value in properties.items()]
    others = fields.get("additionalProperties", True)
    found += [
        NamedMember(key, others, f"{at}.additionalProperties", is_required=True) for key in dict.fromkeys(required) if key not in properties
    ]
    if any(member.is_required and member.schema is False for member in found):
        raise refusal_of(f"{at}.required", "it allows nothing: a member that is required may not be there")
    found = [member for member in found if member.schema is not False]
    for pattern in patterns:
        if not found or len(patterns) * len(found) > _MOST_TRIED or any(_may_match(pattern, member.key) for member in found):
            raise refusal_of(f"{at}.patternProperties", "it can't be followed in this model's format", "List names by properties.")
    needed = sum(member.is_required for member in found)
    for keyword, is_followed in (
        ("minProperties", fields.get("minProperties", 0) <= needed),
        ("maxProperties", fields.get("maxProperties", len(found)) >= len(found) and (found or "maxProperties" not in fields)),
    ):
        if not is_followed:
            raise refusal_of(f"{at}.{keyword}", "it can't be followed in this model's format", "List what is required.")
    return found


def free_members(leaf: Leaf) -> object:
    """Return the schema of members of any name, in an object without named ones. False: there are none."""
    named = cast("dict[str, object]", leaf.fields.get("properties", {}))
    return False if named else leaf.fields.get("additionalProperties", True)


def _may_match(pattern: str, name: str) -> bool:
    """Return whether an expression may match a name.

    Python's matcher tries every way through an expression, with the whole process waiting. So only expressions and names that leave it few ways are
    tried; any other may match.
    """
    plain = _LETTER.sub("x", pattern)
    if plain.count("(") > 1 or len(_REPEATS.findall(plain)) > _MOST_REPEATS or _UNTRIED.search(plain) or len(name) > _LONGEST_NAME:
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return True
