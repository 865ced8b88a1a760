"""Structured output: the tokens that a grammar allows next, from the tokens so far.

Law: a mask is a function of the grammar, the tokens so far, the vocabulary and `VERSION`, and of nothing else.

Where the grammar leaves only one text, a mask allows only its canonical tokens, one after the other.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from paceline.core.errors import InvalidRequest
from paceline.core.generation import MAX_GRAMMAR_LETTERS, Grammar, GrammarKind
from paceline.core.text import Tokenizer, printable
from paceline.engine.grammar_trial import trial
from paceline.engine.matcher import DigitBound, Mask, Matcher, one_line
from paceline.engine.refusals import GrammarRefusal, in_own_words, place_to_blame, place_to_name

logger = logging.getLogger(__name__)

_SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only whitespace in JSON outside strings. So no answer fills up with whitespace, and most of a document's frame is forced."""
VERSION = f"llguidance {version('llguidance')}, 5"
"""Version of the masks, for the same grammar, tokens and vocabulary. Raise the number with `_SEPARATORS`, `_LIMITS`, `_Vocabulary` or `DigitBound`."""

_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32(np.inf), np.float32(-np.inf)
)
"""[byte of a mask, 8]: upper bounds on the logits of eight tokens, infinite for an allowed token and minus infinity for others."""

KEPT = 64
"""Compiled grammars that are kept. Raising it: more memory; agents with many schemas wait less."""
REFUSALS = 1024
"""Refused grammars that are remembered, some 700 bytes each, because a grammar that ends a compiler takes seconds of one each time. Raising it: more memory;
lowering it: such grammars are compiled again sooner.
"""
_LIMITS = LLParserLimits(
    max_grammar_size=10_000, step_max_items=20_000, initial_lexer_fuel=500_000, step_lexer_fuel=100_000, max_lexer_states=100_000
)
"""A mask is computed on the engine's thread, in time that grows with the square of the items that may come next; these are at most the whole grammar."""
_WALKS, _WALK = 2, 12
"""Random walks through a grammar before it is accepted, and tokens in each."""
_NOTHING_FOLLOWS = "NoExtension"
"""In the library's error: no token may follow, and the text so far is not complete."""
_OWN_WORDS = frozenset({GrammarKind.LARK, GrammarKind.REGEX})
"""Kinds that a client writes itself: their digits are not bounded, because the grammar says how many there may be."""
_FIELDS = {
    GrammarKind.JSON_SCHEMA: "response_format",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
    GrammarKind.TOOLS: "tools",
    GrammarKind.FORM: "response_format",
}


class Grammars:
    """Compiles grammars for one vocabulary. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, tried: bool = False) -> None:
        """Compile nothing yet.

        Args:
            tokenizer: has the vocabulary.
            tried: this process may be ended by a grammar, so it also looks for the keyword to blame. Otherwise another process does both first.
        """
        self._vocabulary, self._tried = tokenizer, tried
        self._tokenizer: LLTokenizer | None = None
        """Made when a grammar is first requested, in some 6 us for each token of the vocabulary."""
        self._bound: DigitBound | None = None
        """Made together with `_tokenizer`."""
        self._compiled: LRUCache[Grammar, LLMatcher] = LRUCache(KEPT)
        self._refusals: LRUCache[bytes, GrammarRefusal] = LRUCache(REFUSALS)
        """Refusals, by the grammar's digest."""
        self._lock = threading.Lock()
        """Guards `_compiled` and `_refusals`. Never held for long."""
        self._compiling = threading.Lock()

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, so that `matcher` finds it. Takes milliseconds mostly, a second for the largest. Several may be tried at once.

        Raises:
            InvalidRequest: the grammar is malformed, allows nothing, uses an unsupported feature, or is too large.
        """
        if self.knows(grammar):
            return
        try:
            if not self._tried and (refusal := trial(grammar)) is not None:
                raise _Refused(refusal)
            with self._compiling:
                if self._find(grammar) is not None:
                    return
                compiled = self._compile(grammar)
                with self._lock:
                    self._compiled[grammar] = compiled
        except _Refused as refused:
            refusal = self._blamed(grammar, refused.refusal) if self._tried else refused.refusal
            self._remember(_digest(grammar), refusal)
            raise _refusal(grammar, refusal) from None

    def knows(self, grammar: Grammar) -> bool:
        """Return whether a grammar is already compiled, at once.

        Raises:
            InvalidRequest: the grammar is too large, or was refused before.
        """
        if len(grammar.text) > MAX_GRAMMAR_LETTERS:
            field = _FIELDS[grammar.kind]
            raise InvalidRequest(
                f"{field}: {len(grammar.text)} letters, and {MAX_GRAMMAR_LETTERS} are taken", "Send a smaller one.", field=field
            )
        if self._find(grammar) is not None:
            return True
        with self._lock:
            known = self._refusals.get(_digest(grammar))
        if known is not None:
            raise _refusal(grammar, known)
        return False

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of an answer. Its first error makes later requests with this grammar fail. Raises as `prepare` does."""
        while (compiled := self._find(grammar)) is None:
            self.prepare(grammar)
        return self._begin(compiled, grammar.kind, lambda said: self._drop(grammar, said))

    def attempt(self, grammar: Grammar) -> Iterator[GrammarRefusal | None]:
        """Compile a grammar, follow it for some tokens, and keep nothing.

        Yields:
            None if it can be followed. Else the refusal, and then the refusal with the keyword to blame, which takes longer to find.
        """
        try:
            self._compile(grammar)
            yield None
        except _Refused as refused:
            yield refused.refusal
            yield self._blamed(grammar, refused.refusal)

    def _begin(self, compiled: LLMatcher, kind: GrammarKind, on_error: Callable[[str], object] | None = None) -> Matcher:
        assert self._tokenizer is not None, "it is made before the first grammar is compiled"
        bound = None if kind in _OWN_WORDS else self._bound
        return Matcher(compiled.deep_copy(), self._vocabulary, self._tokenizer.greedy_tokenize, bound, on_error)

    def _drop(self, grammar: Grammar, said: str) -> None:
        """Refuse a grammar from now on. Copies share the budgets that an answer exhausted, so another answer would end at once."""
        logger.warning("%s: refused from now on, since an answer outgrew what can be followed: %s", _FIELDS[grammar.kind], said)
        with self._lock:
            self._compiled.pop(grammar, None)
        self._remember(_digest(grammar), GrammarRefusal("it grew beyond what can be followed in an earlier answer"))

    def _remember(self, digest: bytes, refusal: GrammarRefusal) -> None:
        with self._lock:
            self._refusals[digest] = refusal

    def _find(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            return self._compiled.get(grammar)

    def _blamed(self, grammar: Grammar, refusal: GrammarRefusal) -> GrammarRefusal:
        """Return a refusal with the path of the keyword to blame. Parts of the grammar are compiled for that, without limits."""
        tokenizer = self._tokenizer
        if tokenizer is None or not refusal.is_of_compiler:
            return refusal

        def compiles(schema: Mapping[str, Any]) -> bool:
            return not isinstance(_compiled(tokenizer, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))), str)

        return refusal._replace(at=place_to_blame(grammar, compiles))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not self._vocabulary.eos_ids:
            raise _Refused(GrammarRefusal("this model has no token that ends an answer"))
        if self._tokenizer is None:
            vocabulary = _Vocabulary(self._vocabulary)
            self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids)
            self._bound = DigitBound(self._vocabulary)
        compiled = _compiled(self._tokenizer, grammar)
        if isinstance(compiled, str):
            logger.debug("a grammar is refused: %s", one_line(compiled))
            raise _Refused(GrammarRefusal(one_line(in_own_words(compiled)), place_to_name(grammar), is_of_compiler=True))
        for number in range(_WALKS):
            self._walk(grammar, self._begin(compiled, grammar.kind), random.Random(number))
        return compiled

    def _walk(self, grammar: Grammar, matcher: Matcher, draw: random.Random) -> None:
        """Follow a grammar for some tokens, the same ones each time, and refuse it if that is too much: answers would break off."""
        written = b""
        for _ in range(_WALK):
            mask = matcher.mask()
            if matcher.error is not None:
                behind = printable(written.decode(errors="replace"), 100)
                if _NOTHING_FOLLOWS not in matcher.error:
                    why = f"what may come behind '{behind}' is too much to follow"
                else:
                    why = f"nothing may come behind '{behind}'" if written else "it matches no text"
                raise _Refused(GrammarRefusal(one_line(why), place_to_name(grammar)))
            assert mask is not None, "nothing was guessed"
            allowed = np.unpackbits(mask, bitorder="little")
            allowed[sorted(self._vocabulary.eos_ids)] = 0
            tokens = np.flatnonzero(allowed)
            if not len(tokens):
                return
            token = int(tokens[draw.randrange(len(tokens))])
            written += self._vocabulary.token_bytes(token)
            matcher.take(token)


def _refusal(grammar: Grammar, refusal: GrammarRefusal) -> InvalidRequest:
    field = refusal.at or _FIELDS[grammar.kind]
    return InvalidRequest(f"{field}: {refusal.why}", "Send a form that can be followed.", field=field)


class _Refused(Exception):
    """A grammar can't be followed."""

    def __init__(self, refusal: GrammarRefusal) -> None:
        super().__init__(refusal.why)
        self.refusal = refusal


def _compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher | str:
    """Return the library's matcher, or its reason to refuse."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_SEPARATORS)
            case GrammarKind.REGEX:
                text = LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.LARK | GrammarKind.TOOLS | GrammarKind.FORM:
                text = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        return str(error) or "not JSON"
    compiled = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    return compiled.get_error() or "unknown" if compiled.is_error() else compiled


def _digest(grammar: Grammar) -> bytes:
    return sha256(json.dumps([grammar.kind, grammar.text]).encode()).digest()


def restrict(logits_V: npt.NDArray[np.float32], mask: Mask) -> None:
    """Rule out, in place, the tokens that a mask does not allow."""
    np.minimum(logits_V, _CEILINGS.take(mask, axis=0).reshape(-1)[: len(logits_V)], out=logits_V)


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
