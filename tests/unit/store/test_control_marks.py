"""Entries that end answers or frame turns are control tokens, whatever type the file gives them; others stay text."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.spaced_model import Header, vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.core.errors import InvalidRequest
from paceline.core.text import Given
from paceline.store import turn_marks as turn_marks_module
from paceline.store.chats import ChatTemplate
from paceline.store.control_marks import control_marks, end_ids, with_control_marks
from paceline.store.tokenizer import ModelTokenizer, byte_alphabet
from paceline.store.tokenizer_files import build_encoder, tokenizer_from_folder
from paceline.store.turn_marks import _chats, turn_marks

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
    chats = ChatTemplate(header.path, template, {})
    encoder = build_encoder(header)  # pyright: ignore[reportArgumentType]
    encoder = with_control_marks(encoder, turn_marks(encoder, chats), (), header.path)
    return ModelTokenizer(header.path, encoder, frozenset(), chats)


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


class Known:
    """A vocabulary that has these entries, none of them a special token."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        del with_added_tokens
        return {name: place for place, name in enumerate(self._names)}

    def token_to_id(self, name: str) -> int | None:
        return self.get_vocab(with_added_tokens=True).get(name)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render probe chats here: templates of the tree need no bounds."""

    def texts(source: str, special: tuple[tuple[str, str], ...]) -> tuple[str | None, ...]:
        template, found = ChatTemplate(Path("t"), source, dict(special)), list[str | None]()
        for chat, tools in _chats():
            try:
                found.append(template.render(chat, datetime(2026, 1, 1, tzinfo=UTC), Given(tools=tools, begins_turn=False)))
            except InvalidRequest:
                found.append(None)
        return tuple(found)

    monkeypatch.setattr(turn_marks_module, "rendered_texts", texts)


def found(source: str, *names: str, tool_source: str | None = None) -> set[str]:
    return turn_marks(Known(*names), ChatTemplate(Path("t"), source, {"bos_token": "<s>"}, None, tool_source))  # type: ignore[arg-type]


WITHIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<name>", "<tools>", "<arg_key>")
MORE = (
    "<arg_value>",
    "[THINK]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<function=",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.jinja")), ids=lambda path: path.stem)
def test_what_stands_within_a_turn_stays_text(path: Path) -> None:
    source = path.read_text("utf-8")
    assert found(source, *WITHIN, *MORE) == set()
    frames = {
        *(
            "<|im_start|>",
            "<|im_end|>",
            "<|user|>",
            "<|eot_id|>",
            "<turn|>",
            "<|turn>",
            "<\uff5cUser\uff5c>",
            "[INST]",
            "[/INST]",
            "<|end|>",
        )
    }
    frames |= {"<|end_of_role|>", "<|im_user|>", "<|im_middle|>", "]~b]", "[e~[", "<\uff5cAssistant\uff5c>", "<|assistant|>"}
    marks = found(source, *WITHIN, *MORE, *frames)
    assert marks
    assert marks <= frames


EACH = "{% for m in messages %}"
END = "{% endfor %}"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("body", "marks"),
    [
        ("{{ '<|' + m.role + '|>' + m.content }}", {"<|user|>", "<|assistant|>", "<|system|>"}),
        ("{{ '<|' ~ m['role'] ~ '|>\n' ~ m['content'] }}", {"<|user|>", "<|assistant|>", "<|system|>"}),
        ("{{ '<|' ~ m.role | upper ~ '_TOKEN|>' ~ m.content }}<|END|>", {"<|USER_TOKEN|>", "<|END|>"}),
        ("{{ '[|' + m.role + '|]' + m.content }}[|endofturn|]\n", {"[|user|]", "[|endofturn|]"}),
        ("{{ '[UNUSED_TOKEN_146]' + m.role + '\n' + m.content }}[UNUSED_TOKEN_145]\n", {"[UNUSED_TOKEN_146]", "[UNUSED_TOKEN_145]"}),
        ("<|h|>{{ m.role }}<|/h|>{{ m.content | trim }}<|eot|>", {"<|h|>", "<|/h|>", "<|eot|>"}),
        ("{% set c = m.content %}{% if m.role == 'user' %}<_u>{{ c }}{% else %}<_b>{{ c }}<_e>{% endif %}", {"<_u>", "<_b>", "<_e>"}),
        ("<user>{{ m.content }}</user>", {"<user>", "</user>"}),
        ("{{ m.role | upper }}: {{ m.content }}\n", set()),
        ("<p>A turn</p>: {{ m.content }}. <br>", set()),
        (
            "{% if m.role == 'assistant' %}<|b|>\n<think>\n\n</think>\n\n{{ m.content }}{% else %}<|u|>\n{{ m.content }}{% endif %}<|e|>\n",
            {"<|b|>", "<|u|>", "<|e|>"},
        ),
        (
            "{% if m.role == 'assistant' %}<|b|></think>{{ m.content }}<|e|>{% else %}<|u|>{{ m.content }}{% endif %}",
            {"<|b|>", "<|u|>", "<|e|>"},
        ),
        (
            (
                "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
                "{% if m.role == 'user' %}[U] {{ m.content }} [/U]{% else %} {{ m.content }}</s>{% endif %}"
            ),
            {"[U]", "[/U]", "</s>"},
        ),
        (
            (
                "{% if m.role == 'tool' %}<|obs|>{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}"
                "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{% endif %}"
            ),
            {"<|obs|>", "<|user|>", "<|assistant|>"},
        ),
        (
            "{% if m.role == 'tool' %}<|user|><result>{{ m.content }}</result>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}",
            {"<|user|>", "<|assistant|>"},
        ),
    ],
)
def test_marks_are_found_however_a_template_spells_them(body: str, marks: set[str]) -> None:
    others = {"<think>", "</think>", "<call>", "</call>", "<result>", "</result>", "</p>", "<br>", "USER", "user", "\n"}
    assert found(EACH + body + END, *marks, *others) == marks


@pytest.mark.usefixtures("in_process")
def test_the_template_for_tools_has_marks_too() -> None:
    plain, tools = EACH + "<|a|>{{ m.content }}<|b|>" + END, EACH + "<|c|>{{ m.content }}<|d|>" + END
    assert found(plain, "<|a|>", "<|b|>", "<|c|>", "<|d|>", tool_source=tools) == {"<|a|>", "<|b|>", "<|c|>", "<|d|>"}


@pytest.mark.parametrize("source", ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}<|a|>", "{% <|a|>"])
def test_a_template_that_does_not_end_or_compile_has_no_marks(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_marks_module, "limit_of", lambda _: 0.01)
    assert found(source, "<|a|>") == set()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("mark", "normalizer", "hostile"),
    [
        ("<|TOKEN|>", normalizers.NFC(), "<|TO\u212aEN|>"),
        ("<|TOKEN|>", normalizers.NFKC(), "<|\uff34OKEN|>"),
        ("<|token|>", normalizers.Lowercase(), "<|TOKEN|>"),
        ("<|a\u2581b|>", normalizers.Replace(" ", "\u2581"), "<|a b|>"),
        ("<|TOKEN|>", normalizers.StripAccents(), "<|TO\u0301KEN|>"),
    ],
)
def test_no_text_becomes_a_mark_once_it_is_normalized(mark: str, normalizer: Any, hostile: str, special: bool) -> None:
    template = EACH + f"{{{{ '{mark}' + m.role + m.content }}}}" + END
    encoder = Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    encoder.normalizer = normalizer
    added = AddedToken(mark, normalized=True, special=special)
    encoder.add_special_tokens([added]) if special else encoder.add_tokens([added])
    made = ModelTokenizer(Path("x"), with_control_marks(encoder, [mark], (), Path("x")), frozenset(), ChatTemplate(Path("x"), template, {}))
    for text in (hostile, f"hi {hostile}, {mark}"):
        ids = made.render_chat([{"role": "user", "content": text}])
        assert ids.count(made.special_tokens[mark]) == 1


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
    assert control_marks(encoder, found(CHATML, "<|im_start|>")) == []
    assert with_control_marks(encoder, (), ("<s>", "</s>"), Path("m")) is encoder
