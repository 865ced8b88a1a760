r"""Translates the `response_template` that a model may bring, as transformers reads it, into a description.

Its delimiters may be regular expressions. None of these is ever run: they are a stranger's, and some take forever. One is translated where it is a row of
texts, of blanks (`\s*`) and of named classes (`(?P<name>[^>\n]+)`); a template that has others, or more than a description can say, is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from paceline.server.formats.format import THOUGHTS, Body, Calls, Format, Parameters, Thinking, Written

_MAX_MARK = 100
"""Characters of a mark. Raising it: reading looks ahead further."""
_MAX_MARKS = 16
_PIECE = re.compile(r"(?P<blank>\\s[*+]\??)|\(\?P<(?P<group>[a-z]+)>(?:\[[^\]]{1,40}\]|\\[wS]|\.)[+*]\??\)|\\(?P<escaped>[^A-Za-z0-9])|(?P<line>\\n)"
                    r"|(?P<plain>[^\\^$.|?*+()\[\]{}])")  # fmt: skip
_BLANK = ""
"""Blanks, among texts."""


class _Group(str):
    """A named class, among texts."""

    __slots__ = ()


class _Untranslated(Exception):
    """The template says something that a description cannot."""


def from_response_template(template: Mapping[str, Any]) -> Format | None:
    """Translate a response template into a format. None: no format can express it."""
    fields = template.get("fields")
    if not isinstance(fields, Mapping):
        return None
    known = {
        name: cast("Mapping[str, Any]", field) for name, field in cast("Mapping[str, Any]", fields).items() if isinstance(field, Mapping)
    }
    try:
        thought = next((known[name] for name in THOUGHTS if name in known), None)
        thinking = None if thought is None else Thinking(_literals(thought, "open"), _literals(thought, "close"), anywhere=True)
        calls = (_calls(known["tool_calls"]),) if "tool_calls" in known else ()
    except _Untranslated:
        return None
    return Format("response_template", calls, thinking)


def _calls(field: Mapping[str, Any]) -> Calls:
    arguments = field.get("content_args")
    details = cast("Mapping[str, Any]", arguments) if isinstance(arguments, Mapping) else {}
    opening, closing = _row(field, "open"), _row(field, "close")
    names = [i for i, piece in enumerate(opening) if isinstance(piece, _Group)]
    match field.get("content", "text"), names:
        case "json", []:
            return _object(field, opening, closing)
        case "json", [at]:
            lax = details.get("unquoted_keys") is True or "string_delims" in details
            return _headed(opening, at, closing, Body.LAX if lax else Body.JSON, delimiter=_delimiter(details) if lax else "")
        case "xml-inline", [at]:
            return _headed(opening, at, closing, Body.PARAMETERS, parameters=_tags(details.get("tag_pattern")))
        case _:
            raise _Untranslated


def _object(field: Mapping[str, Any], opening: list[str], closing: list[str]) -> Calls:
    """Return the format of calls written as one object that holds the name too."""
    begin, end = _text(opening), _text(closing)
    names, arguments = ["name"], ["arguments", "parameters"]
    for key, value in _leaves(field.get("transform")):
        path = value.strip("{}").removeprefix("content.")
        if key == "name":
            names.insert(0, path)
        elif key == "arguments":
            arguments.insert(0, path)
    written = Written(f'{{"{names[0]}": "{{name}}", "{arguments[0]}": {{arguments}}}}', begin, f"{end}{begin}", end)
    return Calls(Body.OBJECT, written, (begin,), (end,), ("{",), between="[,]", name_keys=tuple(names), arguments_keys=tuple(arguments))


def _headed(
    opening: list[str], at: int, closing: list[str], body: Body, *, delimiter: str = "", parameters: Parameters | None = None
) -> Calls:
    """Return the format of calls with the name before the arguments."""
    before, behind = _texts(opening[:at]), _texts(opening[at + 1 :])
    ends = _texts(closing)
    if not 1 <= len(before) <= 2 or len(behind) > 1 or not 1 <= len(ends) <= len(before):
        raise _Untranslated
    begin, end = before[0] if len(before) == 2 else "", ends[1] if len(ends) == 2 else ""
    call = f"{before[-1]}{{name}}{behind[0] if behind else ''}{{arguments}}{ends[0]}"
    one = "" if parameters is None else f"{parameters.open[0]}{{key}}{parameters.key_end[0]}{{value}}{parameters.close[0]}"
    return Calls(
        body,
        Written(call, begin, end + begin, end, one),
        (begin,) if begin else (),
        (end,) if end else (),
        (before[-1],),
        bare=not begin,
        head_end=tuple(behind) or ("{",),
        close=(ends[0],),
        delimiter=delimiter,
        parameters=parameters,
    )


def _tags(pattern: object) -> Parameters:
    match _pieces(pattern):
        case [str(opening), _Group("key"), str(middle), *value, str(closing)] if [piece for piece in value if piece] == ["value"]:
            pad = "\n" if _BLANK in value else ""
            return Parameters((opening,), (middle,), (closing,), pad)
        case _:
            raise _Untranslated


def _delimiter(details: Mapping[str, Any]) -> str:
    match details.get("string_delims"):
        case [[str(opening), str(closing)]] if opening == closing and 0 < len(opening) <= _MAX_MARK:
            return opening
        case _:
            raise _Untranslated


def _leaves(transform: object) -> list[tuple[str, str]]:
    """Return the texts of a transform with their keys."""
    found: list[tuple[str, str]] = []
    if isinstance(transform, Mapping):
        for key, value in cast("Mapping[str, Any]", transform).items():
            found += [(key, value)] if isinstance(value, str) else _leaves(value)
    return [(key, value) for key, value in found if re.fullmatch(r"\{(content\.)?\w{1,40}\}", value)]


def _literals(field: Mapping[str, Any], side: str) -> tuple[str, ...]:
    """Return the marks, any of which opens or closes a field."""
    found = field.get(side)
    if found is None:
        return (_text(_row(field, side)),)
    marks = [found] if isinstance(found, str) else cast("list[object]", found) if isinstance(found, list) else []
    texts = tuple(mark for mark in marks if isinstance(mark, str) and 0 < len(mark) <= _MAX_MARK)
    if not 0 < len(texts) <= _MAX_MARKS or len(texts) < len(marks):
        raise _Untranslated
    return texts


def _row(field: Mapping[str, Any], side: str) -> list[str]:
    """Return the texts, blanks and groups that open or close a field."""
    if side in field:
        return [_literals(field, side)[0]]
    return _pieces(field.get(f"{side}_pattern"))


def _pieces(pattern: object) -> list[str]:
    if not isinstance(pattern, str) or len(pattern) > 4 * _MAX_MARK:
        raise _Untranslated
    pieces: list[str] = []
    at = 0
    while at < len(pattern):
        match = _PIECE.match(pattern, at)
        if match is None:
            raise _Untranslated
        at = match.end()
        text = "\n" if match["line"] else match["escaped"] or match["plain"]
        if match["group"]:
            pieces.append(_Group(match["group"]))
        elif text is None:
            pieces.append(_BLANK)
        elif pieces and pieces[-1] and not isinstance(pieces[-1], _Group):
            pieces[-1] += text
        else:
            pieces.append(text)
    if not all(len(piece) <= _MAX_MARK for piece in pieces):
        raise _Untranslated
    return pieces


def _texts(pieces: list[str]) -> list[str]:
    """Return the texts of a row without its blanks, which may stand anywhere around marks."""
    return [piece for piece in pieces if piece]


def _text(pieces: list[str]) -> str:
    match _texts(pieces):
        case [text] if not isinstance(text, _Group):
            return text
        case _:
            raise _Untranslated
