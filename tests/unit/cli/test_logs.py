from __future__ import annotations

import logging
import sys

import pytest

from paceline.cli.logs import OneLine

HOSTILE = [
    "a\nmallory joined from ipv4:1.2.3.4:5", "a\r\nb", "\x1b]0;title\x07", "\x9b31m", "\u202eabc", "a\u2028b", "\x00", "\x7f", "\ud800", "a\x85b", "a\x0bb\x0cc", "a\tb",
]  # fmt: skip


def line_of(name: str, message: str, *args: object, exc_info: object = None) -> str:
    return OneLine().format(logging.LogRecord(name, logging.INFO, "", 1, message, args, exc_info))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_message_is_one_plain_line_whatever_is_in_it(text: str) -> None:
    for line in (line_of("paceline.x", "said %s", text), line_of("paceline.x", text), line_of("uvicorn", "%(a)s", {"a": text})):
        assert line.isprintable()
        line.encode()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["paceline.x", "grpc._cython.cygrpc"])
def test_no_line_of_a_traceback_looks_like_another_message(name: str, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        lines = line_of(name, "failed", exc_info=sys.exc_info()).splitlines()
    assert all(line.startswith("  ") for line in lines[1:])
    assert all(line.replace("\t", "").isprintable() for line in lines)
    assert len(lines) == 1 or not name.startswith("grpc")


def test_plain_text_of_any_language_stays() -> None:
    assert line_of("x", "Größe %s C:\\new 日本", "a b") == "Größe a b C:\\new 日本"
