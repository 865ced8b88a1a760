"""Forms for a model whose answers are several messages with heads: reasoning comes first, and the form is of the last message."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fakes.scripted_inference import EOS, ByteTokenizer, ScriptedInference

from paceline.core.generation import GenerationChunk, GenerationRequest, Grammar
from paceline.core.text import NOTHING_GIVEN, Given, Tokenizer
from paceline.engine.grammar import Grammars
from paceline.store.control_marks import end_ids

from .conftest import Serve

TEMPLATE = (Path(__file__).parents[1] / "data" / "templates" / "openai-gpt-oss-120b.jinja").read_text()
MARKS = ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
SPECIAL = {name: EOS + place for place, name in enumerate(MARKS)}


class HeadedTokenizer(ByteTokenizer):
    """Bytes, and the marks of heads. A chat is rendered as what is to be answered, since the scripted inference repeats its prompt."""

    size = EOS + len(MARKS)
    eos_ids = end_ids(SPECIAL, ())
    special_tokens = SPECIAL
    chat_template = TEMPLATE

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id >= EOS else bytes([token_id])

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, MARKS))})", text) if add_special else [text]
        return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL and add_special else part.encode())]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        del now, given
        return self.encode(messages[-1]["content"])


GRAMMARS = Grammars(cast("Tokenizer", HeadedTokenizer()), tried=True)


def follows(grammar: Grammar, text: str) -> bool:
    """Return whether a form allows a text, and lets it end there."""
    matcher = GRAMMARS.matcher(grammar)
    for token in HeadedTokenizer().encode(text):
        if token in HeadedTokenizer.eos_ids:
            return matcher.is_accepting
        if matcher.mask([token]) is None:
            return False
        matcher.take(token)
    return False


class Following(ScriptedInference):
    """Says what the last message has, as far as the form allows it."""

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        text = "".join(next((name for name, i in SPECIAL.items() if i == token), chr(token)) for token in request.prompt_ids)
        assert request.grammar is not None
        if not follows(request.grammar, text):
            raise ValueError("the form does not allow this answer")
        async for item in super().generate(model, request):
            yield item


THOUGHT = "<|channel|>analysis<|message|>A number. {1}<|end|><|start|>assistant"
FINAL = '<|channel|>final<|message|>{"a": 1}<|return|>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "json_object"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["type"])
@pytest.mark.parametrize(("thought", "reasoning"), [("", None), (THOUGHT, "A number. {1}")])
def test_the_last_message_is_of_the_form_behind_reasoning(
    serve_with: Serve, thought: str, reasoning: str | None, form: dict[str, Any]
) -> None:
    served = serve_with(Following(tokenizer=HeadedTokenizer(), tokens_per_item=5))
    body = {"messages": [{"role": "user", "content": thought + FINAL}], "response_format": form}
    (choice,) = served.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    assert (choice["finish_reason"], choice["message"].get("reasoning_content")) == ("stop", reasoning)
    assert json.loads(choice["message"]["content"]) == {"a": 1}
    lines = served.http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (reasoning or "")


@pytest.mark.parametrize(
    "answer", [THOUGHT + FINAL.replace("1}", "x}"), "{}<|return|>", THOUGHT + "<|return|>", THOUGHT + FINAL.replace('"a"', '"b"')]
)
def test_an_answer_that_ends_without_the_form_is_not_allowed(serve_with: Serve, answer: str) -> None:
    served = serve_with(Following(tokenizer=HeadedTokenizer()))
    body = {"messages": [{"role": "user", "content": answer}], "response_format": FORMS[0]}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 500
