"""`kv_transfer_params`: which part of a request a router wants from this machine, and what it is told."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import httpx
import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.clock import SystemClock
from paceline.core.errors import InvalidRequest
from paceline.core.generation import GenerationChunk, GenerationRequest, KvLeg
from paceline.server.call import Call
from paceline.server.faults import Refusal
from paceline.server.intake import Intake
from paceline.server.settings import ServerSettings

INTAKE = Intake(ScriptedInference(max_context=128), SystemClock())
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DECODE = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_block_ids": [[1, 2]]}


def complete(params: object, **fields: object) -> Call:
    return INTAKE.completion(orjson.dumps({"model": "echo", "prompt": "ab", "max_tokens": 1, "kv_transfer_params": params} | fields))


def chat(params: object, **fields: object) -> Call:
    asked = {"model": "echo", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1, "kv_transfer_params": params}
    return INTAKE.chat(orjson.dumps(asked | fields))


def leg_of(call: Call) -> KvLeg | None:
    return call.named("7f1c").requests[0].leg


def test_legs_are_called_as_vllm_calls_requests() -> None:
    chats = [leg_of(chat(params)) for params in (PREFILL, DECODE)]
    assert all(leg is not None and re.fullmatch("chatcmpl-7f1c-[0-9a-f]{8}", leg.request_id) for leg in chats)
    assert len({leg.request_id for leg in chats if leg is not None}) == 2
    several = complete(DECODE, prompt=["ab", "cd", "ef"]).named("7f1c").requests
    assert [one.leg is not None and one.leg.request_id[:-9] for one in several] == ["cmpl-7f1c-0", "cmpl-7f1c-1", "cmpl-7f1c-2"]
    assert all(
        re.fullmatch("cmpl-7f1c-0-[0-9a-f]{8}", one.request_id) for call in (complete(PREFILL),) if (one := leg_of(call)) is not None
    )


def test_which_part_is_this_machines() -> None:
    prefill, decode = leg_of(chat(PREFILL)), leg_of(chat(DECODE, max_tokens=9, stream=True))
    assert prefill is not None
    assert decode is not None
    assert (prefill.is_prefill, replace(decode, request_id="")) == (True, KvLeg("", False, "p"))
    told = {**DECODE, "remote_engine_id": None, "remote_host": "10.0.0.2", "remote_port": 7500, "remote_request_id": "r", "tp_size": 2}
    leg = leg_of(chat(told))
    assert leg is not None
    assert replace(leg, request_id="") == KvLeg("", False, "", "10.0.0.2:7500", 2, "r")
    # Of several prompts, one's id is no other's.
    assert [one.leg and one.leg.remote_request_id for one in complete(told, prompt=["ab", "cd"]).requests] == ["", ""]
    for none in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}, {"do_remote_decode": None}):
        call = chat(none)
        assert call.requests[0].leg is None
        assert call.named("a:b") is call
    assert leg_of(chat(PREFILL, max_completion_tokens=1)) is not None


@pytest.mark.parametrize(
    ("params", "fields", "field"),
    [
        ({**PREFILL, "do_remote_prefill": True}, {}, "do_remote_prefill"),
        (PREFILL, {"max_tokens": 2}, "do_remote_decode"),
        (PREFILL, {"max_tokens": None}, "do_remote_decode"),
        (PREFILL, {"stream": True}, "do_remote_decode"),
        ({"do_remote_prefill": True}, {}, "remote_engine_id"),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.2"}, {}, "remote_engine_id"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(params: object, fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(params, **fields)
    assert refused.value.field == f"kv_transfer_params.{field}"


@pytest.mark.parametrize(
    "params",
    [
        7,
        [],
        {"do_remote_prefill": "perhaps"},
        {**DECODE, "remote_port": 1 << 16},
        {**DECODE, "tp_size": 0},
        {**DECODE, "remote_engine_id": "x" * 201},
    ],
)
def test_what_has_another_type_is_refused(params: object) -> None:
    with pytest.raises(Refusal, match="kv_transfer_params"):
        chat(params)


def test_a_name_that_the_completion_notice_could_not_carry_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="X-Request-Id"):
        chat(PREFILL).named("urn:uuid:7f1c")


class Parted(ScriptedInference):
    """Says how a prompt came."""

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        async for chunks in super().generate(model, replace(request, leg=None)):
            said = None if request.leg is None else {"outcome": "whole", "of": request.leg.request_id}
            yield [replace(chunk, transfer=said if chunk.finish_reason else None) for chunk in chunks]


def test_an_answer_says_what_the_router_is_to_know() -> None:
    served = Served(Parted(), None)
    try:
        body = {"model": "echo", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}
        for path, asked, begin in (
            ("chat/completions", body, "chatcmpl-7f1c-"),
            ("completions", {"model": "echo", "prompt": "ab", "max_tokens": 1}, "cmpl-7f1c-0-"),
        ):
            url = f"{served.url}/v1/{path}"
            said = httpx.post(url, json={**asked, "kv_transfer_params": PREFILL}, headers={"X-Request-Id": "7f1c"}).json()
            assert said["kv_transfer_params"]["of"].startswith(begin)
            assert "kv_transfer_params" not in httpx.post(url, json=asked).json()
    finally:
        served.close()


def test_other_apis_say_that_they_do_not_know_it() -> None:
    served = Served(ScriptedInference(), None)
    try:
        for path, body in (
            ("v1/responses", {"model": "echo", "input": "ab"}),
            ("v1/messages", {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": "ab"}]}),
        ):
            answer = httpx.post(f"{served.url}/{path}", json={**body, "kv_transfer_params": PREFILL})
            assert (answer.status_code, answer.headers["x-paceline-ignored"]) == (200, "kv_transfer_params")
    finally:
        served.close()


KEY = "a-key-of-some-letters"


def test_each_part_needs_the_key_as_any_request_does() -> None:
    served = Served(Parted(), ServerSettings(api_key=KEY))
    try:
        for params in (PREFILL, DECODE):
            body = {"model": "echo", "prompt": "ab", "max_tokens": 1, "kv_transfer_params": params}
            assert [
                httpx.post(f"{served.url}/v1/completions", json=body, headers=headers).status_code for headers in ({}, {"x-api-key": KEY})
            ] == [401, 200]
    finally:
        served.close()
