"""One answer's place in its grammar: which tokens may come next, and whether the answer is whole.

Laws:
- Nothing that the library does (an error, a panic, a mask after an error) lets a token through or ends an answer as if it were whole. After the first
  error a matcher allows no token and accepts nothing.
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
"""Digits of an integer, or before the point. Raising it: a model that repeats a digit takes longer to stop; 19 hold every 64-bit integer."""
FRACTION_DIGITS: Final = 17
"""Digits behind the point: as many as a double has."""
EXPONENT_DIGITS: Final = 3
"""Digits of an exponent: as many as a double's has."""
_TENS: Final = 28
"""First two of three digits of an exponent above 0: with 19 digits before it, a number up to e289 is a double."""
_NUMBER = re.compile(rb"([0-9]\.|[0-9][eE][+-]?)?([0-9]*)\Z")
_TAIL_BYTES: Final = 32
"""Bytes at the end of an answer that are looked at: more than any run of digits and what stands before it."""


class DigitBound:
    """Ends numbers that run on. A place counts as inside a number if the grammar allows neither a letter nor a quote there."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spelled = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
        digits = np.array([len(text) - len(text.lstrip(b"0123456789")) for text in spelled])
        self._longer = [_packed(digits > most) for most in range(int(digits.max(initial=0)))]
        """By number of digits: the tokens that begin with more."""
        letters = {bytes([code]) for code in b'"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ'}
        self._prose = _packed(np.array([text in letters for text in spelled]))

    def narrow(self, mask: Mask, tail: bytes) -> Mask:
        """Rule out the tokens that would give a number too many digits.

        Args:
            mask: of the tokens that the grammar allows.
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
    """One bit for each token, in whole words of 32 bits, as masks are."""
    return np.packbits(np.pad(tokens, (0, -len(tokens) % 32)), bitorder="little")


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        spell: Callable[[str], Sequence[int]],
        bound: DigitBound | None = None,
        on_error: Callable[[str], object] | None = None,
    ) -> None:
        """Stand at the beginning of an answer.

        Args:
            matcher: the library's, used by no other.
            spell: some tokens of a text, however they cut it.
            bound: of the digits of numbers; None: they have none.
            on_error: called once, with what the library said.
        """
        self._matcher, self._vocabulary, self._spell, self._bound, self._on_error = matcher, vocabulary, spell, bound, on_error
        self._ahead: list[int] = []
        """Guessed tokens that it has taken already."""
        self._words = np.empty(-(-vocabulary.size // 32), np.uint32)
        self._n_beyond = 0
        """Tokens behind the end of the grammar, which the library did not take."""
        self._tail = b""
        """The last bytes of the answer, without guessed tokens."""
        self.error: str | None = None
        """What the library said when it failed; for logs, not for clients. None: it has not failed."""

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        self._forget(0)
        return self._ask(lambda matcher: matcher.is_accepting(), False)

    def accepts_without(self, tokens: Sequence[int], n_bytes: int) -> bool:
        """Whether the answer, less its last bytes, may end there. The matcher is of no use afterwards.

        Args:
            tokens: all of the answer; they were taken.
            n_bytes: of their text, that don't belong to it.
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
        """A token was drawn."""
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
        """What may come behind guessed tokens; nothing after an error. None: one of those may not come, so that nothing is drawn behind them."""
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
            self._words[:] = 0  # the library leaves a mask of the end tokens alone behind
        mask = self._words.view(np.uint8).copy()
        if self._bound is None:
            return mask
        return self._bound.narrow(mask, self._tail + b"".join(map(self._vocabulary.token_bytes, guessed)))

    def forced(self) -> list[int]:
        """The only tokens that can come next, as many as are known."""
        self._forget(0)
        return (
            []
            if self._ask(lambda matcher: matcher.is_stopped(), True)
            else self._ask(lambda matcher: matcher.compute_ff_tokens(), list[int]())
        )

    def _forget(self, kept: int) -> None:
        """Take back guessed tokens behind the first ones."""
        if len(self._ahead) > kept:
            n_tokens = len(self._ahead) - kept
            self._ask(lambda matcher: matcher.rollback(n_tokens), False)
            del self._ahead[kept:]

    def _ask(self, question: Callable[[LLMatcher], Found], otherwise: Found) -> Found:
        """Ask the library. After its first error, and where it raises or panics, the answer is `otherwise`."""
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
    """What the library says, in one line: it draws what it was given below each other."""
    return printable(" ".join(text.split()), 500)
