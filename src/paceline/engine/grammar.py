"""Answers of a given form: which tokens may come next, from a grammar and the tokens so far.

Law: a mask is a function of the grammar, the tokens so far, the vocabulary and `VERSION`, and of nothing beside them.

Where the grammar leaves only one text, a mask leaves only its canonical tokens, one after the other.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from paceline.core.errors import InvalidRequest
from paceline.core.generation import MAX_GRAMMAR_LETTERS, Grammar, GrammarKind
from paceline.core.text import Tokenizer, printable
from paceline.engine.grammar_trial import SECONDS, trial

Mask = npt.NDArray[np.uint8]
"""A bit a token, the lowest of each byte first."""

_SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only blanks in JSON outside strings: no answer runs to its end in blanks, and most of a document's frame is forced."""
VERSION = f"llguidance {version('llguidance')}, 5"
"""What decides a mask beside grammar, tokens and vocabulary. Raise the number with `_SEPARATORS`, `_LIMITS` or `_Vocabulary`."""

_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32(np.inf), np.float32(-np.inf)
)
"""[byte of a mask, 8]: what the logits of eight tokens are at most."""

KEPT = 64
"""Compiled grammars. Raising it: more memory, and agents with many schemas wait less."""
REFUSALS = 1024
"""Grammars whose refusal is remembered, some 700 bytes each: what ends a compiler takes seconds of one each time."""
_LIMITS = LLParserLimits(
    max_grammar_size=10_000, step_max_items=20_000, initial_lexer_fuel=500_000, step_lexer_fuel=100_000, max_lexer_states=100_000
)
"""A mask is made on the engine's thread, and its time grows with the square of what may come next; that is at most all of a grammar."""
_WALKS, _WALK = 2, 12
"""Ways into a grammar that are followed before an answer is, and how many tokens far."""
_FIELDS = {
    GrammarKind.JSON_SCHEMA: "response_format",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
    GrammarKind.TOOLS: "tools",
    GrammarKind.FORM: "response_format",
}


_REWORDED = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Its branches are not told apart: write anyOf",
    "Unimplemented keys": "these keywords of schemas are not supported",
}
"""What the library says of schemas, and what a client can do."""


class Grammars:
    """Compiles grammars for one vocabulary. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, tried: bool = False) -> None:
        """Compile nothing yet.

        Args:
            tried: this process may end with a grammar, so that none is tried in another before.
        """
        self._vocabulary, self._tried = tokenizer, tried
        self._tokenizer: LLTokenizer | None = None
        """Made when a grammar is first asked for: some 6 us a token."""
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        """Why grammars are refused, by their digests."""
        self._lock = threading.Lock()
        """Of what is compiled and refused. Never held for long."""
        self._compiling = threading.Lock()

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, so that `matcher` finds it: milliseconds most times, a second for the largest. Several may be tried at once.

        Raises:
            InvalidRequest: the grammar is not one, allows nothing, uses what is not supported, or is too large.
        """
        field = _FIELDS[grammar.kind]
        if len(grammar.text) > MAX_GRAMMAR_LETTERS:
            raise InvalidRequest(
                f"{field}: {len(grammar.text)} letters, and {MAX_GRAMMAR_LETTERS} are taken", "Send a smaller one.", field=field
            )
        if self._find(grammar) is not None:
            return
        digest = sha256(json.dumps([grammar.kind, grammar.text]).encode()).digest()
        with self._lock:
            why = self._refusals.get(digest)
        try:
            if why is not None:
                raise _Refused(why)
            if not self._tried and not trial(grammar):
                raise _Refused(f"it takes more than {SECONDS:g} seconds to compile, or more memory than there is for that")
            with self._compiling:
                if self._find(grammar) is not None:
                    return
                compiled = self._compile(grammar)
                with self._lock:
                    self._compiled[grammar] = compiled
                    if len(self._compiled) > KEPT:
                        self._compiled.popitem(last=False)
        except _Refused as refused:
            with self._lock:
                self._refusals[digest] = refused.why
                self._refusals.move_to_end(digest)
                if len(self._refusals) > REFUSALS:
                    self._refusals.popitem(last=False)
            raise InvalidRequest(f"{field}: {refused.why}", "Send a form that can be followed.", field=field) from None

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of an answer. Raises as `prepare` does."""
        while (compiled := self._find(grammar)) is None:
            self.prepare(grammar)
        return Matcher(compiled.deep_copy(), self._vocabulary.size)

    def attempt(self, grammar: Grammar) -> None:
        """Compile a grammar and follow it a little, and keep nothing."""
        with suppress(_Refused):
            self._compile(grammar)

    def _find(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not self._vocabulary.eos_ids:
            raise _Refused("this model has no token that ends an answer")
        if self._tokenizer is None:
            vocabulary = _Vocabulary(self._vocabulary)
            self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids)
        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_SEPARATORS)
                case GrammarKind.REGEX:
                    text = LLMatcher.grammar_from_regex(grammar.text)
                case GrammarKind.LARK | GrammarKind.TOOLS | GrammarKind.FORM:
                    text = LLMatcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise _Refused(_reworded(str(error))) from error
        compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise _Refused(_reworded(compiled.get_error()))
        for number in range(_WALKS):
            self._walk(Matcher(compiled.deep_copy(), self._vocabulary.size), random.Random(number))
        return compiled

    def _walk(self, matcher: Matcher, draw: random.Random) -> None:
        """Follow a grammar for some tokens, the same ones each time, and refuse it if that is too much: answers would end in the middle."""
        written = b""
        for _ in range(_WALK):
            mask = matcher.mask()
            if matcher.error is not None:
                behind = printable(written.decode(errors="replace"), 100)
                raise _Refused(f"what may come behind '{behind}' is too much to follow: {matcher.error}")
            assert mask is not None, "nothing was guessed"
            allowed = np.unpackbits(mask, bitorder="little")
            allowed[sorted(self._vocabulary.eos_ids)] = 0
            tokens = np.flatnonzero(allowed)
            if not len(tokens):
                return
            token = int(tokens[draw.randrange(len(tokens))])
            written += self._vocabulary.token_bytes(token)
            matcher.take(token)


class _Refused(Exception):
    """A grammar can't be followed. `why` is one line."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = _line(why)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._ahead: list[int] = []
        """Guessed tokens that it has taken already."""
        self._words = np.empty(-(-size // 32), np.uint32)

    @property
    def error(self) -> str | None:
        """Why it can't go on: the grammar became too complex for the text, say."""
        return _line(self._matcher.get_error().partition("<state>")[0]) if self._matcher.is_error() else None

    def take(self, token: int) -> None:
        """A token was drawn."""
        if self._ahead and self._ahead[0] == token:
            del self._ahead[0]
            return
        self._forget(0)
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def mask(self, guessed: Sequence[int] = ()) -> Mask | None:
        """What may come behind guessed tokens. None: one of those may not, so that nothing is drawn behind them."""
        same = 0
        while same < min(len(guessed), len(self._ahead)) and guessed[same] == self._ahead[same]:
            same += 1
        self._forget(same)
        more = list(guessed[same:])
        if more:
            taken = self._matcher.try_consume_tokens(more)
            self._ahead += more[:taken]
            if taken < len(more):
                return None
        self._words[:] = 0
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words.view(np.uint8).copy()

    def forced(self) -> list[int]:
        """The only tokens that can come next, as many as are known."""
        self._forget(0)
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _forget(self, kept: int) -> None:
        """Take back guessed tokens behind the first ones."""
        if len(self._ahead) > kept:
            self._matcher.rollback(len(self._ahead) - kept)
            del self._ahead[kept:]


def restrict(logits_V: npt.NDArray[np.float32], mask: Mask) -> None:
    """Rule out, in place, the tokens that a mask does not have."""
    np.minimum(logits_V, _CEILINGS.take(mask, axis=0).reshape(-1)[: len(logits_V)], out=logits_V)


def _reworded(text: str) -> str:
    """Why a grammar is refused. Of an expression the library shows where in a grammar of its own it stands, which nobody wrote."""
    wrong = re.search(r"^error: (.+)$", text, re.MULTILINE) if "regex parse error" in text else None
    if wrong is not None:
        text = f"an expression can't be followed: {wrong[1]}"
    for theirs, ours in _REWORDED.items():
        text = text.replace(theirs, ours)
    return text


def _line(text: str) -> str:
    """What the library says, in one line: it draws what it was given below each other."""
    return printable(" ".join(text.split()), 500)


class _Vocabulary:
    """A vocabulary as llguidance reads it. Tokens without bytes are never part of a text; a grammar may name them, as `<[ID]>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode_inside
        spelled = [tokenizer.token_bytes(i) for i in range(tokenizer.size)]
        self.special_token_ids = [i for i, text in enumerate(spelled) if not text]
        self.tokens = [
            text or b"[%d]" % i for i, text in enumerate(spelled)
        ]  # special ones need a name each: where one may come, so might all
        self.eos_ids = sorted(tokenizer.eos_ids)
        self.eos_token_id, self.bos_token_id = self.eos_ids[0], None

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode())
