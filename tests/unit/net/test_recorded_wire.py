"""Each message is written as it was when its bytes were recorded, and what was recorded is read as it was meant.

A node of any version since then understands it. `make wire` records anew, for a change that old nodes are to refuse by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from tests.fakes.wire_examples import MODULES, Example, examples

RECORDED = Path(__file__).parents[2] / "data" / "wire" / "messages.json"
EXAMPLES = examples()
BYTES: dict[str, str] = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_bytes_are_as_recorded(example: Example) -> None:
    assert example.write().hex() == BYTES[example.name]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_recorded_bytes_mean_what_they_meant(example: Example) -> None:
    assert example.read(bytes.fromhex(BYTES[example.name])) == example.value


def test_what_is_recorded_is_what_there_are_examples_of() -> None:
    assert list(BYTES) == [example.name for example in EXAMPLES]


def test_every_field_of_every_message_is_set_in_some_example() -> None:
    fields = {field.full_name for module in MODULES for kind in module.DESCRIPTOR.message_types_by_name.values() for field in kind.fields}
    said = {field for example in EXAMPLES if example.message for field in _set(example.message.FromString(example.write()))}
    assert sorted(fields - said) == []


def _set(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _set(inner)
