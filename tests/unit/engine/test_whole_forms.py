"""An answer with a form that ends with `stop` is whole, whatever the library does; and numbers end."""

from __future__ import annotations

import ctypes
import json
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher
from tests.fakes.null_backend import ByteVocabulary
from tests.unit.engine.test_grammar import EOS, VOCABULARY, answers, ask

from paceline.core.errors import FORM_NOT_FOLLOWED, InvalidRequest
from paceline.core.generation import FinishReason, Grammar, GrammarKind, SamplingParams
from paceline.engine.grammar import Grammars
from paceline.engine.matcher import EXPONENT_DIGITS, FRACTION_DIGITS, INTEGER_DIGITS, Matcher


class Panic(BaseException):
    """As the library's panics are: not an `Exception`."""


class Failing:
    """The library's matcher, which fails at one of its calls and is in an error from then on."""

    def __init__(self, matcher: LLMatcher, way: str, fuse: list[int]) -> None:
        self._matcher, self._way, self._fuse, self._is_broken = matcher, way, fuse, False

    def deep_copy(self) -> Failing:
        return Failing(self._matcher.deep_copy(), self._way, self._fuse)

    def is_error(self) -> bool:
        return self._is_broken and self._way != "ends silently"

    def get_error(self) -> str:
        return "panicked at LexerState { fuel: 0 }<state>SECRET</state>"

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            self._fuse[0] -= 1
            self._is_broken |= self._fuse[0] == 0
            if self._is_broken and self._way == "raises":
                raise ValueError("SECRET")
            if self._is_broken and self._way == "panics":
                raise Panic("SECRET")
            if self._is_broken and name == "is_accepting":
                return False
            found = getattr(self._matcher, name)(*arguments)
            if self._is_broken and name == "unsafe_compute_mask_ptr":  # what the library leaves behind: the end tokens alone
                words = np.zeros(-(-VOCABULARY.size // 32), np.uint32)
                words[EOS // 32] = 1 << EOS % 32
                ctypes.memmove(arguments[0], words.ctypes.data, arguments[1])
            return found

        return called


TINY = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
WORKING = Grammars(VOCABULARY, tried=True)
WORKING.prepare(TINY)


class FailingGrammars(Grammars):
    def __init__(self, way: str, at: int) -> None:
        super().__init__(VOCABULARY, tried=True)
        self._tokenizer, self._bound = WORKING._tokenizer, WORKING._bound
        self._compiled[TINY] = cast("LLMatcher", Failing(WORKING._compiled[TINY], way, [at]))


@pytest.mark.parametrize("draft", ["off", "auto"])
@pytest.mark.parametrize("way", ["says so", "ends silently", "raises", "panics"])
def test_a_matcher_that_fails_at_any_step_never_ends_an_answer_as_whole(way: str, draft: str) -> None:
    finishes: list[FinishReason | None] = []
    while not finishes or finishes[-1] is FinishReason.ERROR:
        grammars = FailingGrammars(way, at=len(finishes) + 1)
        [answer], _ = answers(ask(1, TINY, draft=draft, max_tokens=30), grammars=grammars)
        finishes.append(answer.finish)
        if answer.finish is FinishReason.ERROR:
            assert not any(theirs in (answer.error or "") for theirs in ("SECRET", "LexerState", "panicked"))
            if way != "ends silently":
                with pytest.raises(InvalidRequest, match="response_format: it grew beyond"):
                    grammars.prepare(TINY)
    assert finishes[-1] is FinishReason.STOP, "the first that is left alone"
    assert isinstance(json.loads(answer.text), dict)
    assert len(finishes) > 15


GROWING = {
    "type": "object",
    "properties": {
        **{name: {"type": "boolean"} for name in "wxyz"},
        "a": {"type": "string", "pattern": "^(?:\\S+\\s+){0,49}\\S+$", "maxLength": 500},
    },
    "required": [*"wxyz", "a"],
    "additionalProperties": False,
}


def test_a_form_that_outgrows_the_limits_ends_its_answer_with_an_error_and_is_refused_afterwards() -> None:
    grammars, form = Grammars(VOCABULARY, tried=True), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(GROWING))
    [first], _ = answers(ask(1, form), grammars=grammars)
    assert (first.finish, first.code) == (FinishReason.ERROR, FORM_NOT_FOLLOWED)
    assert first.text.startswith('{"w": ')
    with pytest.raises(InvalidRequest, match="response_format") as refused:
        answers(ask(2, form), grammars=grammars)
    assert "items" not in refused.value.message
    assert answers(ask(1), grammars=grammars)[0][0].finish is FinishReason.STOP, "other forms are served"


def test_length_stays_length() -> None:
    [answer], _ = answers(ask(1, max_tokens=5))
    assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("form", "fields", "ends", "text"),
    [
        ('start: "ab"', {"stop": ("b",)}, FinishReason.ERROR, "a"),
        ('start: "a" "b"?', {"stop": ("b",)}, FinishReason.STOP, "a"),
        ('start: "red" ("green")?', {"stop": ("een",)}, FinishReason.ERROR, "redgr"),
        ('start: "red" ("green")?', {"stop": ("green",)}, FinishReason.STOP, "red"),
        ('start: "redgr" ("een")?', {"stop": ("een",)}, FinishReason.STOP, "redgr"),
        ('start: "ab"', {"stop_ids": frozenset(VOCABULARY.encode("b"))}, FinishReason.ERROR, "a"),
        ('start: "a" "b"?', {"stop_ids": frozenset(VOCABULARY.encode("b"))}, FinishReason.STOP, "a"),
        ('start: "ab"', {"stop": ("bc",)}, FinishReason.STOP, "ab"),
    ],
)
def test_a_stop_of_the_client_ends_an_answer_only_where_its_form_may_end(form: str, fields: Any, ends: FinishReason, text: str) -> None:
    end = SamplingParams(temperature=0, logit_bias={EOS: -100})
    [answer], _ = answers(ask(1, Grammar(GrammarKind.LARK, form), sampling=end, **fields))
    assert (answer.finish, answer.text) == (ends, text)
    assert (answer.code == FORM_NOT_FOLLOWED) is (ends is FinishReason.ERROR)


class Digits(ByteVocabulary):
    """A token for each byte, and one for three digits."""

    def __init__(self) -> None:
        super().__init__(259, frozenset({258}), (b"", *(bytes([code]) for code in range(256)), b"000", b""))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        del add_special
        return self.encode_inside(text)

    def encode_inside(self, text: str) -> list[int]:
        return [1 + code for code in text.encode()]

    def render_chat(self, messages: object, now: object = None) -> list[int]:
        raise NotImplementedError


DIGITS = Digits()


def allows(matcher: Matcher, text: bytes) -> bool:
    mask = matcher.mask()
    assert mask is not None
    return bool(np.unpackbits(mask, bitorder="little")[257 if text == b"000" else 1 + text[0]])


@pytest.mark.parametrize(
    ("schema", "start", "digit", "most"),
    [
        ({"type": "integer"}, b"1", b"0", INTEGER_DIGITS - 1),
        ({"type": "integer"}, b"-9", b"9", INTEGER_DIGITS - 1),
        ({"type": "number"}, b"0.", b"3", FRACTION_DIGITS),
        ({"type": "number"}, b"5", b"5", INTEGER_DIGITS - 1),
        ({"type": "number"}, b"1.5e", b"2", EXPONENT_DIGITS),
        ({"type": "number"}, b"1.5e+", b"3", 2),
        ({"type": "number"}, b"1E-", b"9", EXPONENT_DIGITS),
        ({"type": "number", "minimum": 0, "maximum": 1}, b"0.", b"7", FRACTION_DIGITS),
        ({}, b"[1, 2", b"2", INTEGER_DIGITS - 1),
        ({"type": "string"}, b'"', b"1", 60),
        ({"type": "string", "pattern": "^[0-9]{40}$"}, b'"', b"1", 40),
        ({"enum": [10**17, 5]}, b"1", b"0", 17),
    ],
)
def test_numbers_have_a_bounded_number_of_digits_and_strings_have_not(schema: object, start: bytes, digit: bytes, most: int) -> None:
    matcher = Grammars(DIGITS, tried=True).matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for code in start:
        matcher.take(1 + code)
    n_digits = 0
    while n_digits < 60 and allows(matcher, digit):
        if digit == b"0" and n_digits + 3 > most:
            assert not allows(matcher, b"000"), "a token of several digits goes beyond the bound"
        matcher.take(1 + digit[0])
        n_digits += 1
    assert n_digits == most
    if n_digits < 60:
        assert matcher.error is None
        assert np.any(matcher.mask()), "something may follow"


def test_a_regex_of_the_client_has_the_digits_that_it_says() -> None:
    matcher = Grammars(DIGITS, tried=True).matcher(Grammar(GrammarKind.REGEX, "[0-9]{5,30};"))
    for _ in range(30):
        assert allows(matcher, b"1")
        matcher.take(1 + ord("1"))
    assert not allows(matcher, b"1")
