"""Grammars of llama.cpp allow what llama.cpp allows, byte by byte, recursive ones too."""

from __future__ import annotations

import itertools
import random
import re
from contextlib import nullcontext

import pytest
from tests.sampling import ALL, draws
from tests.unit.engine.test_whole_forms import DIGITS

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars
from paceline.server.formats import overruns
from paceline.server.formats.gbnf import gbnf_as_lark, is_gbnf

GRAMMARS = Grammars(DIGITS, tried=True)


def allows(grammar: str, text: str) -> bool:
    """Return whether a text may be written byte by byte, and end."""
    matcher = GRAMMARS.matcher(Grammar(GrammarKind.LARK, gbnf_as_lark(grammar)))
    for token in DIGITS.encode(text):
        if matcher.mask([token]) is None:
            return False
        matcher.take(token)
    return matcher.is_accepting


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
JSON_LIST = JSON.replace("root   ::= object", 'root ::= list\nlist ::= "[\\n" ws (value (",\\n" ws value)*)? "]"')
ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""
C = r"""root ::= (declaration)*
declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"
dataType  ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= dataType identifier
statement ::=
    ( dataType identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" argList? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "for" "(" forInit ";" ws condition ";" ws forUpdate ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( singleLineComment ) |
    ( multiLineComment )
forInit ::= dataType identifier ws "=" ws expression | identifier ws "=" ws expression
forUpdate ::= identifier ws "=" ws expression
condition ::= expression relationOperator expression
relationOperator ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")
expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*
factor ::= identifier | number | unaryTerm | funcCall | parenExpression
unaryTerm ::= "-" factor
funcCall ::= identifier "(" argList? ")"
parenExpression ::= "(" ws expression ws ")"
argList ::= expression ("," ws expression)*
number ::= [0-9]+
singleLineComment ::= "//" [^\n]* "\n"
multiLineComment ::= "/*" ( [^*] | ("*" [^/]) )* "*/"
ws ::= ([ \t\n]+)
"""
ENGLISH = r"""root ::= en-char+ ([ \t\n] en-char+)*
en-char ::= letter | digit | punctuation
letter ::= [a-zA-Z]
digit ::= [0-9]
punctuation ::= [!"#$%&'()*+,-./:;<=>?@[\\\]^_`{|}~]
"""
JAPANESE = r"""root ::= jp-char+ ([ \t\n] jp-char+)*
jp-char     ::= hiragana | katakana | punctuation | cjk
hiragana    ::= [ぁ-ゟ]
katakana    ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk         ::= [一-鿿]
"""
LIST = 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
SAMPLES: dict[str, tuple[str, list[str], list[str]]] = {
    "json": (
        JSON,
        ['{"a": [1, 2.5e3, true], "b": {"c": "x\\n\\u00e9"}}', "{}", '{ "a":\n\t [] }'],
        ["[1]", '{"a" 1}', '{"a": 01}', '{"a": 1', '{"a":  1}'],
    ),
    "json list": (JSON_LIST, ['[\n1,\n{"a": 2}]', "[\n]"], ["[1]", "[\n1, 2]", "[\n1]\n"]),
    "arithmetic": (
        ARITHMETIC,
        ["x=1\n", "x = 10\n", "a1 *(b +2) -3 =\n7 \n", "(\n((a) ) )=b\nc=d\n", "x=1\n \n\ny=2\n", "1 = 1\n\n\n"],
        ["x=1", "x=\n", "=1\n", "1a=2\n", "x y=1\n", "(x=1\n", "x=1\n=2\n", "x==1\n"],
    ),
    "chess": (
        CHESS,
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O O-O-O+\n12. exd8=Q# Rad1\n"],
        ["1. e9 e5\n", "1. e4 e5\n", "1. e4 e5\n100. e4 e5\n"],
    ),
    "c": (
        C,
        [
            "",
            "int main(){return 0;}",
            "int f(char c){int x = -1*( y+2 );}",
            "float g(){while(intx<=10){g (1, h());intx = 2;}}",
            "int f(){for(i = 0; i<n; i = i+1){if(a==b){f ();}else{returned = 3;}}}",
            "int f(){// no * end\nint y = 1;/* a ** b */}",
            "int f(){/****/}char  h(){}",
            "int f(){int intern = 1;return if_;}",
        ],
        ["int main()", "int f(){return0}", "int f(){x=1;}", "intf(){}", "int f(){if(a){}}", "int f(){/* a }", "int f(int){}"],
    ),
    "older json": (
        JSON.replace('ws ::= | " " | "\\n" [ \\t]{0,20}', "ws ::= ([ \\t\\n] ws)?"),
        ['{"a":\n\t  [1, 2.5e3 ,true]\n}\n\n', "{}"],
        ["[1]", '{"a" 1}'],
    ),
    "elements": (
        'root ::= el\nel ::= "<" name ">" content "</" name ">"\nname ::= [a-z]+\ncontent ::= "" | text content | el content\ntext ::= [^<]+',
        ["<b>hello <i>world</i>, é\n</b>", "<b></b>"],
        ["<b>hello", "hello", "<b><</b>"],
    ),
    "list": (LIST, ["- a\n- bé\n", "- -\n"], ["x", "- \n", "- a", "- a\x0b\n"]),
    "english": (ENGLISH, ["It's 5 o'clock, [or] not?", 'a\n"b"\\'], ["é", "a  b", " a", "a "]),
    "japanese": (JAPANESE, ["あい。 カ", "漢字"], ["a", "あ  い", "あ "]),
    "chess moves": (
        'root ::= "1. " move "\\n"\nmove ::= ([NBKQR] [a-h]? "x"? | "") [a-h] [1-8] [+#]?',
        ["1. e4\n", "1. Nf3+\n"],
        ["1. e9\n"],
    ),
    "names": (
        'root ::= start fooBar foo-bar foo_bar\nstart ::= "a"\nfooBar ::= "b"\nfoo-bar ::= "c"\nfoo_bar ::= "d" | root',
        ["abcd", "abcabcd"],
        ["ab"],
    ),
    "letters": ('root ::= "a" . "b" "\\x41\\u00e9\\"\\[/\\u0001"', ['a\nbAé"[/\x01', 'aébAé"[/\x01'], ["ab"]),
    "classes": ('root ::= [a&&b~^\\]-]+ [[/] "\\t\\\\"', ["a&b~^]-[\t\\"], ["c[\t\\"]),
    "lines": ('  root ::= (\n  "a" |\n  "b" # c\n)+\n  | x\nx ::=\n "x"{2}', ["ab", "xx"], ["c", "x"]),
    "choice of texts": ('root ::= ("yes" | "no")', ["yes", "no"], ["maybe", "y"]),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_published_grammar_allows_its_texts_and_no_others(name: str) -> None:
    grammar, texts, others = SAMPLES[name]
    assert is_gbnf(grammar)
    assert {text: allows(grammar, text) for text in (*texts, *others)} == dict.fromkeys(texts, True) | dict.fromkeys(others, False)


NESTED = '\nnested ::= "" | "<" root ">"'
RECURSIVE: list[tuple[str, str, str]] = [
    ('root ::= [a-c]* "c" nested', r"[a-c]*c", "abc"),
    ("root ::= word nested [b-d]+\nword ::= [a-c]+", r"[a-c]+[b-d]+", "abd"),
    ('root ::= ([ab]+ "b")+ nested', r"([ab]+b)+", "ab"),
    ('root ::= ("i" | "in") name nested\nname ::= [in]*', r"(i|in)[in]*", "in"),
    ('root ::= (name | "if" ws "x") nested [ f]\nname ::= [fi]+\nws ::= " "*', r"([fi]+|if *x)[ f]", "fi x"),
    ('root ::= "a"? "b"? [ab]{2,3} nested "a"?', r"a?b?[ab]{2,3}a?", "ab"),
    ('root ::= [ab]{2} nested [bc]{1,3} "b"', r"[ab]{2}[bc]{1,3}b", "abc"),
    ('root ::= ("a" | "b" "a"?){2,3} nested "a"*', r"(a|ba?){2,3}a*", "ab"),
    ('root ::= line+ nested\nline ::= [a-c] ws "\\n"\nws ::= [ \\n]*', r"([a-c][ \n]*\n)+", "a \n"),
    ('root ::= ("/*" ([^*] | "*" [^/])* "*/")+ nested', r"(/\*([^*]|\*[^/])*\*/)+", "/*"),
    ('root ::= ("a"* "b"*){0,2} nested ("ab")?', r"(a*b*){0,2}(ab)?", "ab"),
    ('root ::= [à-é]* nested "ñ" [é-ñ]?', r"[à-é]*ñ[é-ñ]?", "éñò"),
    ('root ::= [ab] root | nested "c"', r"[ab]*c", "abc"),
    ('root ::= (word | nested "-")*\nword ::= [ab]+', r"[ab-]*", "ab-"),
    ('root ::= item+ nested "c"\nitem ::= [ab]+ | "c" nested', r"[abc]+c", "abc"),
    ('root ::= ws nested "a" ws\nws ::= ([ \\n] ws)?', r"[ \n]*a[ \n]*", "a \n"),
    ('root ::= root "b" | "a" nested | root "c"', r"a[bc]*", "abc"),
    ('root ::= "a"? root? | nested "b"', r"a*b?", "ab"),
    ('root ::= ("a" | "b" root)? nested | "c" root', r"[bc]*a?", "abc"),
    ('root ::= list nested "a"?\nlist ::= list "," [ab]+ | [ab]+', r"[ab]+(,[ab]+)*a?", "ab,"),
]


def misread(grammar: str, pattern: str, letters: str, draw: random.Random, most: int = 150) -> dict[str, bool]:
    """Return short texts that a grammar allows and an expression does not, or the other way round."""
    texts = ["".join(text) for length in range(6) for text in itertools.product(letters, repeat=length)]
    expected = {text: re.fullmatch(pattern, text) is not None for text in draw.sample(texts, min(len(texts), most))}
    return {text: right for text, right in expected.items() if allows(grammar, text) is not right}


@pytest.mark.parametrize(("grammar", "pattern", "letters"), RECURSIVE)
def test_a_recursive_grammar_loses_no_text_and_allows_no_other(grammar: str, pattern: str, letters: str) -> None:
    assert misread(grammar + NESTED, pattern, letters, random.Random(pattern)) == {}


def random_part(draw: random.Random, deep: int) -> tuple[str, str]:
    """Return a part of a rule, and an expression for the same texts."""
    kind = draw.choice(["letter", "class", "text", *["sequence", "choice", "repeat", "repeat"] * (deep > 0)])
    inner = [random_part(draw, deep - 1) for _ in range(draw.randint(2, 3))] if deep > 0 else []
    match kind:
        case "letter" | "text":
            text = "".join(draw.choices("ab", k=1 if kind == "letter" else draw.randint(1, 3)))
            return f'"{text}"', text
        case "class":
            return draw.choice([("[ab]", "[ab]"), ("[^a]", "[^a]")])
        case "sequence":
            nested = draw.choice([" nested", ""])
            return f"({' '.join(a for a, _ in inner)}{nested})", f"(?:{''.join(b for _, b in inner)})"
        case "choice":
            return f"({' | '.join(a for a, _ in inner)})", f"(?:{'|'.join(b for _, b in inner)})"
        case _:
            count = draw.choice(["*", "+", "?", "{2}", "{1,2}", "{0,3}"])
            return f"({inner[0][0]}){count}", f"(?:{inner[0][1]}){count}"


@pytest.mark.parametrize("seeds", [draws("random grammars").sample(range(1000), 1000 if ALL else 25)], ids=["seeds"])
def test_random_recursive_grammars_lose_no_text_and_allow_no_other(seeds: list[int]) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        parts = [random_part(draw, 3) for _ in range(2)]
        grammar = f"root ::= {parts[0][0]} nested {parts[1][0]}{NESTED}"
        assert misread(grammar, parts[0][1] + parts[1][1], "ab", draw, 40) == {}, f"seed {seed}: {grammar}"


@pytest.mark.parametrize(
    "grammar",
    [
        *(
            "root ::= other",
            'item ::= "a"',
            'root ::= "a',
            "root ::= [a",
            'root ::= ("a"',
            "root ::= <[5]>",
            'root ::= "a"{2,1}',
            'root ::= "a"**',
        ),
        *("root ::= [^\\x01-\\U0010ffff]", 'root ::= "a") "b"', 'root ::= "\\U00ffffff"', "root root ::= x", "root ::= " + "(" * 5000),
        *('root ::= "\\ud800"', 'root ::= "\ud800"', "root ::= [\\ud800-\\udfff]", 'root ::= "\\x00"', 'root ::= "a"{' + "9" * 5000 + "}"),
        "root ::= " + '"a" ' * 20_000,
    ],
    ids=lambda grammar: ascii(grammar[:30]),
)
def test_what_is_not_a_grammar_of_llama_cpp_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="GBNF") as refused:
        gbnf_as_lark(grammar)
    assert refused.value.field == "grammar"
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" | "b" tail\ntail ::= "c" tail', "tail"),
        ('root ::= "a" one?\none ::= two{2}\ntwo ::= "x" (one | two)', "one"),
    ],
)
def test_a_rule_that_never_ends_is_refused_by_name(grammar: str, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"rule {rule} ") as refused:
        gbnf_as_lark(grammar)
    assert refused.value.field == "grammar"


HOSTILE: dict[str, str] = {
    "rules in rules": "\n".join(["root ::= r0 root?", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)), 'r60 ::= "a"']),
    "alike": "root ::= ((" + " | ".join(f'[a-z]* "{n}"? [a-z]*' for n in range(300)) + ") root?)",
    "a long chain": "\n".join([*(f"r{n} ::= r{n + 1} | r0 " for n in range(3000)), 'r3000 ::= "a"', "root ::= r0"]),
    "counts": "root ::= ((([a-z]{0,200}){0,200}){0,200} [a-z]{0,200}){0,200} nested" + NESTED,
    "optional parts": "root ::= " + '[ab]? "b"? ' * 2000 + "nested" + NESTED,
}


REFUSED = HOSTILE.keys() - {"rules in rules"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_converted_or_refused_by_a_rule_in_bounded_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overruns, "_WORK", 40_000)
    gbnf_as_lark.cache_clear()
    with pytest.raises(InvalidRequest, match="rule r") if name in REFUSED else nullcontext():
        assert len(gbnf_as_lark(HOSTILE[name])) < 1 << 18


def test_a_grammar_of_lark_is_not_taken_for_one() -> None:
    assert not is_gbnf('start: "::=" /[a-z]+/ // root ::= x\n')
