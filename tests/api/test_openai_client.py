"""The official client gets what OpenAI's own server would give it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.fakes.api_clients import openai_client
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.generation import Notice
from paceline.server.settings import ServerSettings

Serve = Callable[..., Served[ScriptedInference]]

HELLO = [{"role": "user", "content": "hello"}]
STAMPS = r'"(id|created)":[^,]*,'


def client_of(served: Served[ScriptedInference]) -> OpenAI:
    return openai_client(served.url, served.settings.api_key)


def test_models(served: Served[ScriptedInference]) -> None:
    client = client_of(served)
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "paceline"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_chat_whole(served: Served[ScriptedInference]) -> None:
    answer = client_of(served).chat.completions.create(model="echo", messages=HELLO, max_completion_tokens=7, user="me")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_echo"
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "assistant", "hellohe", "length")
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 7, 12)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream(served: Served[ScriptedInference]) -> None:
    stream = client_of(served).chat.completions.create(
        model="echo", messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hellohe"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_bytes(served: Served[ScriptedInference]) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": 'a"\n'}], "max_tokens": 3, "stream": True}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert '"delta":{"content":"\\""}' in events[2]
    assert '"delta":{},"logprobs":null,"finish_reason":"length"' in events[-3]
    assert '"usage"' not in answer.text


def test_tokens_that_queued_up_share_an_event(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(tokens_per_item=4))
    stream = client_of(served).chat.completions.create(model="echo", messages=HELLO, max_tokens=10, stream=True, n=2)
    texts = [(c.choices[0].index, c.choices[0].delta.content) for c in stream if c.choices[0].delta.content]
    assert texts == [(i, text) for text in ("hell", "ohel", "lo") for i in (0, 1)]
    assert served.metric("paceline_inter_token_seconds_count") == 18


def test_chat_choices_and_logprobs(served: Served[ScriptedInference]) -> None:
    asked = {"model": "echo", "messages": HELLO, "max_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = client_of(served).chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    listed = answer.choices[1].logprobs
    assert listed is not None
    assert listed.content is not None
    assert [(one.token, one.bytes, one.logprob) for one in listed.content] == [("h", [104], 0.0), ("e", [101], 0.0), ("l", [108], 0.0)]
    assert [(top.token, top.logprob) for top in listed.content[0].top_logprobs] == [("h", 0.0), ("\0", -9999.0)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    streamed = list(client_of(served).chat.completions.create(**asked, stream=True))
    tokens = [one.token for chunk in streamed for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content or []]
    assert sorted(tokens) == sorted("hel" * 2)


def test_completion_prompts_and_logprobs(served: Served[ScriptedInference]) -> None:
    client = client_of(served)
    answer = client.completions.create(model="echo", prompt=["ab", "cde"], n=2, max_tokens=4, logprobs=2)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "abab", "length"),
        (1, "abab", "length"),
        (2, "cdec", "length"),
        (3, "cdec", "length"),
    ]
    listed = answer.choices[2].logprobs
    assert listed is not None
    assert (listed.tokens, listed.text_offset, listed.token_logprobs) == (list("cdec"), [0, 1, 2, 3], [0.0] * 4)
    assert listed.top_logprobs is not None
    assert listed.top_logprobs[0] == {"c": 0.0, "\0": -9999.0}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)
    for prompt, texts in (([97, 98], ["aba"]), ([[97], [98, 99]], ["aaa", "bcb"]), ("xy", ["xyx"])):
        assert [c.text for c in client.completions.create(model="echo", prompt=prompt, max_tokens=3).choices] == texts


def test_completion_stream(served: Served[ScriptedInference]) -> None:
    stream = client_of(served).completions.create(
        model="echo", prompt=["ab", "c"], max_tokens=3, logprobs=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, offsets = ["", ""], [list[int](), list[int]()]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        assert choice.logprobs is not None
        offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == ["aba", "ccc"]
    assert offsets == [[0, 1, 2], [0, 1, 2]]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 9


def test_stop_token_ends_an_answer(served: Served[ScriptedInference]) -> None:
    answer = client_of(served).completions.create(
        model="echo", prompt="abc", extra_body={"stop_token_ids": [99], "top_k": -1, "min_p": 0.1}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")


def test_missing_max_tokens_is_the_rest_of_the_context(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_context=32))
    answer = client_of(served).completions.create(model="echo", prompt="abc")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 29


def test_text_parts_are_joined_by_a_line_break(served: Served[ScriptedInference]) -> None:
    content = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
    answer = client_of(served).chat.completions.create(model="echo", messages=[{"role": "user", "content": content}], max_tokens=4)
    assert answer.choices[0].message.content == "he\ny"


def test_an_answer_can_be_sent_back(served: Served[ScriptedInference]) -> None:
    client = client_of(served)
    first = client.chat.completions.create(model="echo", messages=HELLO, max_tokens=3)
    messages = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="echo", messages=messages, max_tokens=4).choices[0].message.content == "more"


def test_key(serve_with: Serve) -> None:
    served = serve_with(settings=ServerSettings(api_key="open-sesame-open-sesame"))
    assert [model.id for model in client_of(served).models.list()] == ["echo"]
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "open-sesame-open-sesame"},
        {"Authorization": "Bearer open-sesame-open-sesam"},
    ):
        for path in ("/v1/models", "/metrics"):
            answer = httpx.get(served.url + path, headers=headers)
            assert answer.status_code == 401, (headers, path)
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(served.url + "/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai_client(served.url, "wrong").models.list()


def test_a_failed_generation_is_an_error_and_not_a_short_answer(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(fail_after=2))
    client = client_of(served)
    with pytest.raises(openai.InternalServerError, match="The script says: fail"):
        client.chat.completions.create(model="echo", messages=HELLO)
    stream = client.chat.completions.create(model="echo", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="The script says: fail"):
        list(stream)
    raw = served.http.post("/v1/completions", json={"model": "echo", "prompt": "ab", "stream": True}).text
    assert "[DONE]" not in raw


def test_leaving_a_stream_frees_its_blocks(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=2))
    stream = client_of(served).chat.completions.create(model="echo", messages=HELLO, stream=True, n=2)
    next(stream)
    assert served.metric("paceline_kv_blocks_used") > 0
    assert served.metric("paceline_requests_running") == 2
    stream.close()
    served.run(served.inference.until_live(0))
    assert served.metric("paceline_kv_blocks_used") == 0
    assert served.metric('paceline_sequences_finished_total{reason="abort"}') == 2


def test_async_clients_leaving_whole_answers_free_their_blocks(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=0))

    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            calls = [asyncio.create_task(client.completions.create(model="echo", prompt=["a", "b"])) for _ in range(8)]
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(served.inference.until_live(16), served.loop))
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(leave())
    served.run(served.inference.until_live(0))
    assert served.metric("paceline_kv_blocks_used") == 0


FAILOVER = Notice("shard_failover", {"lost": "b", "route": "m:0-7 on c"})
EVENTS = {"include_events": True}


def test_who_does_not_ask_sees_nothing_of_lost_machines(serve_with: Serve, served: Served[ScriptedInference]) -> None:
    troubled = serve_with(ScriptedInference(notices={0: FAILOVER, 3: FAILOVER, 6: FAILOVER}))
    for path, asked in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": ["hello", "you"]})):
        for stream in (True, False):
            body = {"model": "echo", "max_tokens": 7, "stream": stream, **asked}
            answers = [one.http.post(f"/v1/{path}", json=body).text for one in (troubled, served)]
            assert re.sub(STAMPS, "", answers[0]) == re.sub(STAMPS, "", answers[1])
    metrics = [
        [line for line in one.http.get("/metrics").text.splitlines() if re.match("paceline_(ttft|inter_token)_seconds_count", line)]
        for one in (troubled, served)
    ]
    assert metrics[0] == metrics[1]


def test_who_asks_is_told_of_lost_machines_by_name(serve_with: Serve) -> None:
    troubled = serve_with(ScriptedInference(notices={0: FAILOVER, 3: FAILOVER}))
    body = {"model": "echo", "messages": HELLO, "max_tokens": 5, "stream": True, "stream_options": EVENTS}
    events = troubled.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    named = [event for event in events if event.startswith("event: ")]
    assert len(named) == 2
    assert {event.partition("\n")[0] for event in named} == {"event: shard_failover"}
    said = json.loads(named[0].partition("\ndata: ")[2])
    assert (said["object"], said["event"], said["choices"]) == ("paceline.event", "shard_failover", [])
    assert said["detail"] == {"lost": "b", "route": "m:0-7 on c"}


def test_the_official_client_reads_past_events_it_asked_for(serve_with: Serve) -> None:
    client = client_of(serve_with(ScriptedInference(notices={0: FAILOVER, 3: FAILOVER})))
    chunks = list(
        client.chat.completions.create(
            model="echo", messages=HELLO, max_tokens=7, stream=True, extra_body={"stream_options": EVENTS | {"include_usage": True}}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hellohe"
    told = [chunk.model_extra for chunk in chunks if chunk.object != "chat.completion.chunk"]
    assert [(extra or {}).get("event") for extra in told] == ["shard_failover", "shard_failover"]
    assert chunks[-1].usage is not None


def test_what_happened_to_several_prompts_of_a_call_is_told_once(serve_with: Serve) -> None:
    troubled = serve_with(ScriptedInference(notices={1: FAILOVER, 2: FAILOVER}))
    body = {"model": "echo", "prompt": ["ab", "c", "def"], "max_tokens": 4, "stream": True, "stream_options": EVENTS}
    assert troubled.http.post("/v1/completions", json=body).text.count("event: shard_failover") == 2


@pytest.mark.parametrize("options", [{}, {"stream_options": EVENTS}])
def test_want_of_machines_has_its_code(serve_with: Serve, options: dict[str, object]) -> None:
    aborted = Notice("pipeline_aborted", {"code": "shard_unavailable", "reason": "b went away"})
    gone = client_of(serve_with(ScriptedInference(fail_after=0, fail_code="shard_unavailable")))
    for stream in (True, False):
        with pytest.raises(openai.InternalServerError) as refused:
            gone.chat.completions.create(model="echo", messages=HELLO, stream=stream, extra_body=options if stream else {})
        assert (refused.value.status_code, refused.value.code) == (503, "shard_unavailable")
    broken = serve_with(ScriptedInference(fail_after=3, fail_code="pipeline_aborted", notices={3: aborted}))
    with pytest.raises(openai.APIError) as caught:
        list(client_of(broken).chat.completions.create(model="echo", messages=HELLO, stream=True, extra_body=options))
    assert caught.value.code == "pipeline_aborted"
    body = {"model": "echo", "prompt": "ab", "stream": True, **options}
    events = broken.http.post("/v1/completions", json=body).text.split("\n\n")
    assert ("event: pipeline_aborted" in events[-3]) == bool(options)
    assert "pipeline_aborted" in events[-2]
    assert events[-1] == ""
