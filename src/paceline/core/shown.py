"""Text that others wrote, made safe to show: it can't command a terminal or start a line of its own in a log."""

from __future__ import annotations

_HARMFUL = {
    code: "?"
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
    if chr(code) not in "\n\t"
} | {ord("\r"): None}


def shown(text: str) -> str:
    """Text that streams to a terminal, in pieces as it comes: its lines, tabs and joined characters stay; what could command the terminal, or
    show letters in another order than they are in, is a question mark.
    """
    return text.translate(_HARMFUL)


def printable(text: str, most: int = 300) -> str:
    """The text, cut, with a question mark for whatever is not a plain character."""
    return "".join(char if char.isprintable() else "?" for char in text[:most])
