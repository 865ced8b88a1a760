"""Each message is read as it was written, and every field of the schema is in some message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from tests.fakes.wire_examples import MODULES, Example, examples

EXAMPLES = examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_message_is_read_as_it_was_written(example: Example) -> None:
    assert example.read(example.write()) == example.value


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
