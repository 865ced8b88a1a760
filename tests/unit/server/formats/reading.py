"""Reads answers in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.server.formats.format import CallArguments, Content, Format, Part, Reasoning
from paceline.server.formats.reader import AnswerReader


def joined(parts: Iterable[Part]) -> list[Part]:
    """Parts with their neighbours of one kind in one."""
    whole: list[Part] = []
    for part in parts:
        match whole, part:
            case [*_, Content(text)], Content(more):
                whole[-1] = Content(text + more)
            case [*_, Reasoning(text)], Reasoning(more):
                whole[-1] = Reasoning(text + more)
            case [*_, CallArguments(index, text)], CallArguments(same, more) if index == same:
                whole[-1] = CallArguments(index, text + more)
            case _:
                whole.append(part)
    return whole


def read(pieces: Iterable[str], format_: Format, tools: Mapping[str, Mapping[str, Any]], **fields: Any) -> list[Part]:
    """An answer that comes in these pieces."""
    reader = AnswerReader(format_, tools, **fields)
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.end())
