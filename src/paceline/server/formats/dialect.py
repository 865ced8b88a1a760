"""JSON schemas as OpenAPI documents write them, put as the compiler of grammars reads them.

Law: what comes out allows nothing else than the schema, but for `oneOf` beside a `discriminator`, which is read as `anyOf`: the discriminator tells
the branches apart. Data (`enum`, `const`, `default`, examples) and names of properties are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that are followed. All others say something to the reader, and allow every string."""
_DATA = frozenset({"enum", "const", "default", "example", "examples"})
_OPENAPI = frozenset({"nullable", "discriminator", "example", "xml", "externalDocs"})
"""No keywords of JSON Schema: the compiler takes a schema with them for one that says two things."""
_SAID = _DATA - {"enum", "const"} | {"title", "description", "deprecated", "readOnly", "writeOnly"}
"""What says nothing of the text: beside a `$ref` the compiler would not take it where the reference is circular."""
_NULL = {"type": "null"}
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "schemas"})


def as_followed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without formats that are not followed, and with `nullable` and discriminated `oneOf` in JSON Schema's own words.

    Raises:
        RecursionError: it is nested too deep.
    """
    found = {key: value if key in _DATA else _inside(key, value) for key, value in schema.items() if key not in _OPENAPI}
    if "$ref" in found:
        found = {key: value for key, value in found.items() if key not in _SAID}
    if isinstance(form := found.get("format"), str) and form not in _FORMATS:
        del found["format"]
    if "discriminator" in schema and "oneOf" in found and "anyOf" not in found:
        found["anyOf"] = found.pop("oneOf")
    if schema.get("nullable") is True:
        match found:
            case {"type": str(kind)} if kind != "null":
                found["type"] = [kind, "null"]
            case {"anyOf": list(branches)} | {"oneOf": list(branches)} if _NULL not in branches and "type" not in found:
                found["anyOf" if "anyOf" in found else "oneOf"] = [*cast("list[object]", branches), _NULL]
            case _:
                pass
    return found


def _inside(key: str, value: object) -> object:
    match value:
        case dict():
            inner = cast("dict[str, Any]", value)
            return {name: _inside("", part) for name, part in inner.items()} if key in _BY_NAME else as_followed(inner)
        case list():
            return [_inside("", part) for part in cast("list[object]", value)]
        case _:
            return value
