"""Grammars of llama.cpp are followed as llama.cpp follows them."""

from __future__ import annotations

import pytest
from tests.unit.engine.test_whole_forms import DIGITS

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars
from paceline.server.formats.gbnf import gbnf_as_lark, is_gbnf

GRAMMARS = Grammars(DIGITS, tried=True)
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# a comment
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= ("yes" | "no")', ["yes", "no"], ["maybe", "y"]),
        (JSON, ['{"a": [1, 2.5e3, true], "b": {"c": "x\\n\\u00e9"}}', "{}"], ["[1]", '{"a" 1}']),
        ('root ::= "1. " move "\\n"\nmove ::= ([NBKQR] [a-h]? "x"? | "") [a-h] [1-8] [+#]?', ["1. e4\n", "1. Nf3+\n"], ["1. e9\n"]),
        ('root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\u2028]+ "\\n"', ["- a\n- bé\n"], ["x", "- \n"]),
        ('root ::= [a-z]* "z"', ["abz", "z"], ["ab"]),
        ('root ::= start fooBar foo-bar foo_bar\nstart ::= "a"\nfooBar ::= "b"\nfoo-bar ::= "c"\nfoo_bar ::= "d" | root', ["abcd", "abcabcd"], ["ab"]),
        ('root ::= "a" . "b" "\\x41\\u00e9\\"\\[/"', ['a\nbAé"[/', 'aébAé"[/'], ["ab"]),
        ('root ::= [a&&b~^\\]-]+ [[/] "\\t\\\\"', ["a&b~^]-[\t\\"], ["c[\t\\"]),
        ("root ::= jp+ ([ \\t\\n] jp+)*\njp ::= [ぁ-ゟ] | [、-〾]", ["あい。 う"], ["a"]),
        ('  root ::= (\n  "a" |\n  "b" # c\n)+\n', ["ab"], ["c"]),
    ],
)  # fmt: skip
def test_what_a_grammar_of_llama_cpp_allows(grammar: str, texts: list[str], others: list[str]) -> None:
    assert is_gbnf(grammar)
    form = Grammar(GrammarKind.LARK, gbnf_as_lark(grammar))
    for text in (*texts, *others):
        matcher, tokens = GRAMMARS.matcher(form), DIGITS.encode(text)
        is_taken = matcher.mask(tokens) is not None
        for token in tokens if is_taken else ():
            matcher.take(token)
        assert (is_taken and matcher.is_accepting) is (text in texts), text


@pytest.mark.parametrize(
    "grammar", ["root ::= other", 'item ::= "a"', 'root ::= "a', "root ::= [a", 'root ::= ("a"', 'root ::= "\\u0001"', "root ::= <[5]>"]
)
def test_what_is_no_grammar_of_llama_cpp_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="GBNF") as refused:
        gbnf_as_lark(grammar)
    assert refused.value.field == "grammar"
    assert not any(theirs in refused.value.message for theirs in ("r0x", "Expected", "\n"))


def test_a_grammar_of_lark_is_not_taken_for_one() -> None:
    assert not is_gbnf('start: "::=" /[a-z]+/ // root ::= x\n')
