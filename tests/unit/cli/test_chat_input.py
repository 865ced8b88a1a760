"""Messages of one and many lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.cli.chat import read_message


def lines(*texts: str) -> Callable[[str], str]:
    left = iter(texts)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two \\", "three"], "one \ntwo \nthree"),
        (['"""', "first", "", "third", '"""'], "first\n\nthird"),
        (['"""first', 'last"""'], "first\nlast"),
        (['"""all of it"""'], "all of it"),
    ],
)
def test_messages(typed: list[str], message: str) -> None:
    assert read_message(lines(*typed), "") == message


def test_the_end_of_input_inside_a_text_is_the_end() -> None:
    with pytest.raises(EOFError):
        read_message(lines('"""', "unfinished"), "")
