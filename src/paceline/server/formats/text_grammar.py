"""Regular expressions for the strings of a JSON schema, as text that stands between marks: lengths, patterns and formats in one terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from paceline.server.formats.patterns import with_ascii_classes

ANY = "/(.|\\n)*/"
"""Any text. Special tokens are none."""
_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
"""Without the 29th of February, which most years do not have."""
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T([0-9]{1,9}H([0-9]{1,9}M([0-9]{1,9}S)?)?|[0-9]{1,9}M([0-9]{1,9}S)?|[0-9]{1,9}S)"
_DAYS = "([0-9]{1,9}Y([0-9]{1,9}M([0-9]{1,9}D)?)?|[0-9]{1,9}M([0-9]{1,9}D)?|[0-9]{1,9}D)"
_LABEL = "[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,3}}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = [
    f"{_GROUP}(:{_GROUP}){{7}}",
    *((f"{_GROUP}(:{_GROUP}){{{n - 1}}}" if n else "") + f"::({_GROUP}(:{_GROUP}){{0,{6 - n}}})?" for n in range(7)),
    f"{_GROUP}(:{_GROUP}){{6}}::",
]
_IN_URI = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]{{1,9}}W|{_DAYS}({_CLOCK})?|{_CLOCK})",
    "email": f"[A-Za-z0-9_+-]{{1,20}}(\\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(\\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": f"{_OCTET}(\\.{_OCTET}){{3}}",
    "ipv6": "|".join(f"({each})" for each in _IPV6),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]{{0,20}}:(//{_HOST}(:[0-9]{{1,4}})?(/{_IN_URI}*)*|{_IN_URI}+(/{_IN_URI}*)*)(\\?({_IN_URI}|/)*)?(#({_IN_URI}|/)*)?",
}
"""Texts of each format that is followed; rare ones are left out."""


def text_terminal(schema: Mapping[str, Any]) -> str:
    """Return the body of a terminal for the strings that a schema without references and choices allows."""
    least, most = (schema.get(name) for name in ("minLength", "maxLength"))
    body = f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/" if least or most is not None else ANY
    parts = cast("list[Mapping[str, str]]", schema.get("allOf") or [])
    for pattern in (schema.get("pattern"), *(part["pattern"] for part in parts)):
        if isinstance(pattern, str):
            body += " & " + whole(pattern)
    if form := FORMATS.get(schema.get("format", "")):
        body += f" & /{in_regex(form)}/"
    return body


def in_regex(text: str) -> str:
    """Return a regular expression as it stands between Lark's slashes."""
    return re.sub(r"(?<!\\)/", r"\\/", text).replace("\n", "\\n")


def whole(pattern: str) -> str:
    """Return a regular expression of a schema, which may match anywhere, as one for the whole text."""
    before = "" if pattern.startswith("^") else "(.|\\n)*"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(.|\\n)*"
    pattern = with_ascii_classes(pattern)
    core = pattern.removeprefix("^").removesuffix("$") if not after else pattern.removeprefix("^")
    return f"/{before}({in_regex(core)}){after}/"
