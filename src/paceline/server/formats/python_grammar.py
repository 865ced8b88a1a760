"""Grammars of keyword arguments as Python writes them, by a JSON schema. What one allows, `python_call` reads as that JSON.

Truth values and None, where an argument is one of them, are written as Python does. Within lists and dictionaries JSON is written, which Python's
models know too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from paceline.server.formats.lax_grammar import Lark
from paceline.server.formats.schema_types import alternatives, leaf_types

_WORDS = {True: "True", False: "False", None: "None"}
_NAMED = {"boolean": ("True", "False"), "null": ("None",)}


def python_arguments(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Return an expression for the arguments of a tool, between the parentheses."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        if schema.get("additionalProperties") is False or isinstance(properties, Mapping):
            return ""
        any_one = lark.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {lark.json({})}')
        return f'({any_one} (", " {any_one})*)?'
    required = schema.get("required")
    needed = frozenset(cast("Sequence[str]", required) if isinstance(required, list) else ())
    later = first = ""
    for key, value in reversed(list(cast("Mapping[str, Any]", properties).items())):
        argument = f"{lark.quoted(key + '=')} {_value(lark, value, schema)}"
        first = lark.rule(f"{argument} {later}" if key in needed else f"{argument} {later} | {first or lark.quoted('')}")
        later = lark.rule(f'", " {argument} {later}' if key in needed else f'(", " {argument})? {later}')
    return first


def _value(lark: Lark, schema: object, root: Mapping[str, Any]) -> str:
    options: list[str] = []
    for leaf in alternatives(schema, root):
        values = [leaf["const"]] if "const" in leaf else leaf.get("enum")
        if isinstance(values, list):
            options += [_constant(lark, value) for value in cast("list[object]", values)]
            continue
        types = leaf_types(leaf)
        options += [lark.quoted(word) for kind in sorted(types & _NAMED.keys()) for word in _NAMED[kind]]
        if not types or (types := types - _NAMED.keys()):
            defs = {name: root[name] for name in ("$defs", "definitions") if name in root}
            options.append(lark.json({**defs, **leaf, **({"type": sorted(types)} if types else {})}))
    return lark.rule(" | ".join(options))


def _constant(lark: Lark, value: object) -> str:
    if value is None or isinstance(value, bool):
        return lark.quoted(_WORDS[value])
    return lark.quoted(json.dumps(value, ensure_ascii=False))
