from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference

from paceline.core.clock import SystemClock
from paceline.core.errors import ContextOverflow, InvalidRequest
from paceline.core.generation import FinishReason
from paceline.core.text import NOTHING_GIVEN, Given
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part
from paceline.server.intake import Intake
from paceline.server.responses.calls import Responses
from paceline.server.responses.conversation import SEAL, KeptBounds, KeptResponses, seal_reasoning, translate_error, write_messages
from paceline.server.responses.requests import AnyItem
from paceline.server.shape import Usage
from paceline.store.chats import ChatTemplate

QWEN = Path(__file__).parents[3] / "data" / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[AnyItem])
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {
    "type": "function_call_output",
    "call_id": "c1",
    "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}],
}


def written(*items: Mapping[str, object]) -> list[dict[str, Any]]:
    chat = write_messages("Be brief.", [], ITEMS.validate_python([dict(item) for item in items]))
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    spoken = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    assert written({"role": "user", "content": "?"}, thought, spoken, CALL, {**CALL, "call_id": "c2"}, RESULT, thought, spoken) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("c1", "c2")],
        },
        {"role": "tool", "content": "4\n2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."},
    ]


def test_two_messages_of_the_assistant_stay_two() -> None:
    one, other = ({"role": "assistant", "content": text} for text in ("a", "b"))
    assert [message["content"] for message in written(one, other)] == ["Be brief.", "a", "b"]


def test_reasoning_that_is_hidden_is_left_out() -> None:
    for content in ("AAAA", SEAL + "no base64", SEAL + "/w=="):
        hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": content}
        assert [message["role"] for message in written(hidden, {"role": "user", "content": "?"})] == ["system", "user"]


def test_reasoning_that_a_client_carried_is_read() -> None:
    carried = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal_reasoning("Hm, ü.")}
    assert written(carried, {"role": "assistant", "content": "!"})[1] == {
        "role": "assistant",
        "content": "!",
        "reasoning_content": "Hm, ü.",
    }


@pytest.mark.parametrize(
    ("inner", "message", "outer", "told"),
    [
        ("messages[1].tool_call_id", "messages[1].tool_call_id: missing", "input[4].call_id", "input[4].call_id: missing"),
        ("messages[0].content", "messages[0].content: missing", "instructions", "instructions: missing"),
        ("max_tokens", "max_tokens: too many", "max_tokens", "max_tokens: too many"),
        ("tools", "tools: two have the same name", "tools", "tools: two have the same name"),
    ],
)
def test_errors_about_messages_name_what_these_were_made_of(inner: str, message: str, outer: str, told: str) -> None:
    error = translate_error(ContextOverflow(message, "Lower max_tokens.", field=inner), ["instructions", "input[4]"])
    assert (type(error), error.field, error.message, error.hint) == (ContextOverflow, outer, told, "Lower max_output_tokens.")
    unnamed = InvalidRequest("no")
    assert translate_error(unnamed, []) is unnamed


class QwenTokenizer(ByteTokenizer):
    """Bytes, of a chat as Qwen 2.5's template writes it."""

    template = ChatTemplate(QWEN, QWEN.read_text("utf-8"), {})

    @property
    def chat_template(self) -> str:
        return self.template.source

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        return self.encode(self.template.render(messages, now or datetime(2026, 1, 1, tzinfo=UTC), given))


TOOL = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TURNS: list[tuple[object, list[Part], str]] = [
    ("Hello!", [Content("  Hello"), Content(" you\n")], "  Hello you\n"),
    (
        "What is f of 1 and 2?",
        [Content("Look:"), *(part for n in (0, 1) for part in (CallBegun(n, "f"), CallArguments(n, f'{{"a": {n}}}')))],
        "Look:" + "".join(f'\n<tool_call>\n{{"name": "f", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in (0, 1)),
    ),
    ([{"type": "function_call_output", "call_id": "?", "output": "42"}], [Content("42.")], "42."),
    ([{"role": "user", "content": "Thanks"}], [Content("Bye.")], "Bye."),
]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_turns_prompt_begins_with_what_was_said_before_it(*, streamed: bool) -> None:
    """Byte for byte, what the model wrote too: so a turn computes only what is new."""
    clock = FakeClock()
    responses = Responses(KeptResponses(KeptBounds(10, 1 << 20, 60.0), clock), clock)
    intake = Intake(ScriptedInference(tokenizer=QwenTokenizer()), SystemClock())
    said, previous, call_id = "", None, ""
    for given, parts, text in TURNS:
        items = [{**item, "call_id": call_id} if "call_id" in item else item for item in given] if isinstance(given, list) else given
        body = {"model": "echo", "input": items, "instructions": "Be brief.", "tools": [TOOL], "previous_response_id": previous}
        call = responses.call(intake, orjson.dumps(body | {"stream": streamed}))
        prompt = bytes(call.requests[0].prompt_ids).decode()
        assert prompt.startswith(said)
        said = prompt + text
        shape, usage = call.shape(call), Usage(1, 1, 0)
        if streamed:
            shape.first_events()
            shape.event(0, parts, (), FinishReason.STOP)
            shape.ending(usage)
        else:
            collected = shape.collected()
            collected.add(parts, (), FinishReason.STOP)
            shape.whole([collected], usage)
        previous = call.id
        kept = responses.kept.find(call.id)
        assert kept is not None
        call_id = next((str(item.shown["call_id"]) for item in kept.output if "call_id" in item.shown), "")
