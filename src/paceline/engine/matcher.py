"""The position of one answer in its grammar: which tokens may come next, and whether the answer is complete.

Laws:
- No failure of the library (an error, a panic, a mask after an error) lets a token through, or ends an answer as if it were complete. After the first error a
  matcher allows no token and accepts nothing.
- A bound on digits only narrows a mask, and never empties it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from paceline.core.text import Vocabulary, printable

Mask = npt.NDArray[np.uint8]
"""One bit for each token, the lowest of each byte first."""
Found = TypeVar("Found")

INTEGER_DIGITS: Final = 19
"""Maximum digits of an integer, or before the point. Raising it: a model that repeats a digit takes longer to stop; 19 digits hold every 64-bit integer."""
FRACTION_DIGITS: Final = 17
"""Maximum digits after the point: as many as a double has. Raising it: a model that repeats a digit takes longer to stop."""
EXPONENT_DIGITS: Final = 3
"""Maximum digits of an exponent: as many as a double's has."""
_TENS: Final = 28
"""Largest first two digits of a three-digit positive exponent: with 19 digits before it, a number up to e289 is a double."""
_NUMBER = re.compile(rb"([0-9]\.|[0-9][eE][+-]?)?([0-9]*)\Z")
_TAIL_BYTES: Final = 32
"""Bytes at the end of an answer that are examined: more than any run of digits and the characters before it."""


class DigitBound:
    """Ends numbers that grow too long. A place counts as inside a number if the grammar allows neither a letter nor a quote there."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spelled = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
        digits = np.array([len(text) - len(text.lstrip(b"0123456789")) for text in spelled])
        self._longer = [_packed(digits > most) for most in range(int(digits.max(initial=0)))]
        """Tokens that begin with more than n digits, by n."""
        letters = {bytes([code]) for code in b'"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ'}
        self._prose = _packed(np.array([text in letters for text in spelled]))

    def narrow(self, mask: Mask, tail: bytes) -> Mask:
        """Rule out the tokens that would give a number too many digits.

        Args:
            mask: tokens that the grammar allows.
            tail: the last bytes of the answer.
        """
        place = _NUMBER.search(tail)
        assert place is not None, "the expression matches the empty end"
        before, run = place.groups()
        most = INTEGER_DIGITS if not before else FRACTION_DIGITS if before.endswith(b".") else EXPONENT_DIGITS
        if before and before[1:] in (b"e", b"E", b"e+", b"E+") and (len(run) < 2 or int(run[:2]) > _TENS):
            most = 2
        left = max(0, most - len(run))
        if left >= len(self._longer) or np.any(mask & self._prose):
            return mask
        narrowed = mask & ~self._longer[left]
        return narrowed if np.any(narrowed) else mask


def _packed(tokens: npt.NDArray[np.bool_]) -> Mask:
    """Return one bit for each token, in whole words of 32 bits, as masks are."""
    return np.packbits(np.pad(tokens, (0, -len(tokens) % 32)), bitorder="little")


class Matcher:
    """The position of one answer in its grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        spell: Callable[[str], Sequence[int]],
        bound: DigitBound | None = None,
        on_error: Callable[[str], object] | None = None,
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            matcher: the library's; it must not be shared.
            vocabulary: bytes of the tokens.
            spell: returns tokens that spell a text, cut anyhow.
            bound: bounds the digits of numbers; None: they are unbounded.
            on_error: called once, with the library's error.
        """
        self._matcher, self._vocabulary, self._spell, self._bound, self._on_error = matcher, vocabulary, spell, bound, on_error
        self._ahead: list[int] = []
        """Draft tokens that the library's matcher has already consumed."""
        self._words = np.empty(-(-vocabulary.size // 32), np.uint32)
        self._n_beyond = 0
        """Number of tokens after the end of the grammar, which the library did not consume."""
        self._tail = b""
        """The last bytes of the answer, without draft tokens."""
        self.error: str | None = None
        """The library's error; for logs, not for clients. None: it has not failed."""

    @property
    def is_accepting(self) -> bool:
        """True if the answer may end here."""
        self._forget(0)
        return self._ask(lambda matcher: matcher.is_accepting(), False)

    def accepts_without(self, tokens: Sequence[int], n_bytes: int) -> bool:
        """Return whether the answer, without its last bytes, may end there. The matcher can't be used afterwards.

        Args:
            tokens: all tokens of the answer, already taken.
            n_bytes: bytes at the end of their text that don't belong to the answer.
        """
        self._forget(0)
        n_tokens, piece = 0, b""
        while n_bytes > 0 and n_tokens < len(tokens):
            n_tokens += 1
            text = self._vocabulary.token_bytes(tokens[-n_tokens])
            piece = text[: max(0, len(text) - n_bytes)]
            n_bytes -= len(text)
        again = list(self._spell(piece.decode(errors="replace"))) if piece else []
        self._ask(lambda matcher: matcher.rollback(max(0, n_tokens - self._n_beyond)), False)
        return self._ask(lambda matcher: matcher.try_consume_tokens(again), 0) == len(again) and self._ask(
            lambda matcher: matcher.is_accepting(), False
        )

    def take(self, token: int) -> None:
        """Advance by a drawn token."""
        self._tail = (self._tail + self._vocabulary.token_bytes(token))[-_TAIL_BYTES:]
        if self._ahead and self._ahead[0] == token:
            del self._ahead[0]
            return
        self._forget(0)
        if self._ask(lambda matcher: matcher.is_stopped(), True):
            self._n_beyond += 1
        else:
            self._ask(lambda matcher: matcher.consume_token(token), False)

    def mask(self, guessed: Sequence[int] = ()) -> Mask | None:
        """Return the tokens that may follow the draft tokens; none after an error. None: a draft token is not allowed, so that nothing is drawn after it."""
        same = 0
        while same < min(len(guessed), len(self._ahead)) and guessed[same] == self._ahead[same]:
            same += 1
        self._forget(same)
        more = list(guessed[same:])
        if more:
            taken = self._ask(lambda matcher: matcher.try_consume_tokens(more), 0)
            self._ahead += more[:taken]
            if taken < len(more) and self.error is None:
                return None
        self._words[:] = 0
        self._ask(lambda matcher: matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes), None)
        if self.error is not None:
            self._words[:] = 0  # after an error the library leaves a mask of the end tokens
        mask = self._words.view(np.uint8).copy()
        if self._bound is None:
            return mask
        return self._bound.narrow(mask, self._tail + b"".join(map(self._vocabulary.token_bytes, guessed)))

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next, as many as are known."""
        self._forget(0)
        return (
            []
            if self._ask(lambda matcher: matcher.is_stopped(), True)
            else self._ask(lambda matcher: matcher.compute_ff_tokens(), list[int]())
        )

    def _forget(self, kept: int) -> None:
        """Take back all draft tokens after the first `kept`."""
        if len(self._ahead) > kept:
            n_tokens = len(self._ahead) - kept
            self._ask(lambda matcher: matcher.rollback(n_tokens), False)
            del self._ahead[kept:]

    def _ask(self, question: Callable[[LLMatcher], Found], otherwise: Found) -> Found:
        """Ask the library. After its first error, and where it raises or panics, return `otherwise`."""
        if self.error is not None:
            return otherwise
        try:
            found = question(self._matcher)
            if not self._matcher.is_error():
                return found
            said = self._matcher.get_error().partition("<state>")[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            said = f"{type(error).__name__}: {error}"
        self.error = one_line(said)
        if self._on_error is not None:
            self._on_error(self.error)
        return otherwise


def one_line(text: str) -> str:
    """Return the library's message in one line: it draws its input over several."""
    return printable(" ".join(text.split()), 500)
