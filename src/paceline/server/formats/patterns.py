r"""Regular expressions in the words of the grammar compiler, which knows no look-around and reads `\d` and `\w` in all scripts.

An expression of a schema that begins with look-ahead asks several things of one text, so it becomes several expressions that all have to match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_LOOK = re.compile(r"\(\?(<?[=!])")
_SET = r"(\\[dDwWsS]|\\[^\w\s]|\[\^?(?:\\.|[^\]\\])+\]|[\w\s,:;@#%&\"'<>/=~`!-])"
_ONE = re.compile(_SET)
_NONE_BUT = re.compile(rf"\^?{_SET}[*+]\$")
_AFTER_ALL = re.compile(rf"(?:\.|\[\\s\\S\]|\[\^\])\*{_SET}")
_TWICE = re.compile(rf"(?:\.|\[\\s\\S\]|\[\^\])\*{_SET}(?:\1|\{{2\}})")
_LENGTH = re.compile(r"(?:\.|\[\\s\\S\])\{(\d+),?\}(\$?)")
_ANY = "[\\s\\S]"


def without_look_around(pattern: str) -> list[str] | None:
    """Expressions that a text matches all of exactly if it matches this one; none where any text does. None: there are none that say the same."""
    if pattern in ("", "^", "$", "^.*", ".*", ".*$", "(?:)"):
        return []
    if not _LOOK.search(pattern):
        return [pattern]
    found: list[str] = []
    anchor, rest = ("^", pattern[1:]) if pattern.startswith("^") else ("", pattern)
    if not anchor or _has_branches(rest):
        return None  # the look-ahead may stand anywhere in the text, or bind one branch alone
    while look := re.match(r"\(\?([=!])", rest):
        end = _closing(rest)
        if end is None:
            return None
        inner = rest[look.end() : end]
        part = f"^(?:{inner.removeprefix('^')})" if look[1] == "=" else _negated(inner)
        if part is None or _LOOK.search(part) or (look[1] == "=" and _has_branches(inner) and "^" in inner):
            return None
        found.append(part)
        rest = rest[end + 1 :]
    if _LOOK.search(rest):
        return None
    return [*found, f"^{rest}"] if rest not in ("", ".*") else found


def with_ascii_classes(pattern: str, escapes: Collection[str] = ("\\d", "\\w")) -> str:
    r"""Write `\d` as `[0-9]` and `\w` as `[A-Za-z0-9_]`, so that what matches, matches in every dialect of regular expressions.

    A negated class (`[^\d]`) stays as it is: there the compiler's wider class is the safe one.

    Args:
        escapes: those to write so.
    """

    def written(part: str) -> str:
        if part.startswith("[^"):
            return part
        return re.sub(r"\\.", lambda found: _ASCII[found[0]] if found[0] in escapes else found[0], part, flags=re.DOTALL)

    return "".join(written(part) for _, part in _tokens(pattern))


_ASCII = {"\\d": "[0-9]", "\\w": "[A-Za-z0-9_]"}


def _negated(inner: str) -> str | None:
    """Return an expression for the texts that do not begin with this one. None if a short one is not known."""
    if inner == "$":
        return f"^{_ANY}"
    if match := _NONE_BUT.fullmatch(inner):
        return _other(match[1]) if inner[-2] == "*" else f"^$|{_other(match[1])}"
    if match := _TWICE.fullmatch(inner):
        return f"^(?:{match[1]}?{_other(match[1])})*{match[1]}?$"
    if match := _AFTER_ALL.fullmatch(inner):
        return f"^{_other(match[1])}*$"
    if match := _LENGTH.fullmatch(inner):
        count = int(match[1])
        return f"^{_ANY}{{0,{max(0, count - 1)}}}$" if count and not match[2] else None
    if match := _ONE.fullmatch(inner):
        return f"^(?:{_other(match[1])}|$)"
    return None


def _other(letters: str) -> str:
    """Return a class of the letters outside a class."""
    if letters.startswith("[^"):
        return "[" + letters[2:]
    return "[^" + (letters[1:] if letters.startswith("[") else letters + "]")


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the parts of an expression, with their places: escaped letters, classes, and single letters."""
    for match in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[\s\S]", text):
        yield match.start(), match.group()


def _closing(text: str) -> int | None:
    """Return the place where the group at the beginning of a text ends."""
    depth = 0
    for place, part in _tokens(text):
        depth += (part == "(") - (part == ")")
        if depth == 0:
            return place
    return None


def _has_branches(text: str) -> bool:
    """Return whether an expression has a `|` outside of groups."""
    depth = 0
    for _, part in _tokens(text):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False
