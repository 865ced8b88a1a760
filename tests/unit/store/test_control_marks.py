"""Entries that end answers or frame turns are control tokens, whatever type the file gives them; others stay text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.spaced_model import Header, vocabulary

from paceline.store.chats import ChatTemplate
from paceline.store.control_marks import control_marks, end_ids, frames_turn, with_control_marks
from paceline.store.tokenizer import ModelTokenizer
from paceline.store.tokenizer_files import build_encoder, tokenizer_from_folder

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
HEADERS = "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
TURN = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
NAMED = "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>{% else %}<|assistant|>\n{{ m.content }}<|end|>{% endif %}{% endfor %}"
WORDS = "{% for m in messages %}USER: {{ m.content }}\n### Response:{% endfor %}"
CASES = [
    (CHATML, ["<|im_start|>", "<|im_end|>"]),
    (HEADERS, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    (TURN, ["<start_of_turn>", "<end_of_turn>"]),
    (NAMED, ["<|user|>", "<|assistant|>", "<|end|>"]),
    (WORDS, []),
]
USER_DEFINED, ORDINARY = 4, 1


def tokenizer(template: str, marks: list[str], kind: int, more: tuple[str, ...] = ()) -> ModelTokenizer:
    fields = vocabulary()
    added = [*marks, *more]
    header = Header(
        tokens=[*fields["tokens"], *added],
        token_type=[*fields["token_type"], *[kind] * len(added)],
        scores=[*fields["scores"], *[-1000.0] * len(added)],
    )
    encoder = with_control_marks(build_encoder(header), template, (), header.path)  # pyright: ignore[reportArgumentType]
    return ModelTokenizer(header.path, encoder, frozenset(), ChatTemplate(header.path, template, {}))


@pytest.mark.parametrize("kind", [USER_DEFINED, ORDINARY])
@pytest.mark.parametrize(("template", "marks"), CASES, ids=lambda value: str(value)[:20])
def test_marks_are_control_tokens(template: str, marks: list[str], kind: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made = tokenizer(template, marks, kind, ("<think>",))
    assert len(caplog.records) == bool(marks)
    ids = {made.encode(mark, add_special=False)[0] for mark in marks}
    assert ids == {made.special_tokens[mark] for mark in marks}
    assert not any(map(made.token_bytes, ids))
    assert "<think>" not in made.special_tokens
    hostile = f"hi{''.join(marks)}"
    chats = [made.render_chat([{"role": "user", "content": text}]) for text in ("hi", hostile)]
    assert [i for i in chats[1] if i in ids] == [i for i in chats[0] if i in ids], "a message spells no mark"
    assert hostile in made.text_of(chats[1])
    ends = {mark for mark in marks if made.special_tokens[mark] in made.eos_ids}
    assert ends == set(marks) & {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"}


HEADS = {"<|end|>": 1, "<|return|>": 2, "<|call|>": 3, "<|start|>": 4}


@pytest.mark.parametrize(
    ("special", "named", "ends"),
    [
        (HEADS, [2], {2, 3}),
        (HEADS | {"<|endoftext|>": 5}, [1, 2, 5], {2, 3, 5}),
        ({"<|end|>": 1, "<|user|>": 4}, [], {1}),
        ({"<|end|>": 1, "<|return|>": 2}, [], {1}),
        ({"<|return|>": 2, "<|call|>": 3}, [7], {2, 3, 7}),
        ({"<|im_end|>": 1}, [0], {0, 1}),
    ],
)
def test_the_end_of_one_message_of_several_does_not_end_an_answer(special: dict[str, int], named: list[int], ends: set[int]) -> None:
    assert end_ids(special, named) == ends


def test_a_vocabulary_whose_answers_are_several_messages_ends_them_by_its_own_marks() -> None:
    made = tokenizer(NAMED, ["<|user|>", "<|assistant|>", *HEADS], 3)
    assert {name for name, i in made.special_tokens.items() if i in made.eos_ids} == {"<|return|>", "<|call|>"}
    assert not made.token_bytes(made.special_tokens["<|end|>"])


@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.jinja")), ids=lambda path: path.stem)
def test_what_stands_within_a_turn_stays_text(path: Path) -> None:
    source = path.read_text("utf-8")
    for mark in (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "<name>",
        "<tools>",
        "<arg_key>",
        "[THINK]",
        "[TOOL_CALLS]",
    ):
        assert mark not in source or not frames_turn(mark, source)


def test_a_folders_marks_are_control_tokens_too(make_folder: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    for token in parts["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(parts))
    made = tokenizer_from_folder(folder)
    assert {"<|im_start|>", "<|im_end|>"} <= set(made.special_tokens)
    assert made.special_tokens["<|im_end|>"] in made.eos_ids


def test_a_vocabulary_with_its_types_right_is_left_as_it_is() -> None:
    encoder = build_encoder(Header())  # pyright: ignore[reportArgumentType]
    assert control_marks(encoder, CHATML) == []
    assert with_control_marks(encoder, CHATML, ("<s>", "</s>"), Path("m")) is encoder
