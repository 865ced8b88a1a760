"""Every field of a body is served, ignored and named, or refused by name. OpenAI's own client says which there are."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel
from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference
from tests.fakes.served import Served

from paceline.core.clock import SystemClock
from paceline.core.generation import SamplingParams
from paceline.server.fields import HEADER, MAX_HEADER_BYTES, UNSERVED
from paceline.server.intake import Intake
from paceline.server.messages import Message, Tool
from paceline.server.requests import ChatCompletionRequest, CompletionRequest, StreamOptions
from paceline.server.settings import ServerSettings

from .conftest import Serve

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PLAIN: dict[str, Any] = {"model": "echo", "prompt": "hi", "max_tokens": 1}
PATHS = (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN))

OFF: dict[str, object] = {
    "best_of": 1, "skip_special_tokens": True, "add_generation_prompt": True, "use_beam_search": False, "length_penalty": 1, "min_tokens": 0,
    "typical_p": 1.0, "mirostat": 0, "n_probs": 0, "lora": [], "options": {}, "tfs_z": 1, "xtc_probability": 0.0, "dry_multiplier": 0,
    "n_predict": -1, "repeat_penalty": 1.0, "continue_final_message": False, "guided_json": None, "samplers": None, "verbosity": "medium",
    "modalities": ["text"], "functions": [], "function_call": "auto", "audio": None, "web_search_options": None, "max_tokens": -1,
}  # fmt: skip
CHANGING: dict[str, object] = {
    "best_of": 2, "skip_special_tokens": False, "use_beam_search": True, "length_penalty": 1.5, "min_tokens": 3,
    "typical_p": 0.5, "mirostat": 2, "mirostat_mode": True, "n_predict": 4, "repeat_penalty": 1.1, "guided_json": {}, "options": {"seed": 1},
    "samplers": ["top_k"], "verbosity": "low", "modalities": ["text", "audio"], "system": "Be brief.", "chat_template": "{{ 1 }}",
}  # fmt: skip
HARMLESS: dict[str, object] = {
    "user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"},
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_unknown_fields_are_ignored_and_named(shared: Served[ScriptedInference], path: str, body: dict[str, Any]) -> None:
    unknown = {"cache_prompt": True, "keep_alive": "5m", "priority": 0, "invented": {"a": [1]}, "unset": None}
    for streamed in (False, True):
        answer = shared.http.post(path, json=body | unknown | {"stream": streamed})
        assert answer.status_code == 200
        assert answer.headers[HEADER] == "cache_prompt, keep_alive, priority, invented"
    assert HEADER not in shared.http.post(path, json=body).headers


def test_fields_within_others_are_named_by_their_place(shared: Served[ScriptedInference]) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "hi", "mood": 1}], "provider": "x", "text": "not the text"}
    inner = {"messages": [said, said], "stream": True}
    answer = shared.http.post("/v1/chat/completions", json=CHAT | inner)
    assert set(answer.headers[HEADER].split(", ")) == {
        "messages[].content[].mood", "messages[].provider", "messages[].text",
    }  # fmt: skip
    assert '"content":"h"' in answer.text


def test_no_name_can_write_headers_or_make_them_long(shared: Served[ScriptedInference]) -> None:
    named = shared.http.post("/v1/completions", json=PLAIN | {"a\r\nset-cookie: b": 1, "ü, x": 1, "__class__": 1})
    assert named.headers[HEADER] == "a%0D%0Aset-cookie%3A%20b, %C3%BC%2C%20x, __class__"
    assert "set-cookie" not in named.headers
    many = shared.http.post("/v1/completions", json=PLAIN | {f"{'x' * 1000}{place}": 1 for place in range(1000)})
    assert many.status_code == 200
    assert len(many.headers[HEADER]) <= MAX_HEADER_BYTES + len(", ...")
    assert many.headers[HEADER].endswith("...")


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_what_means_off_passes_and_what_is_harmless_is_not_spoken_of(
    shared: Served[ScriptedInference], path: str, body: dict[str, Any]
) -> None:
    answer = shared.http.post(path, json=body | OFF | HARMLESS | {"stop_token_ids": [ord("i")]})
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers
    assert answer.json()["usage"]["completion_tokens"] == 2  # max_tokens -1: to the end
    for name in UNSERVED:
        assert shared.http.post(path, json=body | {name: None}).status_code == 200


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_what_would_change_the_answer_is_refused_by_name(shared: Served[ScriptedInference], path: str, body: dict[str, Any]) -> None:
    for name, value in CHANGING.items():
        answer = shared.http.post(path, json=body | {name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")


def test_reasoning_is_turned_off_by_each_of_its_names(shared: Served[ScriptedInference]) -> None:
    for fields in ({"think": False}, {"thinking": {"type": "disabled", "budget_tokens": 0}}, {"reasoning_effort": "none", "think": True}):
        assert ChatCompletionRequest.model_validate(CHAT | fields).thinks is False
        assert shared.http.post("/v1/chat/completions", json=CHAT | fields | {"chat_template_kwargs": {}}).status_code == 200
    assert ChatCompletionRequest.model_validate(CHAT | {"thinking": {"type": "adaptive"}}).thinks is None


WHAT_TO_DO = (
    "OpenAI's client knows fields that nothing here speaks of: {}. Serve each (a field of the model), or, where it never changes an answer, "
    "take it as harmless there, or add it to server.fields.UNSERVED with the values that mean off. Then say so in docs/reference/api.md."
)


def _typed_fields(kind: type) -> Mapping[str, object]:
    return typing.get_type_hints(kind)


def _unspoken(theirs: type, ours: type[BaseModel], elsewhere: frozenset[str] = frozenset()) -> list[str]:
    known = {field.alias or name for name, field in ours.model_fields.items()} | elsewhere
    return sorted(set(_typed_fields(theirs)) - known)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, ChatCompletionRequest),
        (chat_create_params.CompletionCreateParamsNonStreaming, ChatCompletionRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    ],
)
def test_every_field_of_openais_client_is_spoken_of(theirs: type, ours: type[BaseModel]) -> None:
    unspoken = _unspoken(theirs, ours, frozenset(UNSERVED))
    assert not unspoken, WHAT_TO_DO.format(unspoken)


def test_every_field_within_bodies_of_openais_client_is_spoken_of() -> None:
    from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionStreamOptionsParam

    roles = typing.get_args(Message.model_fields["role"].annotation)
    for theirs in typing.get_args(ChatCompletionMessageParam):
        (role,) = typing.get_args(_typed_fields(theirs)["role"])
        if role == "function":  # replaced by role tool, and refused
            continue
        assert role in roles, WHAT_TO_DO.format(f"messages[].role {role}")
        assert not (unspoken := _unspoken(theirs, Message)), WHAT_TO_DO.format([f"messages[].{name}" for name in unspoken])
    for inner, own in ((ChatCompletionFunctionToolParam, Tool), (ChatCompletionStreamOptionsParam, StreamOptions)):
        assert not (unspoken := _unspoken(inner, own)), WHAT_TO_DO.format(unspoken)


def test_a_field_of_a_new_version_would_be_noticed() -> None:
    class Newer(completion_create_params.CompletionCreateParamsNonStreaming):
        brand_new: int

    assert _unspoken(Newer, CompletionRequest, frozenset(UNSERVED)) == ["brand_new"]


class Recommending(ByteTokenizer):
    defaults: ClassVar[dict[str, float]] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("uses_model", [True, False])
def test_what_a_request_leaves_out_is_drawn_as_the_model_s_maker_says(serve_with: Serve, uses_model: bool) -> None:
    served = serve_with(ScriptedInference(tokenizer=Recommending()), ServerSettings(uses_model_sampling=uses_model))
    expected = Recommending.defaults if uses_model else {}
    assert served.http.get("/v1/models").json()["data"][0]["sampling_defaults"] == expected
    intake = Intake(served.inference, SystemClock(), uses_model_sampling=uses_model)
    silent, outspoken = (intake.completion(orjson.dumps(PLAIN | fields)) for fields in ({}, {"temperature": 0, "top_k": 0, "top_p": 1}))
    assert silent.requests[0].sampling == SamplingParams(**expected)  # type: ignore[arg-type]
    assert outspoken.requests[0].sampling == SamplingParams(temperature=0)


def test_an_answer_goes_on_with_the_last_message_where_it_is_asked_to(shared: Served[ScriptedInference]) -> None:
    chat = CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Ye"}], "max_tokens": 2}
    for more in ({}, {"add_generation_prompt": False}):
        answer = shared.http.post("/v1/chat/completions", json=chat | {"continue_final_message": True} | more).json()
        assert answer["choices"][0]["message"]["content"] == "Ye"  # the script goes on with what the prompt ends in
    wrong = (
        (chat | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (chat | {"add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT | {"continue_final_message": True}, "continue_final_message"),
    )
    for body, param in wrong:
        answer = shared.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
