"""Checks that every keyword of a client's JSON schema has the form that it must have, before anything else reads the schema.

Law: behind `check_shapes` no reader of the schema meets a value of a form that it does not expect, wherever a reference leads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from paceline.core.errors import InvalidRequest
from paceline.server.formats.schema_types import TYPES, resolve_reference, steps_of

LARGEST: Final = 9_223_372_036_854_774_784
"""The largest 64-bit integer that a double holds."""
_DEEP: Final = 200
"""Lists and objects within one another. Raising it: what goes over a schema by recursion runs out of Python's stack."""
_MOST_VALUES: Final = 200_000
"""Maximum number of values in a schema. Raising it: a request takes a thread for seconds, for a grammar that is too long in the end."""
_MOST_BITS: Final = 4096
"""Maximum number of bits of an integer anywhere in a schema. Raising it far: Python writes no integer of more than 4,300 digits."""
BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_UNUSED: Final = frozenset({"$defs", "definitions"})
"""Schemas in these count only if a reference leads to them."""
LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {
        *("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)


def refusal_of(at: str, why: str, hint: str = "Leave the keyword out, or send a schema without it.") -> InvalidRequest:
    """Return the error for a keyword that can't be followed. `at` is its path in the request."""
    return InvalidRequest(f"{at}: {why}", hint, field=at)


def check_shapes(root: object, at: str) -> frozenset[str]:
    """Check a schema, what it is made of, and what its references lead to.

    Args:
        at: its place in the request, as errors name it.

    Returns:
        The names on the way of all references: a schema in `$defs` without one of these names is not used.

    Raises:
        InvalidRequest: a keyword has a value of another form than it must have, or the schema is nested too deep; `field` is the keyword's path.
    """
    used = frozenset(_names_of_references(root, at))
    seen: set[str] = set()
    left = [(root, at)]
    while left:
        schema, place = left.pop()
        if isinstance(schema, bool):
            continue
        fields = as_object(schema, place, "a schema is an object, true or false")
        for keyword, value in fields.items():
            if check := _CHECKS.get(keyword):
                check(value, f"{place}.{keyword}")
            left += _inner(keyword, value, f"{place}.{keyword}", used)
        where = fields.get("$ref")
        if isinstance(where, str) and where not in seen and isinstance(root, dict):
            seen.add(where)
            target = resolve_reference(where, cast("dict[str, Any]", root))
            if target is not None:
                left.append((target, ".".join([at, *steps_of(where)])))
    return used


def _names_of_references(root: object, at: str) -> Iterator[str]:
    left: list[tuple[object, int]] = [(root, 0)]
    count = 0
    while left:
        value, deep = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise InvalidRequest(f"{at}: it has more than {_MOST_VALUES} values", "Send a smaller one.", field=at)
        if deep > _DEEP:
            raise InvalidRequest(f"{at}: it is nested too deep", "Send a flatter one.", field=at)
        match value:
            case dict():
                fields = cast("dict[str, object]", value)
                if isinstance(where := fields.get("$ref"), str):
                    yield from steps_of(where)
                left += [(each, deep + 1) for each in fields.values()]
            case list():
                left += [(each, deep + 1) for each in cast("list[object]", value)]
            case int() if value.bit_length() > _MOST_BITS:
                raise refusal_of(at, "a number in it has too many digits", "Send a shorter one.")
            case _:
                pass


def _inner(keyword: str, value: object, at: str, used: frozenset[str]) -> Iterator[tuple[object, str]]:
    """Yield the schemas that a keyword holds, with their paths."""
    if keyword in BY_NAME or keyword == "dependentSchemas":
        for name, part in as_object(value, at).items():
            if keyword not in _UNUSED or name in used:
                yield part, f"{at}.{name}"
    elif keyword == "components" and isinstance(value, dict) and "schemas" in value:
        yield from _inner("$defs", cast("dict[str, object]", value)["schemas"], f"{at}.schemas", used)
    elif keyword in LISTS or (keyword == "items" and isinstance(value, list)):
        for place, part in enumerate(as_list(value, at)):
            yield part, f"{at}[{place}]"
    elif keyword in _SCHEMAS:
        yield value, at
    elif keyword == "dependencies":
        for name, part in as_object(value, at).items():
            if not isinstance(part, list):
                yield part, f"{at}.{name}"


def as_object(value: object, at: str, why: str = "it is an object") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise refusal_of(at, why, "Send one.")
    return cast("Mapping[str, Any]", value)


def as_list(value: object, at: str) -> list[object]:
    if not isinstance(value, list):
        raise refusal_of(at, "it is a list", "Send one.")
    if not value and at.rpartition(".")[2] in {"anyOf", "oneOf"}:
        raise refusal_of(at, "it has no branches, so that nothing is allowed", "List some.")
    return cast("list[object]", value)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number. Integers too large for a double are."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)))


def _is_inexact(value: object) -> bool:
    match value:
        case bool():
            return False
        case int():
            return abs(value) > LARGEST or int(float(value)) != value
        case float():
            return not math.isfinite(value)
        case list():
            return any(map(_is_inexact, cast("list[object]", value)))
        case dict():
            return any(map(_is_inexact, cast("dict[str, object]", value).values()))
        case _:
            return False


def _type(value: object, at: str) -> None:
    kinds = [value] if isinstance(value, str) else value
    if not isinstance(kinds, list) or not kinds or not all(kind in TYPES for kind in cast("list[object]", kinds)):
        raise refusal_of(at, f"a type is one of {', '.join(TYPES)}, or a list of them", "Send one.")


def _values(value: object, at: str) -> None:
    if not isinstance(value, list) or not value:
        raise refusal_of(at, "it lists no value", "List what is allowed.")
    _constant(cast("list[object]", value), at)


def _constant(value: object, at: str) -> None:
    if _is_inexact(value):
        raise refusal_of(at, "numbers beyond 2^53 have no exact double", "Send them as strings.")


def _bound(value: object, at: str) -> None:
    if not is_number(value) and not (isinstance(value, bool) and ".exclusive" in at):  # as draft 4 has it
        raise refusal_of(at, "a bound is a number", "Send one.")


def _multiple(value: object, at: str) -> None:
    if not is_number(value) or cast("float", value) <= 0:
        raise refusal_of(at, "it is a number above 0", "Send one.")


def _count(value: object, at: str) -> None:
    count = cast("float", value)
    if not is_number(value) or count < 0 or count != int(count):
        raise refusal_of(at, "it is a whole number, 0 or more", "Send one.")


def _flag(value: object, at: str) -> None:
    if not isinstance(value, bool):
        raise refusal_of(at, "it is true or false", "Send one of them.")


def _text(value: object, at: str) -> None:
    if not isinstance(value, str):
        raise refusal_of(at, "it is a string", "Send one.")


def _names(value: object, at: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in cast("list[object]", value)):
        raise refusal_of(at, "it is a list of names", "Send one.")


def _names_by_name(value: object, at: str) -> None:
    for name, wanted in as_object(value, at).items():
        if at.endswith("d") or isinstance(wanted, list):  # dependencies may hold schemas, too
            _names(wanted, f"{at}.{name}")


_CHECKS: Final[Mapping[str, Callable[[object, str], None]]] = {
    "type": _type,
    "enum": _values,
    "const": _constant,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    "multipleOf": _multiple,
    **{f"{side}{noun}": _count for side in ("min", "max") for noun in ("Length", "Items", "Properties", "Contains")},
    "uniqueItems": _flag,
    **dict.fromkeys(("pattern", "format"), _text),
    "required": _names,
    **dict.fromkeys(("dependentRequired", "dependencies"), _names_by_name),
}
