"""Schemas of OpenAPI documents: what they say in words of their own, and what is data and stays."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.server.formats.schema import followed_schema


@pytest.mark.parametrize(
    ("schema", "followed"),
    [
        ({"type": "string", "format": "int64"}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "null", "nullable": True}, {"type": "null"}),
        (
            {"oneOf": [{"format": "x"}], "discriminator": {"propertyName": "kind"}},
            {"anyOf": [{}]},
        ),
        (
            {"$ref": "#/$defs/a", "description": "b", "nullable": True, "minLength": 1, "$defs": {"a": {"format": "x"}}},
            {"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": {}}},
        ),
        ({"oneOf": [{"type": "string"}], "nullable": True, "example": 1}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"anyOf": [{"type": "null"}], "nullable": True}, {"anyOf": [{"type": "null"}]}),
        ({"oneOf": [{"type": "string"}]}, {"anyOf": [{"type": "string"}]}),
        ({"const": {"format": "x", "nullable": True, "type": "a"}}, {"const": {"format": "x", "nullable": True, "type": "a"}}),
        ({"default": {"format": "x"}, "enum": [{"format": "x"}]}, {"default": {"format": "x"}, "enum": [{"format": "x"}]}),
        (
            {"properties": {"format": {"format": "x"}, "enum": {"format": "x"}, "nullable": True}},
            {"properties": {"format": {}, "enum": {}, "nullable": True}},
        ),
        (
            {"components": {"schemas": {"const": {"format": "x"}}}, "$ref": "#/components/schemas/const"},
            {"components": {"schemas": {"const": {}}}, "$ref": "#/components/schemas/const"},
        ),
        ({"items": [{"format": "x"}, True]}, {"items": [{}, True]}),
    ],
)
def test_a_schema_as_it_is_followed(schema: dict[str, Any], followed: dict[str, Any]) -> None:
    assert followed_schema(schema) == followed
    assert followed_schema(followed) == followed
