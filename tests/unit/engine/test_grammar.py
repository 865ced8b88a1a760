"""Answers of a given form: always of that form, the same bytes however they are computed, and in fewer steps where the form leaves no choice."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.clock import FakeClock
from tests.fakes.engines import Answer
from tests.fakes.executors import InOrderExecutor
from tests.fakes.null_backend import NullRunner
from tests.fakes.piece_vocabulary import PieceVocabulary

from paceline.core.errors import InvalidRequest
from paceline.core.generation import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.grammar import Grammars
from paceline.engine.refusals import GrammarRefusal

PIECES = [bytes([code]) for code in range(32, 127)] + [
    b"\n",
    *(b'{"', b'": ', b'", "', b"true", b"tr", b"name", b'"}', b"red", b"green", b'": "'),
]
EOS = len(PIECES) + 1


VOCABULARY = PieceVocabulary(PIECES)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "retired": {"type": "boolean"},
    },
    "required": ["name", "colours", "retired"],
    "additionalProperties": False,
}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))


def ask(n: int, grammar: Grammar | None = SCHEMA, **fields: object) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.9, seed=n)
    request = GenerationRequest(RequestId(f"r{n}"), tuple(range(1, 4 + n % 5)), 90, sampling, grammar=grammar)
    return replace(request, **fields)


def answers(
    *requests: GenerationRequest, depth: int = 1, lose: tuple[int, ...] = (), n_blocks: int = 400, grammars: Grammars | bool = True
) -> tuple[list[Answer], int]:
    """What requests answer together, and the steps that took."""
    runner = NullRunner(n_blocks=n_blocks, block_size=4, vocab=VOCABULARY.size, one_path=True)
    config = EngineConfig(max_context=128, max_running=8, prefill_chunk=8, max_guesses=64)
    seeds = count()
    engine = Engine(
        InOrderExecutor(runner, depth, lose, None), VOCABULARY, config, FakeClock(), entropy=lambda: next(seeds), drafting=DraftingConfig(),
        grammars=Grammars(VOCABULARY) if grammars is True else grammars or None,
    )  # fmt: skip
    for request in requests:
        engine.add(request)
    found = {request.request_id: Answer() for request in requests}
    steps = 0
    while engine.has_work:
        for chunk in engine.step():
            answer = found[chunk.request_id]
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            answer.finish, answer.error, answer.code = chunk.finish_reason, chunk.error, chunk.code
        engine.check_invariants()
        steps += 1
    return list(found.values()), steps


def is_of_schema(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "colours", "retired"] and len(found["name"]) <= 6 and {*found["colours"]} <= {"red", "green"}
        and found["retired"] in (True, False)
    )  # fmt: skip


ALONE = [answers(ask(n, draft="off"))[0][0] for n in range(8)]


def test_answers_are_of_their_form_and_end_with_it() -> None:
    assert {answer.finish for answer in ALONE} == {FinishReason.STOP}
    assert all(is_of_schema(answer.text) for answer in ALONE)
    assert len({answer.text for answer in ALONE}) > 4


@pytest.mark.parametrize("draft", ["off", "ngram", "auto"])
@pytest.mark.parametrize(
    ("depth", "lose", "n_blocks"), [(1, (), 400), (1, (), 24), (3, (), 400), (2, (4, 9, 17), 400)], ids=["", "preempted", "stages", "lost"]
)
def test_bytes_are_those_of_one_alone(draft: str, depth: int, lose: tuple[int, ...], n_blocks: int) -> None:
    together, _ = answers(*(ask(n, draft=draft) for n in range(8)), depth=depth, lose=lose, n_blocks=n_blocks)
    assert [(answer.token_ids, answer.text, answer.finish) for answer in together] == [
        (answer.token_ids, answer.text, answer.finish) for answer in ALONE
    ]


def test_an_answer_goes_on_at_another_machine_wherever_it_was_cut() -> None:
    whole = ALONE[3]
    for cut in range(1, len(whole.token_ids)):
        [rest], _ = answers(ask(3, so_far={0: tuple(whole.token_ids[:cut])}))
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert rest.finish is FinishReason.STOP


def test_what_the_form_forces_takes_no_steps_of_its_own() -> None:
    _, without = answers(ask(1, draft="off"))
    [answer], steps = answers(ask(1))
    assert answer.text == ALONE[1].text
    assert steps * 1.3 < without


def test_the_only_blanks_between_parts_are_one_behind_each_comma_and_colon() -> None:
    [answer], _ = answers(
        ask(5, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 9}'))
    )
    assert json.loads(answer.text) == [value == "true" for value in answer.text.strip("[]").split(", ")]


def test_regular_expressions_and_grammars() -> None:
    expression = r"[a-f]{3}-(red|green)\."
    (first, second), _ = answers(
        ask(1, Grammar(GrammarKind.REGEX, expression)), ask(2, Grammar(GrammarKind.LARK, 'start: ("a" | "b") start | "!"'))
    )
    assert re.fullmatch(expression, first.text)
    assert re.fullmatch("[ab]*!?", second.text)
    assert first.finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "response_format: "),
        (GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}', "response_format: it names a type"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": false}, "required": ["a"]}', "allows nothing"),
        (GrammarKind.JSON_SCHEMA, '{"oneOf": [{"type": "object"}, {"type": "object", "minProperties": 1}]}', "oneOf"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.org/schema.json"}', "response_format: "),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "keywords that are not supported"),
        (GrammarKind.REGEX, "(", "regex: an expression can't be followed: unclosed group"),
        (GrammarKind.REGEX, "a(?=b)", "regex: look-around"),
        *((GrammarKind.REGEX, regex, "regex: it matches no text") for regex in (r"[^\s\S]", "[a&&b]", r"[a-z]{3}[^\w\W]", r"b[^\w\W]|c[^\d\D]")),
        (GrammarKind.LARK, "start: A\nA: /a/ & /b/", "grammar: it matches no text"),
        (GrammarKind.LARK, 'start: start "a"', "grammar: it matches no text"),
        (GrammarKind.LARK, 'start: "a" B\nB: /a/ & /b/', "grammar: nothing may come behind 'a'"),
        (GrammarKind.LARK, "start: other", "the rule other"),
        (GrammarKind.LARK, "x" * (256 << 10 | 1), "262145 letters"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused_and_the_field_named(kind: GrammarKind, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        answers(ask(1, Grammar(kind, text)))
    assert says in refused.value.message
    assert not any(theirs in refused.value.message for theirs in ("\n", "parse error"))
    assert refused.value.field == {"json_schema": "response_format"}.get(kind, kind)


def test_a_model_whose_answers_have_no_end_takes_no_form() -> None:
    endless = PieceVocabulary(PIECES)
    endless.eos_ids = frozenset()
    with pytest.raises(InvalidRequest, match="no token that ends"):
        Grammars(endless).prepare(SCHEMA)


def test_a_form_and_no_end_exclude_one_another() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        answers(ask(1, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="not served"):
        answers(ask(1), grammars=False)


@settings(deadline=None)
@given(st.data())
def test_masks_of_guesses_are_those_of_the_tokens_alone(data: st.DataObject) -> None:
    """Whatever was guessed before, taken or not, a mask is of the grammar and the tokens in front of it."""
    grammars = Grammars(VOCABULARY)
    matcher, tokens = grammars.matcher(SCHEMA), list[int]()
    right = ALONE[2].token_ids

    def fresh(behind: list[int]) -> bytes | None:
        other = grammars.matcher(SCHEMA)
        for token in behind:
            if other.mask([token]) is None:
                return None
            other.take(token)
        mask = other.mask()
        assert mask is not None
        return mask.tobytes()

    for _ in range(data.draw(st.integers(1, 6))):
        guess = right[len(tokens) : len(tokens) + data.draw(st.integers(0, 5))]
        if data.draw(st.booleans()):
            guess = [*guess, data.draw(st.integers(1, EOS))]
        mask = matcher.mask(guess)
        assert (None if mask is None else mask.tobytes()) == fresh([*tokens, *guess])
        for token in right[len(tokens) : len(tokens) + data.draw(st.integers(0, 3))]:
            matcher.take(token)
            tokens.append(token)
        assert matcher.mask().tobytes() == fresh(tokens)  # pyright: ignore[reportOptionalMemberAccess]


BOMBS = {
    "depth": json.dumps(reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}, "required": ["a"]}, range(60), {"type": "string"})),
    "too deep": '{"a":' * 40_000 + "1" + "}" * 40_000,
    "doubling": json.dumps(
        {"$defs": {"d0": {"enum": ["x"]}} | {f"d{i}": {"properties": {side: {"$ref": f"#/$defs/d{i - 1}"} for side in "ab"}} for i in range(1, 40)}, "$ref": "#/$defs/d39"}
    ),
    "product": json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(4)]} for i in range(10)]}),
    "optional": json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}),
    "repeats": json.dumps({"type": "string", "pattern": "^(a?){500}a{500}$"}),
    "long": json.dumps({"type": "string", "minLength": 100_000}),
    "longest": json.dumps({"type": "string", "maxLength": 10**9}),
    "items": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "backtracking": json.dumps({"type": "string", "pattern": "^((a+)+)+$"}),
    "cycle": json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    "names": json.dumps({"properties": {f"clé {i} 鍵 😀": {"type": "integer"} for i in range(60)}, "required": ["clé 1 鍵 😀"]}),
}  # fmt: skip


@pytest.mark.parametrize("schema", BOMBS.values(), ids=BOMBS.keys())
def test_a_schema_that_would_grow_without_end_is_refused_or_followed(schema: str) -> None:
    """By what is counted while it is compiled and followed; memory and time are bounded with it."""
    with suppress(InvalidRequest):
        [answer], _ = answers(ask(1, Grammar(GrammarKind.JSON_SCHEMA, schema)))
        assert answer.finish in {FinishReason.STOP, FinishReason.LENGTH} or "can be followed" in (answer.error or "")


@pytest.mark.parametrize("grammar", ['start: x\nx: "a" | x x | x x x', "start: /" + "(a|b)?" * 2000 + "/", "start: /(.*a){200}/"])
def test_a_grammar_that_is_costly_to_follow_ends_in_an_answer_or_an_error(grammar: str) -> None:
    with suppress(InvalidRequest):
        [answer], _ = answers(ask(1, Grammar(GrammarKind.LARK, grammar)))
        assert answer.finish in {FinishReason.STOP, FinishReason.LENGTH} or "can be followed" in (answer.error or "")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}'),
        (GrammarKind.LARK, "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "{i}"' for i in range(9000)) + '\nr9000: "x"'),
    ],
    ids=["minutes", "a stack"],
)
def test_a_form_that_ends_its_compiler_is_refused_and_the_next_one_served(kind: GrammarKind, text: str) -> None:
    grammars = Grammars(VOCABULARY)
    with pytest.raises(InvalidRequest, match="seconds to compile"):
        grammars.prepare(Grammar(kind, text))
    grammars.prepare(Grammar(GrammarKind.REGEX, "[a-z]{2,7}"))


WIDE = {"anyOf": [{"type": "array", "items": {"type": "array", "items": {"const": f"v{i}"}}} for i in range(700)]}
HIDDEN = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": WIDE},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (WIDE, r"behind '\[*' is too much to follow"),
        (HIDDEN, r"behind '\{.*' is too much to follow"),
        ({"anyOf": WIDE["anyOf"] * 4}, "too large"),
    ],
    ids=["at once", "behind other text", "as a whole"],
)
def test_what_would_hold_up_the_engine_is_refused_before_an_answer_begins(schema: object, says: str) -> None:
    grammars = Grammars(VOCABULARY, tried=True)
    with pytest.raises(InvalidRequest, match=says) as first:
        grammars.prepare(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    with pytest.raises(InvalidRequest) as again:
        grammars.prepare(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert (again.value.message, again.value.field) == (first.value.message, "response_format")


def test_a_refusal_is_remembered_and_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr("paceline.engine.grammar.trial", lambda grammar: tried.append(grammar.text) or GrammarRefusal("it is too slow"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    monkeypatch.setattr("paceline.engine.grammar.REFUSALS", 2)
    grammars = Grammars(VOCABULARY)
    for text in "a", "a", "b", "a", "c", "b", "a":
        with pytest.raises(InvalidRequest, match="regex: it is too slow"):
            grammars.prepare(Grammar(GrammarKind.REGEX, text))
    assert tried == ["a", "b", "c", "b", "a"], "the two that were asked for last are known"


def test_a_grammar_is_compiled_once_whatever_asks_for_it() -> None:
    grammars = Grammars(VOCABULARY)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(grammars.prepare, [SCHEMA] * 8))
    first, second = grammars.matcher(SCHEMA), grammars.matcher(SCHEMA)
    first.take(VOCABULARY.encode('{"')[0])
    assert first.mask().tobytes() != second.mask().tobytes()  # pyright: ignore[reportOptionalMemberAccess]
    for n in range(70):
        grammars.prepare(Grammar(GrammarKind.REGEX, f"a{{{n + 1}}}"))
    assert grammars.matcher(SCHEMA).mask().tobytes() == second.mask().tobytes()  # pyright: ignore[reportOptionalMemberAccess]
