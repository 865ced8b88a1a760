"""A JSON object read from someone else's file: every field is checked for its type before it is believed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.store.faults import damaged, unreadable

MAX_JSON_BYTES: Final = 64 << 20
"""Configurations have kilobytes, tokenizers a few megabytes."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object and the file it came from. Getters give None for an absent or null field, and ModelFileError for a wrong type."""

    path: Path
    fields: dict[str, Any]

    def text(self, key: str) -> str | None:
        return self._typed(key, str, "a string")

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def integer(self, key: str) -> int | None:
        value = self.fields.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise damaged(self.path, f"{key} is {value!r}, not an integer")

    def number(self, key: str) -> float | None:
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass  # falls to the complaint below: an integer beyond a float's range is no number here
        raise damaged(self.path, f"{key} is not a number")

    def child(self, key: str) -> JsonObject | None:
        value = self._typed(key, dict, "an object")
        return None if value is None else JsonObject(self.path, value)

    def strings(self, key: str) -> list[str] | None:
        values = self._typed(key, list, "a list")
        if values is not None and not all(isinstance(value, str) for value in values):
            raise damaged(self.path, f"{key} is not a list of strings")
        return values

    def integers(self, key: str) -> list[int]:
        """One integer or a list of them; empty for an absent field."""
        value = self.fields.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            raise damaged(self.path, f"{key} is not an integer or a list of integers")
        return found

    def _typed(self, key: str, kind: type, what: str) -> Any:
        value = self.fields.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise damaged(self.path, f"{key} is not {what}")


def parse_object(path: Path, data: bytes) -> JsonObject:
    """Parse JSON that must be an object.

    Raises:
        ModelFileError: it is not JSON, or not an object.
    """
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    return JsonObject(path, value)


def load_object(path: Path) -> JsonObject:
    """Read a file that must be a JSON object.

    Raises:
        ModelFileError: it can't be read, is not JSON, or not an object.
    """
    try:
        if path.exists() and not path.is_file():
            raise damaged(path, "it is not a file")  # a pipe or a device may never end
        if path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, f"it is longer than {MAX_JSON_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_object(path, data)
