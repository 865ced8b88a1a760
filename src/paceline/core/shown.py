"""Text that others wrote, made safe to show: it can't command a terminal or start a line of its own in a log."""

from __future__ import annotations


def printable(text: str, most: int = 300) -> str:
    """The text, cut, with a question mark for whatever is not a plain character."""
    return "".join(char if char.isprintable() else "?" for char in text[:most])
