"""A model that does what agents' tests ask of one, for tests of clients: it calls the tools it is shown, goes on from their results, and fills in forms.

Everything but the model is real: requests, messages as templates take them, calls read from text, streams. Law: what it says is a function of the last
messages. Shown tools, it calls those that the user names (else the first) with what fits their schemas: the numbers and the quoted words of the user's
message in their order. Behind results, it repeats them.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from tests.fakes.scripted_inference import EOS, ByteTokenizer, ScriptedInference

from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.inference import ServedModel
from paceline.core.text import NOTHING_GIVEN, Given

TEMPLATE = "{{ tools }} <tool_call>"
"""What tells its family: Hermes'."""


class AgentTokenizer(ByteTokenizer):
    """Renders a chat to what is to be said of it, since the scripted inference repeats its prompt."""

    @property
    def chat_template(self) -> str:
        return TEMPLATE

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        return [*self.encode(answer_to(messages, given.tools)), EOS]


def answer_to(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """What the model says."""
    last = messages[-1]
    if last["role"] == "tool":
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return f"The results: {'; '.join(results)}"
    asked = str(last["content"])
    functions = [tool["function"] for tool in tools]
    if not functions:
        return f"You said: {asked}"
    named = [function for function in functions if re.search(rf"\b{re.escape(function['name'])}\b", asked)] or functions[:1]
    calls = [{"name": function["name"], "arguments": instance(function["parameters"], asked)} for function in named]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def instance(schema: Mapping[str, Any], text: str) -> Any:
    """Something that a JSON schema allows, with values from a text."""
    return _Filler(schema, text).value(schema)


class _Filler:
    def __init__(self, root: Mapping[str, Any], text: str) -> None:
        self._root = root
        self._numbers = iter(re.findall(r"-?\d+(?:\.\d+)?", text))
        self._words = iter(re.findall(r"[\"']([^\"']+)[\"']", text))

    def value(self, schema: Mapping[str, Any]) -> Any:
        if "$ref" in schema:
            found: Any = self._root
            for name in schema["$ref"].removeprefix("#/").split("/"):
                found = found[name]
            return self.value(found)
        if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            return self.value(options[0])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        match schema.get("type", "object" if "properties" in schema else "string"):
            case "object" if "properties" not in schema:
                return dict.fromkeys(self._words, "some text")
            case "object":
                properties = cast("dict[str, Any]", schema["properties"])
                return {name: self.value(inner) for name, inner in properties.items()}
            case "array":
                return [self.value(schema.get("items", {})) for _ in range(max(1, schema.get("minItems", 1)))]
            case "integer":
                return int(float(next(self._numbers, "1")))
            case "number":
                return float(next(self._numbers, "1"))
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return next(self._words, "some text")


class ScriptedAgent(ScriptedInference):
    """An inference over it."""

    def models(self) -> Sequence[ServedModel]:
        return [replace(model, tokenizer=AgentTokenizer()) for model in super().models()]

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        """Say the answer; where a schema is asked for, something that it allows."""
        if request.grammar is not None and request.grammar.text.startswith("{"):
            said = json.dumps(instance(json.loads(request.grammar.text), bytes(i for i in request.prompt_ids if i != EOS).decode()))
            request = replace(request, prompt_ids=(*said.encode(), EOS))
        async for item in super().generate(model, request):
            yield item
