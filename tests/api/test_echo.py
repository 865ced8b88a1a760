"""Prompts that are repeated with their log probabilities. The script finds every token certain."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.fakes.api_clients import openai_client
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served


@pytest.mark.parametrize(
    ("prompt", "texts"), [("hello", ["hello"]), ([104, 105], ["hi"]), (["abc", "d"], ["abc", "d"]), ([[65], [66, 67]], ["A", "BC"])]
)
@pytest.mark.parametrize("most", [0, 2])
def test_whole_and_streamed_begin_with_the_prompt(shared: Served[ScriptedInference], prompt: Any, texts: list[str], most: int) -> None:
    client = openai_client(shared.url)
    body: dict[str, Any] = {"model": "echo", "prompt": prompt, "max_tokens": most, "echo": True, "logprobs": 1, "n": 2}
    whole = client.completions.create(**body)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * most * len(texts)
    streamed: dict[int, dict[str, list[Any]]] = {}
    for event in client.completions.create(**body, stream=True):
        for choice in event.choices:
            kept = streamed.setdefault(
                choice.index, {"text": [], "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            )
            kept["text"].append(choice.text)
            for name in kept:
                if choice.logprobs is not None and name != "text":
                    kept[name] += getattr(choice.logprobs, name)
    for choice in whole.choices:
        text = texts[choice.index // 2]
        answer = (text * 2)[:most]
        assert choice.text == text + answer
        logprobs = choice.logprobs
        assert logprobs is not None
        n = len(text) + most
        assert logprobs.tokens == list(text + answer)
        assert logprobs.token_logprobs == [None, *[0.0] * (n - 1)]
        assert logprobs.top_logprobs == [None, *({letter: 0.0} for letter in (text + answer)[1:])]
        assert logprobs.text_offset == list(range(n))
        assert choice.finish_reason == "length"
        seen = streamed[choice.index]
        assert "".join(seen.pop("text")) == choice.text
        assert seen == {name: getattr(logprobs, name) for name in seen}


def test_without_logprobs_the_prompt_alone_is_repeated(shared: Served[ScriptedInference]) -> None:
    for most, text in ((0, "hello"), (3, "hellohel")):
        body = {"model": "echo", "prompt": "hello", "max_tokens": most, "echo": True}
        (choice,) = shared.http.post("/v1/completions", json=body).json()["choices"]
        assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (text, None, "length")
        streamed = shared.http.post("/v1/completions", json=body | {"stream": True}).text
        events = [orjson.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == text


def test_a_chat_has_no_echo(shared: Served[ScriptedInference]) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "echo": True}
    assert shared.http.post("/v1/chat/completions", json=body).json()["error"]["param"] == "echo"
