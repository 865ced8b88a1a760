"""Arguments as Python writes them become JSON: numbers, strings with a prefix, and escapes."""

from __future__ import annotations

import json
import math

import pytest

from paceline.server.formats.cursor import Cursor
from paceline.server.formats.python_call import read_python_arguments


def read(text: str, step: int) -> tuple[str, bool | None]:
    """Return the JSON of arguments that come in pieces of so many letters, and whether they are whole."""
    cursor, said, whole = Cursor(), list[str](), None
    reading = read_python_arguments(cursor, ("x", "y"), lambda: None, said.append)
    try:
        for at in range(0, len(text), step):
            cursor.feed(text[at : at + step])
            next(reading)
        cursor.end()
        next(reading)
    except StopIteration as end:
        whole = end.value
    return "".join(said), whole


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (".5", 0.5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1.e3", 1000.0),
        ("1_000", 1000),
        ("+5", 5),
        ("0x10", 16),
        ("0b101", 5),
        ("0o17", 15),
        ("-0xFF", -255),
        ("1e5", 1e5),
        ("007", "007"),
        ("0", 0),
        ("12a", "12a"),
        ("1.2.3", "1.2.3"),
        ("True", True),
        (r'r"a\d"', r"a\d"),
        (r"R'C:\new'", r"C:\new"),
        (r'r"a\"b"', r"a\"b"),
        (r'rb"\x"', r"\x"),
        ('f"a{b}"', "a{b}"),
        ('b"a"', "a"),
        (r'"\U0001F600"', "\U0001f600"),
        (r'"\101\60!"', "A0!"),
        (r'"\a\v\0"', "\a\v\0"),
        (r'"\UFFFFFFFF"', r"\UFFFFFFFF"),
        (r'"\u00e9\x41"', "éA"),
    ],
)
def test_a_value_is_what_python_reads(value: str, meant: object, step: int) -> None:
    for text, names in ((f"x={value})", ["x"]), (f"x=[{value}, 1], y={value})", ["x", "y"])):
        said, whole = read(text, step)
        found = json.loads(said)
        assert whole, said
        assert list(found) == names
        got = found["x"] if names == ["x"] else found["x"][0]
        assert got == meant
        assert type(got) is type(meant) or (isinstance(meant, float) and math.isclose(float(got), meant))


@pytest.mark.parametrize("text", ['x=q"a")', "x=1 2)", 'x=r"a"b)', 'x={"a": q"b"})'])
def test_two_values_without_a_comma_are_no_finished_call(text: str) -> None:
    assert not read(text, 1)[1]


def test_no_digit_of_a_number_is_lost() -> None:
    assert read("x=+0.12345678901234567890123, y=1_2345678901234567890)", 7)[0] == (
        '{"x": 0.12345678901234567890123, "y": 12345678901234567890}'
    )
