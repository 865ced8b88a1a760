from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.scripted_inference import EOS, ByteTokenizer, ScriptedInference

from paceline.core.clock import SystemClock
from paceline.core.errors import ContextOverflow, InvalidRequest, UnknownModel
from paceline.core.generation import FinishReason, GenerationChunk, SamplingParams
from paceline.core.inference import ServedModel
from paceline.core.text import NOTHING_GIVEN, Given
from paceline.server.call import Call
from paceline.server.faults import Refusal
from paceline.server.formats.format import Content, Part, Reasoning
from paceline.server.intake import Intake, find_model

INTAKE = Intake(ScriptedInference(max_context=128), SystemClock())


def complete(**fields: object) -> Call:
    return INTAKE.completion(orjson.dumps({"model": "echo", "prompt": "ab"} | fields))


def test_a_request_that_names_no_model_means_the_first_that_is_served() -> None:
    for body in ({"prompt": "ab"}, {"prompt": "ab", "model": None}):
        assert INTAKE.completion(orjson.dumps(body)).model.name == "echo"
    assert INTAKE.chat(orjson.dumps({"messages": [{"role": "user", "content": "ab"}]})).model.name == "echo"

    class Idle(ScriptedInference):
        def models(self) -> tuple[ServedModel, ...]:
            return ()

    with pytest.raises(UnknownModel, match="No model is served here now, and the request names none"):
        Intake(Idle(), SystemClock()).completion(b'{"prompt": "ab"}')


def test_defaults_are_openais() -> None:
    request = complete().requests[0]
    assert request.sampling == SamplingParams()
    assert (request.n, request.stop, request.stop_ids, request.ignore_eos, request.max_tokens) == (1, (), frozenset(), False, None)
    assert request.prompt_ids == (97, 98)


def test_nulls_are_as_if_missing() -> None:
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "n",
        "max_tokens",
        "logit_bias",
        "stream",
        "logprobs",
        "ignore_eos",
        "draft",
        "exact",
    )
    assert complete(**dict.fromkeys(names)).requests[0].sampling == SamplingParams()


def test_every_sampling_field_arrives() -> None:
    request = complete(
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=7,
        logit_bias={"3": -100, "4": 1.5},
        logprobs=2,
        stop="x",
        stop_token_ids=[1, 2],
        max_tokens=3,
        n=2,
        ignore_eos=True,
        draft="ngram",
        exact=True,
    ).requests[0]
    assert request.sampling == SamplingParams(0.0, 5, 0.5, 0.1, 1.1, -1.0, 2.0, 7, {3: -100.0, 4: 1.5}, 2)
    assert (request.n, request.stop, request.stop_ids, request.ignore_eos, request.max_tokens) == (2, ("x",), frozenset({1, 2}), True, 3)
    assert (request.draft, request.exact) == ("ngram", True)


@pytest.mark.parametrize(("asked", "expected"), [({}, False), ({"exact": None}, False), ({"exact": False}, False), ({"exact": True}, True)])
def test_a_request_is_exact_if_it_or_its_node_says_so(asked: dict[str, object], expected: bool) -> None:
    assert complete(**asked).requests[0].exact is expected
    body = orjson.dumps({"model": "echo", "messages": [{"role": "user", "content": "ab"}], **asked})
    assert Intake(ScriptedInference(max_context=128), SystemClock(), exact=True).chat(body).requests[0].exact


def test_edges_of_sampling_fields() -> None:
    assert complete(top_k=-1).requests[0].sampling.top_k == 0
    assert 0 < complete(top_p=0).requests[0].sampling.top_p < 1e-6
    assert complete(logprobs=0).requests[0].sampling.logprobs == 0
    assert complete(stop=["x", "y"]).requests[0].stop == ("x", "y")


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_64_bit_seed_is_a_seed(seed: int) -> None:
    drawn = complete(seed=seed).requests[0].sampling.seed
    assert drawn is not None
    assert 0 <= drawn < 1 << 63
    if seed >= 0:
        assert drawn == seed


def test_chat_logprobs_are_a_flag_and_a_number() -> None:
    def ask(**fields: object) -> int | None:
        body = {"model": "echo", "messages": [{"role": "user", "content": "a"}]} | fields
        return INTAKE.chat(orjson.dumps(body)).requests[0].sampling.logprobs

    assert [ask(), ask(logprobs=False), ask(logprobs=True), ask(logprobs=True, top_logprobs=3)] == [None, None, 0, 3]


def test_each_prompt_is_a_request_of_its_own() -> None:
    call = complete(prompt=["ab", "c"], n=2)
    assert [request.prompt_ids for request in call.requests] == [(97, 98), (99,)]
    assert len({request.request_id for request in call.requests}) == 2
    with pytest.raises(InvalidRequest, match="prompts times n is 130"):
        complete(prompt=["a"] * 65, n=2)


@given(st.text(min_size=1, max_size=600))
def test_what_is_refused_by_length_would_not_have_fit(text: str) -> None:
    tokens = len(text.encode())
    try:
        call = complete(prompt=text)
    except ContextOverflow:
        assert tokens >= 128
    else:
        assert tokens < 128
        assert len(call.requests[0].prompt_ids) == tokens


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_a_prompt_is_it_is_taken_or_refused(value: object) -> None:
    try:
        body = orjson.dumps({"model": "echo", "prompt": value, "max_tokens": 1})
    except TypeError:
        return  # an integer beyond what orjson writes
    try:
        call = INTAKE.completion(body)
    except Refusal as refused:
        param = refused.fault.param
    except InvalidRequest as refused:
        param = refused.field
    else:
        param = "prompt"
        assert all(0 <= token < 257 for request in call.requests for token in request.prompt_ids)
    assert param in {"prompt", None}  # None: the JSON itself, say with a number too long


def test_infinite_values_name_their_field() -> None:
    with pytest.raises(Refusal) as caught:
        INTAKE.completion(b'{"model":"echo","prompt":"a","min_p":NaN}')
    assert caught.value.fault.param == "min_p"


class WideTokenizer(ByteTokenizer):
    """One whose tokens are of a thousand letters."""

    def token_bytes(self, token_id: int) -> bytes:
        return 1000 * super().token_bytes(token_id)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return super().encode(text[::1000], add_special=add_special)


def test_a_text_is_measured_by_the_tokens_that_the_name_has_now() -> None:
    inference = ScriptedInference(max_context=128)
    intake, body = Intake(inference, SystemClock()), orjson.dumps({"model": "echo", "prompt": 30_000 * "a"})
    with pytest.raises(ContextOverflow):
        intake.completion(body)
    inference._model = replace(inference._model, tokenizer=WideTokenizer(), fingerprint="fp_another")
    assert len(intake.completion(body).requests[0].prompt_ids) == 30


class Several(ScriptedInference):
    """Serves a model under each of some names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def models(self) -> list[ServedModel]:
        return [replace(self._model, name=name) for name in self._names]


def test_of_names_that_differ_in_case_alone_this_machines_own_is_meant() -> None:
    served = Several("Llama", "LLAMA", "llama")
    assert [find_model(name, served, ()).name for name in ("llama", "LLAMA", "Llama:latest")] == ["llama", "LLAMA", "Llama"]
    assert find_model("lLaMa", served, ()).name == "Llama", "the first is this machine's own"
    assert find_model("lLaMa:latest", served, ()).name == "Llama"
    with pytest.raises(UnknownModel):
        find_model("llam", served, ())


class OpenThoughts(ByteTokenizer):
    """Its template opens the thoughts for the model, as DeepSeek R1's does."""

    @property
    def chat_template(self) -> str:
        return "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}assistant: <think>\n"

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        return [*super().render_chat(messages, now, given), *b"assistant: <think>\n"]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, [Reasoning("42")]),
        ({"regex": "[0-9]+"}, [Content("42")]),
        ({"grammar": "start: /[0-9]+/"}, [Content("42")]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}, [Reasoning("42")]),
    ],
)
def test_a_form_of_every_letter_is_content_also_where_the_template_opened_the_thoughts(fields: dict[str, Any], parts: list[Part]) -> None:
    inference = ScriptedInference(tokenizer=OpenThoughts())
    call = Intake(inference, SystemClock()).chat(orjson.dumps({"messages": [{"role": "user", "content": "How many?"}]} | fields))
    (reader,) = call.readers()
    chunk = GenerationChunk(call.requests[0].request_id, 0, (*b"42", EOS), "42", finish_reason=FinishReason.STOP)
    assert reader.read(chunk) == parts
