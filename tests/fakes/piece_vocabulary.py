"""A vocabulary of pieces with several ways to spell a text, for tests of forms."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fakes.null_backend import ByteVocabulary


class PieceVocabulary(ByteVocabulary):
    """Token 0 spells nothing; special tokens, pieces, and a token that ends an answer follow. A text is spelled with the longest piece each time."""

    def __init__(self, pieces: Sequence[bytes], specials: Sequence[str] = ()) -> None:
        self.special_tokens = {name: i for i, name in enumerate(specials, 1)}
        spellings = (b"", *([b""] * len(specials)), *pieces)
        super().__init__(len(spellings) + 1, frozenset({len(spellings)}), spellings)
        self._names = {name.encode(): i for name, i in self.special_tokens.items()}
        self._pieces = {piece: i for i, piece in enumerate(pieces, 1 + len(specials))}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text, up to what no piece spells."""
        data, ids = text.encode(), list[int]()
        known = {**self._pieces, **(self._names if add_special else {})}
        longest = max(map(len, known))
        while data:
            piece = next((data[:n] for n in range(longest, 0, -1) if data[:n] in known), None)
            if piece is None:
                break
            ids.append(known[piece])
            data = data[len(piece) :]
        return ids

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text, add_special=False)

    def spelled(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens spelled."""
        names = {i: name for name, i in self._names.items()}
        return b"".join(names.get(i) or self.token_bytes(i) for i in ids).decode(errors="replace")

    def render_chat(self, messages: object, now: object = None, given: object = None) -> list[int]:
        raise NotImplementedError
