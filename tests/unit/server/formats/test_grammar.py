"""Under a grammar a model can write valid calls, and none that is not: with vocabularies that have the formats' marks as tokens, and that have not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tests.fakes.piece_vocabulary import PieceVocabulary
from tests.unit.server.formats.reading import read
from tests.unit.server.formats.test_families import FORMATS, marks

from paceline.core.generation import Grammar
from paceline.engine.grammar import Grammars, Matcher
from paceline.server.formats.format import Body, CallArguments, CallBegun, Content, Format
from paceline.server.formats.grammar import BranchChoice, calls_grammar
from paceline.server.formats.schema_types import alternatives
from paceline.store.gguf_header import read_header
from paceline.store.home import Home
from paceline.store.tokenizer_files import tokenizer_from_gguf

TEXT: dict[str, Any] = {"type": "string", "maxLength": 5}
TOOLS: dict[str, Any] = {
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 4, "minLength": 2},
            "mode": {"$ref": "#/$defs/Mode"},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "append": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "tags": {"type": "array", "items": TEXT, "maxItems": 2},
            "at": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "name": TEXT},
                "required": ["line"],
                "additionalProperties": False,
            },
        },
        "required": ["path", "size"],
        "additionalProperties": False,
        "$defs": {"Mode": {"enum": ["fast", "safe"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
NO_BYTES = [
    *(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|constrain|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[THINK]",
        "[/THINK]",
        "<|tool_call>",
    ),
    *(
        "<tool_call|>",
        '<|"|>',
        "<|channel>",
        "<channel|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<｜tool▁call▁end｜>",
        "｜DSML｜",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
    ),
    *(
        "<|tool_call_start|>",
        "<|python_start|>",
        "<|tool_call_argument_begin|>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|python_tag|>",
        "<|tool_call|>",
        "<think>",
    ),
    *(
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<start_function_call>",
        "<end_function_call>",
    ),
]
BYTES = [*(bytes([code]) for code in range(32, 127)), b"\n", b"\xc3", b"\xbc", *(c.encode() for c in "｜▁"), b'": "', b"</", b"tool"]


VOCABULARIES = [PieceVocabulary(BYTES, NO_BYTES), PieceVocabulary(BYTES)]
COMPILED = [(vocabulary, Grammars(vocabulary)) for vocabulary in VOCABULARIES]


def grammar(format_: Format, vocabulary: PieceVocabulary, choice: BranchChoice, **fields: Any) -> Grammar:
    found = calls_grammar(
        format_, **{"tools": TOOLS, "choice": choice, "parallel": True, "token_id": vocabulary.special_tokens.get, **fields}
    )
    assert found
    return found


def allowed(matcher: Matcher, size: int) -> list[int]:
    mask = matcher.mask()
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask, count=size, bitorder="little")).tolist()


def walk(matcher: Matcher, vocabulary: PieceVocabulary, seed: int, nudges: list[str], steps: int = 700) -> list[int] | None:
    """Tokens drawn at random among those allowed, and now and then a text where it may stand. None: no end was reached."""
    draw, ids = random.Random(seed), list[int]()
    while len(ids) < steps:
        options = allowed(matcher, vocabulary.size)
        assert options, vocabulary.spelled(ids)
        if vocabulary.size - 1 in options and (len(options) == 1 or draw.random() < 0.3):
            return ids
        forced = vocabulary.encode(draw.choice(nudges)) if len(options) > 20 and draw.random() < 0.2 else []
        new = forced if forced and matcher.mask(forced) is not None else [draw.choice([i for i in options if i != vocabulary.size - 1])]
        new = matcher.forced() or new
        for token in new:
            matcher.take(token)
        ids += new
    return None


def nudges(format_: Format, *, special: bool) -> list[str]:
    """What a model may be nudged to write anywhere. As mere text a mark of a head is a mark, too."""
    return [mark for mark in marks(format_) if special or format_.header is None or mark not in format_.header.marks]


def check(format_: Format, text: str, *, whole: bool, in_reasoning: bool = False) -> int:
    """How many calls a text has; each must be valid, and with `whole` there must be nothing else."""
    parts = read([text], format_, TOOLS, in_reasoning=in_reasoning)
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    for index, name in enumerate(names):
        arguments = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == index))
        jsonschema_rs.validate(TOOLS[name], arguments)
    if whole:
        assert names, text
        assert not [part for part in parts if isinstance(part, Content)], text
    return len(names)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FORMATS)
class TestGrammars:
    def test_a_required_answer_is_calls(self, family: str, special: bool) -> None:
        vocabulary, grammars = COMPILED[not special]
        format_, ended = FORMATS[family], 0
        for parallel in (True, False):
            form = grammar(format_, vocabulary, BranchChoice.REQUIRED, parallel=parallel)
            for seed in range(3):
                ids = walk(grammars.matcher(form), vocabulary, seed, nudges(format_, special=special))
                if ids is not None:
                    ended += 1
                    assert check(format_, vocabulary.spelled(ids), whole=True) == 1 or parallel
        assert ended > 1

    def test_calls_in_any_text_are_valid(self, family: str, special: bool) -> None:
        vocabulary, grammars = COMPILED[not special]
        format_ = FORMATS[family]
        form = grammar(format_, vocabulary, BranchChoice.AUTO)
        texts = [*nudges(format_, special=special), "So. "]
        ended = [ids for seed in range(6) if (ids := walk(grammars.matcher(form), vocabulary, seed, texts)) is not None]
        assert len(ended) > 2
        for ids in ended:
            check(format_, vocabulary.spelled(ids), whole=False)
        matcher = grammars.matcher(form)
        for token in vocabulary.encode("Any text: <b> {1}"):
            assert token in allowed(matcher, vocabulary.size)
            matcher.take(token)

    def test_each_call_that_is_written_so_is_allowed(self, family: str, special: bool) -> None:
        vocabulary, grammars = COMPILED[not special]
        format_ = FORMATS[family]
        way = next(way for way in format_.calls if way.written)
        assert way.written
        text = way.written.begin + way.written.call.replace("{name}", "now").replace("{index}", "0").replace("{arguments}", EMPTY[way.body])
        for choice in BranchChoice:
            matcher = grammars.matcher(grammar(format_, vocabulary, choice))
            for token in vocabulary.encode(text + way.written.end):
                assert token in allowed(matcher, vocabulary.size), vocabulary.spelled([token])
                matcher.take(token)
            assert vocabulary.size - 1 in allowed(matcher, vocabulary.size)
        assert check(format_, text + way.written.end, whole=True) == 1

    def test_no_other_tool_nor_argument_is_allowed(self, family: str, special: bool) -> None:
        vocabulary, grammars = COMPILED[not special]
        format_ = FORMATS[family]
        way = next(way for way in format_.calls if way.written)
        assert way.written
        before = way.written.begin + way.written.call.partition("{name}")[0]
        for choice in BranchChoice:
            matcher = grammars.matcher(grammar(format_, vocabulary, choice))
            assert matcher.mask(vocabulary.encode(before + "now")) is not None
            if choice is BranchChoice.REQUIRED or not way.at_start:  # a call without a mark: with another name it is a text
                assert matcher.mask(vocabulary.encode(before + "then")) is None
            wrong = way.written.call.replace("{name}", "now").replace("{index}", "0").replace("{arguments}", WRONG[way.body])
            assert matcher.mask(vocabulary.encode(way.written.begin + wrong)) is None


EMPTY = {Body.JSON: "{}", Body.OBJECT: "{}", Body.LAX: "{}", Body.PARAMETERS: "", Body.PYTHON: ""}
WRONG = {Body.JSON: '{"a', Body.OBJECT: '{"a', Body.LAX: "{a", Body.PARAMETERS: "<a", Body.PYTHON: "a"}


def test_without_tools_there_is_no_form() -> None:
    assert calls_grammar(FORMATS["hermes"], {}, BranchChoice.REQUIRED, parallel=True, token_id=lambda _: None) is None


def test_reasoning_that_the_prompt_began_is_gone_on_with() -> None:
    vocabulary, grammars = COMPILED[0]
    form = grammar(FORMATS["hermes"], vocabulary, BranchChoice.REQUIRED, in_reasoning=True)
    ids = vocabulary.encode('Hm.</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert grammars.matcher(form).mask(ids) is not None
    assert grammars.matcher(form).mask(vocabulary.encode("<tool_call>")) is None


def test_names_and_values_are_no_special_tokens() -> None:
    vocabulary, grammars = COMPILED[0]
    tools = {"a": {"type": "object", "properties": {"</think>": {"enum": ["<think>"]}}, "required": ["</think>"]}}
    form = grammar(FORMATS["glm"], vocabulary, BranchChoice.REQUIRED, tools=tools, parallel=False)
    ids = walk(grammars.matcher(form), vocabulary, 0, ["a"])
    assert ids
    assert read([vocabulary.spelled(ids)], FORMATS["glm"], tools)[-1] == CallArguments(0, '{"</think>": "<think>"}')


def test_the_bundled_models_vocabulary_follows_a_form(bundled_gguf: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(read_header(bundled_gguf), Home(tmp_path))
    grammars = Grammars(tokenizer)
    for family in ("hermes", "qwen_xml", "harmony"):
        form = calls_grammar(FORMATS[family], TOOLS, BranchChoice.REQUIRED, parallel=False, token_id=tokenizer.special_tokens.get)
        assert form
        way = FORMATS[family].calls[0]
        assert way.written
        matcher, draw, ids = grammars.matcher(form), random.Random(1), list[int]()
        new = tokenizer.encode(way.written.begin + way.written.call.partition("{name}")[0], add_special=False)
        while len(ids) < 300 and not tokenizer.eos_ids & set(new):
            for token in new:
                matcher.take(token)
            ids += new
            new = matcher.forced() or [draw.choice(allowed(matcher, tokenizer.size))]
        assert check(FORMATS[family], b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace"), whole=True) == 1


def test_every_alternative_of_an_argument_is_known_and_a_bomb_of_them_is_any_value() -> None:
    many = {"anyOf": [{"const": f"mode {number}"} for number in range(40)]}
    assert alternatives(many, {}) == many["anyOf"]
    bomb: dict[str, Any] = {"type": "string"}
    for _ in range(4):
        bomb = {"anyOf": [bomb] * 100}
    found = alternatives(bomb, {})
    assert len(found) <= 1100
    assert {} in found
