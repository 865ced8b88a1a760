"""A client's JSON schema, as the compiler of grammars takes it; what can't be followed is refused with the path of its keyword.

Laws:
- What comes out allows no value that the schema does not allow, but for `oneOf` next to a `discriminator`, which is read as `anyOf`.
- A keyword is dropped only if it allows everything, or says nothing of the value.
- Data (`enum`, `const`, `default`, examples) and names of properties are never touched. What comes out comes out again unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import combinations, permutations
from typing import Any, Final, cast

from paceline.core.errors import InvalidRequest
from paceline.server.formats.patterns import without_look_around
from paceline.server.formats.schema_shapes import BY_NAME, LARGEST, LISTS, as_list, as_object, check_shapes, refusal_of
from paceline.server.formats.schema_types import TYPES, resolve_reference
from paceline.server.formats.schema_values import excluding, merged, tell_apart, types_of, values_of

Schema = dict[str, Any]
FORMATS: Final = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are followed. All others say something to the reader, and allow every string."""
_DATA: Final = frozenset({"enum", "const", "default", "example", "examples"})
_SAYS_NOTHING: Final = frozenset(
    {
        *(
            "nullable",
            "discriminator",
            "example",
            "xml",
            "externalDocs",
            "$schema",
            "$comment",
            "$dynamicAnchor",
            "$recursiveAnchor",
            "$vocabulary",
        ),
        *("contentSchema", "contentMediaType", "contentEncoding"),
    }
)
"""Keywords that constrain no value by themselves. The compiler takes some of them for constraints."""
_SAID: Final = _DATA - {"enum", "const"} | {"title", "description", "deprecated", "readOnly", "writeOnly"}
"""Next to a `$ref` the compiler would not take these where the reference is circular."""
_NULL: Final = {"type": "null"}
_ONE: Final = frozenset({"items", "additionalProperties", "additionalItems"})
_BRANCHES: Final = frozenset({"anyOf", "oneOf", "allOf", "$ref", "if", "then", "else", "not", "dependentSchemas"})
_LONG: Final = 10**18
"""From here on a bound needs another one on its other side."""
_MOST_MULTIPLE: Final = 10_000
"""Largest `multipleOf`, as its digits without the point. Raising it: one form takes seconds to compile, while others wait; lowering it: refuses more
schemas."""
_MOST_RESOLVED: Final = 10_000
"""Schemas that are looked into while branches are compared and values listed: references multiply them. Raising it: such a request takes a thread longer."""
_ENDLESS: Final = 1 << 24
"""Letters, items or properties that no answer reaches: a maximum beyond it allows everything."""
_ARRANGED, _CHOSEN = 400, 1000
"""Arrays that `uniqueItems` is written out as: in any order, or else in the order of their values. Raising them: larger grammars."""


def followed_schema(schema: Mapping[str, Any], at: str = "schema") -> Schema:
    """Rewrite a schema to the keywords that are supported.

    Args:
        at: its place in the request, as errors name it.

    Raises:
        InvalidRequest: it is nested too deep, or a keyword can't be followed; `field` is the keyword's path.
    """
    try:
        found = _Following(schema, check_shapes(schema, at)).follow(schema, at)
    except RecursionError:
        raise InvalidRequest(f"{at}: it is nested too deep", "Send a flatter one.", field=at) from None
    if found is False:
        raise refusal_of(at, "it allows nothing", "Send one that something is of.")
    return found if isinstance(found, dict) else {}


class _Following:
    """One schema with valid values of all its keywords."""

    def __init__(self, root: Mapping[str, Any], used: frozenset[str]) -> None:
        """Args: used: names on the way of its references."""
        self._root, self._used = root, used
        self._left = _MOST_RESOLVED

    def follow(self, schema: object, at: str) -> Schema | bool:
        """Rewrite a schema, or a part of one."""
        if isinstance(schema, bool):
            return schema
        given = cast("Schema", schema)
        found: Schema = {key: self._part(key, value, at) for key, value in given.items() if key not in _SAYS_NOTHING}
        for rewrite in (self._reference, self._strings, _numbers, _counts, self._contains, self._names, self._dependencies):
            rewrite(found, at)
        self._branches(found, given, at)
        self._unevaluated(found, at)
        if self._is_negated_away(found, at):
            return False
        return self._unique(found, at)

    def _part(self, key: str, value: object, at: str) -> object:
        inside = f"{at}.{key}"
        if key == "components" and isinstance(value, dict) and "schemas" in value:
            components = cast("Schema", value)
            return {**components, "schemas": self._part("$defs", components["schemas"], f"{inside}.schemas")}
        if key in BY_NAME:
            return {
                name: self.follow(part, f"{inside}.{name}") if key.endswith("roperties") or name in self._used else part
                for name, part in as_object(value, inside).items()
            }
        if key in LISTS or (key == "items" and isinstance(value, list)):
            return [self.follow(part, f"{inside}[{place}]") for place, part in enumerate(as_list(value, inside))]
        return self.follow(value, inside) if key in _ONE else value

    def _resolved(self, schema: object) -> Schema:
        """Return what a schema says, behind its references and next to them. Where a chain of them is long, or too many were, that is not known."""
        beside: Schema = {}
        self._left -= 1
        for _ in range(16 if self._left > 0 else 0):
            match schema:
                case {"$ref": str(where), **rest}:
                    beside = _both(cast("Schema", rest), beside)
                    schema = resolve_reference(where, self._root)
                case dict():
                    return _both(cast("Schema", schema), beside)
                case True:
                    return beside
                case _:
                    break
        return {"allOf": [schema]}

    def _reference(self, found: Schema, at: str) -> None:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in found:
                raise refusal_of(f"{at}.{keyword}", "this reference can't be followed", "Send a $ref within the schema.")
        if "$ref" not in found:
            return
        where = found["$ref"]
        if not isinstance(where, str) or not where.startswith("#"):
            raise refusal_of(f"{at}.$ref", "only references within the schema are followed", "Put what it leads to into $defs.")
        if where.startswith("#/") and not isinstance(resolve_reference(where, self._root), dict | bool):
            raise refusal_of(f"{at}.$ref", "the reference leads nowhere", "Put what it leads to into $defs.")
        for key in _SAID & found.keys():
            del found[key]

    def _strings(self, found: Schema, at: str) -> None:
        if found.get("format") not in FORMATS:
            found.pop("format", None)
        if "pattern" not in found:
            return
        pattern = cast("str", found["pattern"])
        parts = without_look_around(pattern)
        if parts is None:
            raise refusal_of(f"{at}.pattern", "look-around is followed only at the beginning of an expression, and not if it is nested")
        if parts == []:
            del found["pattern"]
        elif parts != [pattern]:
            del found["pattern"]
            found["allOf"] = [*found.get("allOf", ()), *({"pattern": part} for part in parts)]

    def _contains(self, found: Schema, at: str) -> None:
        least, most = found.pop("minContains", 1), found.pop("maxContains", None)
        if "contains" not in found:
            return
        if self.follow(found["contains"], f"{at}.contains") in ({}, True):
            found["minItems"] = max(found.get("minItems", 0), least)
            if most is not None:
                found["maxItems"] = min(found.get("maxItems", most), most)
        elif least != 0 or most is not None:
            raise refusal_of(f"{at}.contains", "it can't be followed", "Describe all items by items.")
        del found["contains"]

    def _names(self, found: Schema, at: str) -> None:
        """`propertyNames`, as properties or as an expression."""
        if "propertyNames" not in found:
            return
        place = f"{at}.propertyNames"
        given = found.pop("propertyNames")
        names = False if given is False else self.follow(self._resolved(given), place)
        rest = names.keys() - _SAID - {"$comment", "type"} if isinstance(names, dict) else set[str]()
        if isinstance(names, dict) and (values := values_of(names, self._resolved)) is not None:
            allowed = [value for value in values if isinstance(value, str)]
        elif names is False or "string" not in types_of(names, self._resolved):
            allowed = []
        elif not rest:
            return
        else:
            self._matching_names(found, cast("Schema", names), rest, place)
            return
        if "patternProperties" in found:
            raise refusal_of(place, "it can't be followed next to patternProperties")
        properties = cast("Schema", found.get("properties", {}))
        others = found.get("additionalProperties", True)
        found["properties"] = {name: properties.get(name, others) for name in [*(n for n in properties if n in allowed), *allowed]}
        found["additionalProperties"] = False

    def _matching_names(self, found: Schema, names: Schema, rest: Iterable[str], place: str) -> None:
        """`propertyNames` of an expression or of bounds."""
        keys = set(rest)
        if keys <= {"minLength", "maxLength"}:
            pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        elif keys == {"pattern"}:
            pattern = cast("str", names["pattern"])
        else:
            raise refusal_of(
                place, "it is followed only if it is an enum, a const, a pattern, or bounds of the length", "Send one of them."
            )
        if found.get("properties") or "patternProperties" in found:
            raise refusal_of(
                place, "a pattern can't be followed next to properties or patternProperties", "Send patternProperties instead."
            )
        found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
        found["additionalProperties"] = False

    def _dependencies(self, found: Schema, at: str) -> None:
        required = set(cast("list[Any]", found.get("required") or []))
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if keyword not in found:
                continue
            for name, wanted in as_object(found.pop(keyword), f"{at}.{keyword}").items():
                is_closed = found.get("additionalProperties") is False and name not in found.get("properties", {})
                free = set(cast("list[Any]", wanted)) <= required if isinstance(wanted, list) else wanted in ({}, True)
                if not free and (not is_closed or "patternProperties" in found):
                    raise refusal_of(f"{at}.{keyword}.{name}", "it can't be followed", "List what belongs together as branches of anyOf.")

        is_open = found.get("additionalProperties") is not False or "patternProperties" in found
        if is_open and found.get("minProperties", 0) > len(required) + 1:
            why = "it can't be followed where properties have any name: one may come twice"
            raise refusal_of(f"{at}.minProperties", why, "List what is required.")

    def _branches(self, found: Schema, given: Mapping[str, Any], at: str) -> None:
        """`oneOf`, `nullable`, and conditions that decide nothing."""
        condition, outcomes = found.pop("if", None), [found.pop("then", True), found.pop("else", True)]
        if condition is not None and not all(outcome in ({}, True) for outcome in outcomes):
            raise refusal_of(f"{at}.if", "conditions can't be followed", "List the cases as branches of anyOf.")
        if found.get("allOf") == []:
            del found["allOf"]
        if "oneOf" in found:
            branches = cast("list[Any]", found.pop("oneOf"))
            kind = {"type": found["type"]} if "type" in found else {}
            typed = [{**kind, **cast("Schema", branch)} if isinstance(branch, dict) else branch for branch in branches]
            if "discriminator" not in given and not (are_apart := tell_apart(typed, self._resolved)):
                why = "nothing tells its branches apart: no type, and no const or enum of a property that all require"
                why = "it has too many branches to compare" if are_apart is None else why
                raise refusal_of(f"{at}.oneOf", why, "Write anyOf.")
            if "anyOf" in found:
                found["allOf"] = [*found.get("allOf", ()), {"anyOf": branches}]
            else:
                found["anyOf"] = branches
        if given.get("nullable") is not True:
            return
        match found:
            case {"type": str(kind)} if kind != "null":
                found["type"] = [kind, "null"]
            case {"anyOf": list(branches)} if _NULL not in branches and "type" not in found:
                found["anyOf"] = [*cast("list[object]", branches), _NULL]
            case _:
                pass

    def _unevaluated(self, found: Schema, at: str) -> None:
        for keyword, plain, needs in (("unevaluatedProperties", "additionalProperties", ()), ("unevaluatedItems", "items", ("contains",))):
            if keyword not in found:
                continue
            value = self.follow(found.pop(keyword), f"{at}.{keyword}")
            if value in ({}, True) or plain in found:
                continue
            if _BRANCHES & found.keys() or any(need in found for need in needs):
                raise refusal_of(
                    f"{at}.{keyword}", "it can't be followed next to branches or references", f"Write {plain} into each of them."
                )
            found[plain] = value

    def _is_negated_away(self, found: Schema, at: str) -> bool:
        """`not`, where it can be written as what is left. Returns whether nothing is left."""
        if "not" not in found:
            return False
        given = found.pop("not")
        negated = given if isinstance(given, bool) else self.follow(self._resolved(given), f"{at}.not")
        if negated is False:
            return False
        if negated is True or not negated.keys() - _SAID - {"$comment"}:
            return True
        own, ruled_out = values_of(found, self._resolved), values_of(negated, self._resolved)
        if own is not None and ruled_out is not None:
            found.pop("const", None)
            found["enum"] = excluding(own, ruled_out)
            return not found["enum"]
        without, kinds = types_of(negated, self._resolved), _kinds(found)
        if not negated.keys() - _SAID - {"$comment", "type"} and not ("integer" in without and "number" in kinds):
            left = [kind for kind in kinds if kind not in without and not (kind == "integer" and "number" in without)]
            found["type"] = left
            return not left
        raise refusal_of(f"{at}.not", "it can't be followed", "Say what is allowed instead.")

    def _unique(self, found: Schema, at: str) -> Schema:
        """`uniqueItems`, written out as the arrays that it allows."""
        if not found.pop("uniqueItems", False):
            return found
        if found.get("maxItems", 2) <= 1 or (isinstance(kinds := found.get("type"), str) and kinds != "array"):
            return found
        values = None if "prefixItems" in found or "type" not in found else values_of(found.get("items", {}), self._resolved)
        if values is None or found["type"] != "array":
            raise refusal_of(
                f"{at}.uniqueItems",
                "it is followed only for a few items that are listed, as by enum",
                "List them, or leave the keyword out.",
            )
        sizes = range(found.get("minItems", 0), min(found.get("maxItems", len(values)), len(values)) + 1)
        ways: Callable[[Sequence[object], int], Iterable[tuple[object, ...]]] = permutations
        if sum(math.perm(len(values), size) for size in sizes) > _ARRANGED:
            ways = combinations
            if sum(math.comb(len(values), size) for size in sizes) > _CHOSEN:
                raise refusal_of(
                    f"{at}.uniqueItems", f"{len(values)} items make too many arrays", "Leave the keyword out, or lower maxItems."
                )
        said = {key: value for key, value in found.items() if key not in {"type", "items", "minItems", "maxItems"}}
        return {**said, "enum": [list(array) for size in sizes for array in ways(values, size)]}


def _both(one: Schema, other: Schema) -> Schema:
    found = merged(one, other)
    return {"allOf": [one, other]} if found is None else found


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the types that a schema lists; all of them if it lists none."""
    kind = schema.get("type", [name for name in TYPES if name != "integer"])
    return [kind] if isinstance(kind, str) else kind


def _numbers(found: Schema, at: str) -> None:
    """Move bounds of numbers to what is followed, and bound those that are open far from 0."""
    for side, sign in (("inimum", 1), ("aximum", -1)):
        for keyword in (f"m{side}", f"exclusiveM{side}"):
            if keyword not in found or isinstance(found[keyword], bool):
                continue
            bound = cast("int | float", found[keyword])
            if sign * bound > LARGEST:
                raise refusal_of(f"{at}.{keyword}", "no number of 64 bits is within it", "Send a bound within 64 bits.")
            if sign * bound < -LARGEST:
                del found[keyword]
                found[f"m{side}"] = sign * max(-LARGEST, sign * found.get(f"m{side}", -sign * LARGEST))
            elif isinstance(bound, int) and int(float(bound)) != bound:
                found[keyword] = (
                    int(math.nextafter(float(bound), sign * math.inf)) if sign * float(bound) < sign * bound else int(float(bound))
                )
    lower, upper = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    if any(found.get(key, 0) >= _LONG for key in lower) and not any(key in found for key in upper):
        found["maximum"] = LARGEST
    if any(found.get(key, 0) <= -_LONG for key in upper) and not any(key in found for key in lower):
        found["minimum"] = -LARGEST
    multiple = found.get("multipleOf", 1)
    if multiple > _MOST_MULTIPLE or int("".join(map(str, Decimal(str(multiple)).as_tuple().digits))) > _MOST_MULTIPLE:
        raise refusal_of(f"{at}.multipleOf", f"its digits are a number above {_MOST_MULTIPLE}", "Send a smaller one, or leave it out.")
    if multiple == 1 and "multipleOf" in found and "number" not in _kinds(found):
        del found["multipleOf"]


def _counts(found: Schema, at: str) -> None:
    """Lengths and counts: whole numbers, however they are written."""
    for noun in ("Length", "Items", "Properties", "Contains"):
        for keyword in (f"min{noun}", f"max{noun}"):
            if keyword not in found:
                continue
            count = found[keyword] = int(found[keyword])
            if keyword == f"min{noun}" and count == 0 and noun != "Contains":
                del found[keyword]
            if count > _ENDLESS and keyword == f"min{noun}":
                raise refusal_of(f"{at}.{keyword}", f"no answer has more than {_ENDLESS}", "Send a smaller one.")
            if count > _ENDLESS:
                del found[keyword]
