"""The official `ollama` client gets what Ollama would give it: from the scripted model, and from the bundled one through the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from typing import Any

import pytest
from tests.fakes.scripted_encoder import ScriptedEncoder
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.machine.host import EngineHost
from paceline.machine.settings import NodeSettings
from paceline.node.build import build_node

ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")

pytestmark = pytest.mark.timeout(600)  # the first load on a machine compiles kernels

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@pytest.fixture(scope="module")
def scripted() -> Generator[Served[ScriptedInference], None, None]:
    served = Served(ScriptedInference(), encoder=ScriptedEncoder())
    yield served
    served.close()


@pytest.fixture(scope="module")
def real() -> Generator[Served[EngineHost], None, None]:
    node = build_node(NodeSettings(kv_tokens=4096, context=2048, max_running=4, max_waiting=8))
    served = Served(node.host)
    yield served
    served.close()
    assert node.close()


def say(text: str) -> dict[str, Any]:
    """Fields of a chat that the scripted model answers with `text`, once."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "options": {"num_predict": len(text)}}


def test_models(real: Served[EngineHost]) -> None:
    with ollama.Client(real.url) as client:
        (listed,) = client.list().models
        (loaded,) = client.ps().models
        shown = client.show(listed.model)
    own = real.inference.models()[0]
    assert listed.model == f"{own.name}:latest"
    assert listed.digest == own.facts.digest
    assert listed.size is not None
    assert 80 << 20 < listed.size < 120 << 20
    assert (listed.details.family, listed.details.format, listed.details.quantization_level) == ("llama", "gguf", "Q4_1")
    assert listed.details.parameter_size == "134.52M"
    assert loaded.context_length == own.max_context == shown.modelinfo["llama.context_length"]
    assert shown.modelinfo["general.parameter_count"] == own.facts.parameters
    assert shown.capabilities == ["completion"]
    assert "im_start" in shown.template


def test_a_chat_streamed_and_whole_is_the_same(real: Served[EngineHost]) -> None:
    asked: dict[str, Any] = {
        "model": real.inference.models()[0].name,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "options": {"temperature": 0, "num_predict": 24, "num_ctx": 8192},
    }
    with ollama.Client(real.url) as client:
        whole = client.chat(**asked)
        *chunks, last = list(client.chat(**asked, stream=True))
    assert whole.message.content
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert min(last.prompt_eval_duration, last.eval_duration, whole.eval_duration) > 0


def test_a_schema_is_kept_to(real: Served[EngineHost]) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Ada", "Bo"]}},
        "required": ["age", "name"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"model": real.inference.models()[0].name, "format": schema, "options": {"temperature": 0, "num_predict": 64}}
    with ollama.Client(real.url) as client:
        chat = client.chat(messages=[{"role": "user", "content": "Who?"}], **asked)
        raw = client.generate(prompt="Who? ", raw=True, **asked)
        with pytest.raises(ollama.ResponseError, match=r"format\.type: ") as caught:
            client.chat(messages=[{"role": "user", "content": "Who?"}], **{**asked, "format": {"type": "nothing"}})
    assert caught.value.status_code == 400
    for text in (chat.message.content, raw.response):
        assert json.loads(text).keys() == {"age", "name"}


def test_a_turn_with_a_result_of_a_tool(real: Served[EngineHost]) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "", "thinking": "I add.", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "add", "content": "5"},
        {"role": "tool", "tool_name": "add", "content": "5"},
    ]
    with ollama.Client(real.url) as client:
        answer = client.chat(real.inference.models()[0].name, messages, tools=[add], options={"num_predict": 4, "temperature": 0})
    assert answer.done
    assert answer.prompt_eval_count > 100


def test_calls_of_tools(scripted: Served[ScriptedInference]) -> None:
    with ollama.Client(scripted.url) as client:
        whole = client.chat(**say(CALL), tools=[add])
        streamed = list(client.chat(**say(CALL), tools=[add], stream=True))
    (call,) = whole.message.tool_calls
    assert add(**call.function.arguments) == 5
    (again,) = [one for chunk in streamed for one in chunk.message.tool_calls or ()]
    assert again.function == call.function


def test_texts(scripted: Served[ScriptedInference]) -> None:
    with ollama.Client(scripted.url) as client:
        options = {"num_predict": 10}
        assert client.generate("echo", "hello", options=options).response == "hellohello"
        assert "".join(part.response for part in client.generate("echo", "hello", options=options, stream=True)) == "hellohello"
        assert client.generate("echo", "raw", raw=True, options={"num_predict": 3}).response == "raw"
        assert client.generate("echo", "hello", options={"num_predict": 10, "stop": ["never"]}, logprobs=True).logprobs[0].token == "h"
        assert client.generate("echo").done_reason == "load"


def test_embeddings(scripted: Served[ScriptedInference]) -> None:
    with ollama.Client(scripted.url) as client:
        several = client.embed("counts", ["\x01", "\x02\x02"])
        assert [list(vector)[1:3] for vector in several.embeddings] == [[1, 0], [0, 2]]
        assert list(client.embeddings("counts", "\x01").embedding) == list(several.embeddings[0])
        with pytest.raises(ollama.ResponseError, match=r"input\[1\]"):
            client.embed("counts", ["a", "b" * 65])


def test_errors(scripted: Served[ScriptedInference]) -> None:
    with ollama.Client(scripted.url) as client:
        with pytest.raises(ollama.ResponseError, match="not served here") as caught:
            client.chat("other", [{"role": "user", "content": "a"}])
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="paceline pull"):
            client.pull("llama3")


def test_side_by_side(scripted: Served[ScriptedInference]) -> None:
    async def together() -> list[str]:
        client = ollama.AsyncClient(scripted.url)
        try:
            answers = await asyncio.gather(*(client.chat(**say(f"number {i}")) for i in range(8)))
        finally:
            await client.close()
        return [answer.message.content for answer in answers]

    assert asyncio.run(together()) == [f"number {i}" for i in range(8)]
