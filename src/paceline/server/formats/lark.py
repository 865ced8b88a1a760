"""A grammar in Lark's language, as it is put together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.server.formats.dialect import as_followed

ANY = "/(.|\\n)*/"
"""Any text. Special tokens are none."""
_BLANKS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only blanks between the parts of JSON, as in answers of a given form."""
_NAMED = re.compile(r"(<(?!/?｜[A-Za-z]+｜)[^<>\n]{1,60}>|\[/?[A-Z_]{2,30}\]|｜[A-Za-z]{1,30}｜)")
"""What may be the name of a special token."""


class Lark:
    """Rules, and expressions of them."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        """Each one's name, by what it says: nothing is written twice."""

    def text(self, start: str) -> str:
        """The whole grammar, whose texts are `start`."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items())])

    def rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        return self._rules.setdefault(body, f"T{len(self._rules)}")

    def lazy(self, body: str) -> str:
        """A rule that matches as little text as it can."""
        name = self._rules.setdefault(f"{body}  ", f"l{len(self._rules)}[lazy]")
        return name.removesuffix("[lazy]")

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule("%json " + json.dumps({**as_followed(schema), "x-guidance": _BLANKS}))

    def literal(self, text: str) -> str:
        """This text, with the special tokens that it names."""
        pieces = (piece for piece in _NAMED.split(text) if piece)
        joined: list[str | int] = []
        for piece in pieces:
            token = self._token_id(piece) if _NAMED.fullmatch(piece) else None
            match joined:
                case [*_, str(last)] if token is None:
                    joined[-1] = last + piece
                case _:
                    joined.append(piece if token is None else token)
        return " ".join(self.quoted(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in joined)

    def quoted(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def first_special(self, text: str) -> tuple[int, str] | None:
        """The first special token that a text names, and what stands behind it."""
        for match in _NAMED.finditer(text):
            if (token := self._token_id(match.group())) is not None:
                return token, text[match.end() :]
        return None

    def until(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if self.first_special(mark):
            return f"{self.terminal(ANY)} {self.literal(mark)}"
        return self.lazy(f"{ANY} {self.quoted(mark)}")

    def specials(self, texts: Iterable[str]) -> list[int]:
        """The special tokens that any of the texts names."""
        named = {match.group() for text in texts for match in _NAMED.finditer(text)}
        return sorted({token for name in named if (token := self._token_id(name)) is not None})


def in_regex(text: str) -> str:
    """A regular expression as it stands between Lark's slashes."""
    return re.sub(r"(?<!\\)/", r"\\/", text).replace("\n", "\\n")
