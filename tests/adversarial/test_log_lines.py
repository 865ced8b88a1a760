"""What clients write into their requests begins no line of the log, and commands no terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.fakes.scripted_encoder import ScriptedEncoders
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.cli.logs import OneLine
from paceline.server.app import create_app

HOSTILE = "x\nforged line\r\x1b]0;title\x07\u202ey"
RAW = "\r\x1b\x07\u202e"
ASKED: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "content": "hi",
    "tokens": [1],
    "max_tokens": 1,
    "max_output_tokens": 1,
    "options": {"num_predict": 1},
}
"""Enough for each path: what one does not know, it ignores."""
DOCUMENT = create_app(ScriptedInference(), encoders=ScriptedEncoders()).openapi()
DEEPEST = 6


def strings_in(schema: Mapping[str, Any], depth: int = 0) -> Iterator[Any]:
    """Yield a value for each string of a schema: what leads to it, and a hostile text in its place."""
    if (name := schema.get("$ref", "").rpartition("/")[2]) and depth < DEEPEST:
        yield from strings_in(DOCUMENT["components"]["schemas"][name], depth)
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from strings_in(branch, depth)
    if schema.get("type") == "string" or not schema or "const" in schema or "enum" in schema:
        yield HOSTILE
    if depth < DEEPEST:
        known = {key: part["const"] for key, part in schema.get("properties", {}).items() if "const" in part}  # what tells branches apart
        for key, part in schema.get("properties", {}).items():
            yield from ({**known, key: value} for value in strings_in(part, depth + 1))
        for value in strings_in(schema["items"], depth + 1) if isinstance(schema.get("items"), dict) else ():
            yield [value]
        if schema.get("additionalProperties") not in (None, False):
            yield {HOSTILE: HOSTILE}


def bodies(path: str) -> list[dict[str, Any]]:
    (content,) = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    return [ASKED | one for one in strings_in(content["schema"]) if isinstance(one, dict)]


PATHS = sorted(path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {}))


@pytest.fixture(scope="module")
def live() -> Iterator[Served[ScriptedInference]]:
    served = Served(ScriptedInference(max_context=4096), encoders=ScriptedEncoders())
    yield served
    served.close()


@pytest.mark.parametrize("path", PATHS)
def test_no_string_of_a_request_is_raw_in_the_log(live: Served[ScriptedInference], path: str, capfd: pytest.CaptureFixture[str]) -> None:
    asked, said = bodies(path), io.StringIO()
    handler, root = logging.StreamHandler(said), logging.getLogger()
    handler.setFormatter(OneLine())
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.DEBUG)
    try:
        for body in [*asked, ASKED | {HOSTILE: HOSTILE}]:
            live.http.post(path, json=body)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert len(asked) > 1
    shown = said.getvalue() + "".join(capfd.readouterr())
    assert shown
    assert not any(mark in shown for mark in RAW)
    assert not any(line.startswith("forged") for line in shown.splitlines())
