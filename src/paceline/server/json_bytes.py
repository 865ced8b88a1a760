"""JSON of what a client or a model wrote, in and out: with whole numbers of any size, which orjson does not take."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson
from pydantic_core import from_json


def json_bytes(value: object) -> bytes:
    """A value as JSON."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is. None: it is none, or nested too deep."""
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
