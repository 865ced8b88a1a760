"""Special tokens of a chat: those its template writes are tokens, those spelled inside a message are text.

Law: no message ends its own turn or begins another's, whatever it spells. A template sees messages whose spelled tokens are broken by a
mark, so that what is whole in the rendered text is the template's own. There each is written as its *double*, an added token of the same
kind with a name that cannot be guessed, and the marks are taken out; the encoder then reads doubles as tokens and everything else as text.
A chat that spells no special token, which is nearly every one, is encoded as it is.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Encoder


class ControlTokens:
    """The special tokens of one encoder, and their doubles."""

    def __init__(self, encoder: Encoder, special: Sequence[AddedToken]) -> None:
        """Add the doubles.

        Args:
            encoder: gains a token for each of `special`; they stand behind all its others.
            special: its special tokens.
        """
        from tokenizers import AddedToken

        # Digits, since neither letter case nor JSON nor Unicode's normal forms change them.
        self._mark: Final = str(secrets.randbits(96))
        self._double: Final = str(secrets.randbits(96))
        names = sorted((token.content for token in special), key=len, reverse=True)
        self._spelled: Final = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        encoder.add_tokens(
            [
                AddedToken(
                    self._double + token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,  # as the switch that makes text of special tokens leaves others alone
                )
                for token in special
            ]
        )
        pairs = ((encoder.token_to_id(self._double + name), encoder.token_to_id(name)) for name in names)
        self._real: Final = {double: real for double, real in pairs if double is not None and real is not None}

    def broken(self, chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """The messages with every special token they spell broken by a mark; None where they spell none."""
        found = False

        def split(match: re.Match[str]) -> str:
            nonlocal found
            found = True
            return match[0][0] + self._mark + match[0][1:]

        def walk(value: object) -> object:
            match value:
                case str():
                    return self._spelled.sub(split, value)
                case list():
                    return [walk(item) for item in cast("list[object]", value)]
                case dict():
                    return {name: walk(item) for name, item in cast("dict[str, object]", value).items()}
                case _:
                    return value

        result = [{name: walk(value) for name, value in message.items()} for message in chat]
        return result if found else None

    def marked(self, rendered: str) -> str:
        """A rendered chat of broken messages, with the template's special tokens as doubles and no mark left."""
        return self._spelled.sub(lambda match: self._double + match[0], rendered).replace(self._mark, "")

    def real_ids(self, ids: list[int]) -> list[int]:
        """Ids with special tokens in place of their doubles."""
        return [self._real.get(i, i) for i in ids]

    def without_doubles(self, encoder_json: str) -> str:
        """A tokenizer.json as it was before the doubles."""
        parts: dict[str, Any] = json.loads(encoder_json)
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] not in self._real]
        return json.dumps(parts, ensure_ascii=False)
