"""Grammars of keyword arguments as Python writes them, by a JSON schema. What one allows, `python_call` reads as that JSON.

Truth values and None, where an argument is one of them, are written as Python does. Within lists and dictionaries JSON is written, which Python's
models know too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.server.formats.lax_grammar import EMPTY, Lark
from paceline.server.formats.leaves import Leaf, free_members, leaves, listed_values, members, place_of
from paceline.server.formats.schema_types import leaf_types

_WORDS = {True: "True", False: "False", None: "None"}
_NAMED = {"boolean": ("True", "False"), "null": ("None",)}


def python_arguments(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Return an expression for the arguments of a tool, between the parentheses."""
    some = leaves(
        {"type": "object"} | dict(schema) if not {"type", "$ref", "anyOf", "allOf"} & schema.keys() else schema, schema, place_of(schema)
    )
    return lark.rule(" | ".join(_arguments(lark, leaf, schema) for leaf in some))


def _arguments(lark: Lark, leaf: Leaf, root: Mapping[str, Any]) -> str:
    named = members(leaf)
    if not named:
        free = free_members(leaf)
        if free is False:
            return EMPTY
        value = lark.json({}) if free in (True, {}) else _value(lark, free, root, f"{leaf.at}.additionalProperties")
        any_one = lark.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {value}')
        return f'({any_one} (", " {any_one})*)?'
    later = first = ""
    for key, schema, at, is_required in reversed(named):
        argument = f"{lark.quoted(key + '=')} {_value(lark, schema, root, at)}"
        first = lark.rule(f"{argument} {later}" if is_required else f"{argument} {later} | {first or EMPTY}")
        later = lark.rule(f'", " {argument} {later}' if is_required else f'(", " {argument})? {later}')
    return first


def _value(lark: Lark, schema: object, root: Mapping[str, Any], at: str) -> str:
    options: list[str] = []
    for leaf in leaves(schema, root, at):
        if (values := listed_values(leaf)) is not None:
            options += [_constant(lark, value) for value in values]
            continue
        types = leaf_types(leaf.fields)
        options += [lark.quoted(word) for kind in sorted(types & _NAMED.keys()) for word in _NAMED[kind]]
        if not types or (types := types - _NAMED.keys()):
            defs = {name: root[name] for name in ("$defs", "definitions") if name in root}
            options.append(lark.json({**defs, **leaf.fields, **({"type": sorted(types)} if types else {})}, leaf.at))
    return lark.rule(" | ".join(options))


def _constant(lark: Lark, value: object) -> str:
    if value is None or isinstance(value, bool):
        return lark.quoted(_WORDS[value])
    return lark.quoted(json.dumps(value, ensure_ascii=False))
