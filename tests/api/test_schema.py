"""The OpenAPI document is valid and tells the truth: schemathesis makes requests from it and checks every answer against it."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from pydantic import TypeAdapter
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.routing import Route
from tests.fakes.scripted_encoder import ScriptedEncoders
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served
from tests.sampling import ALL, examples

from paceline.server import embeddings as embedding_routes
from paceline.server import replies
from paceline.server.anthropic.shape import AnsweredMessage
from paceline.server.app import create_app
from paceline.server.ollama import shape as ollama
from paceline.server.responses.shape import ResponseReply
from paceline.server.settings import ServerSettings

document = create_app(ScriptedInference(max_context=512), encoders=ScriptedEncoders()).openapi()
# The phase of coverage makes its requests while tests are collected, in every process of a run: ten seconds each.
schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": ALL}}}))


@pytest.fixture(scope="module")
def live() -> Generator[Served[ScriptedInference], None, None]:
    served = Served(ScriptedInference(max_context=512), encoders=ScriptedEncoders())
    try:
        yield served
        answered = served.app.state.service.meter.answers
        asked = {path for path, _ in answered} & {
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/v1/messages",
        }
        for path in asked:  # of those in this run's sample
            assert answered[path, 200] > 0
        assert not asked or sum(answered[path, 400] for path in asked) > 0  # or the requests made said little
    finally:
        served.close()
    assert served.inference.stats().blocks_in_use == 0


@schema.exclude(path_regex="^/api/").parametrize()
@settings(max_examples=examples(80), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_answers_conform(live: Served[ScriptedInference], case: schemathesis.Case) -> None:
    # A request the schema allows may still be refused: that a prompt fits the context is not for a schema to say.
    case.call_and_validate(base_url=live.url, excluded_checks=[positive_data_acceptance])


@schema.include(path_regex="^/api/").parametrize()
@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_ollamas_answers_conform(live: Served[ScriptedInference], case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=live.url, excluded_checks=[positive_data_acceptance])


def test_document_is_valid() -> None:
    schema.validate()
    with_key = create_app(ScriptedInference(), ServerSettings(api_key="k")).openapi()
    schemathesis.openapi.from_dict(with_key).validate()
    assert "401" in with_key["paths"]["/v1/chat/completions"]["post"]["responses"]


def test_whole_answers_fit_their_models(live: Served[ScriptedInference]) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    answer = live.http.post("/v1/chat/completions", json=chat)
    TypeAdapter(replies.ChatCompletion).validate_json(answer.content, strict=True, extra="forbid")
    answer = live.http.post("/v1/completions", json={"model": "echo", "prompt": "hi", "max_tokens": 2, "logprobs": 1})
    TypeAdapter(replies.Completion).validate_json(answer.content, strict=True, extra="forbid")
    answer = live.http.post("/v1/responses", json={"model": "echo", "input": "hi", "max_output_tokens": 2, "top_logprobs": 1})
    TypeAdapter(ResponseReply).validate_json(answer.content, strict=True, extra="forbid")
    answer = live.http.post("/v1/messages", json={"model": "echo", "messages": chat["messages"], "max_tokens": 2})
    TypeAdapter(AnsweredMessage).validate_json(answer.content, strict=True, extra="forbid")
    asked = {"model": "echo", "stream": False, "logprobs": True, "top_logprobs": 1, "options": {"num_predict": 2}}
    answer = live.http.post("/api/chat", json={**asked, "messages": chat["messages"]})
    TypeAdapter(ollama.OllamaChat).validate_json(answer.content, strict=True, extra="forbid")
    answer = live.http.post("/api/generate", json={**asked, "prompt": "hi"})
    TypeAdapter(ollama.OllamaText).validate_json(answer.content, strict=True, extra="forbid")
    for encoding in ("float", "base64"):
        answer = live.http.post("/v1/embeddings", json={"model": "counts", "input": "hi", "encoding_format": encoding})
        TypeAdapter(embedding_routes.Embeddings).validate_json(answer.content, strict=True, extra="forbid")


def test_each_path_that_is_served_is_described_with_what_it_does() -> None:
    app = create_app(ScriptedInference(), encoders=ScriptedEncoders())
    served = {route.path.replace(":path", "") for route in app.routes if isinstance(route, Route)}
    not_served = {"/api/blobs/{digest}", *(f"/api/{name}" for name in ("copy", "create", "delete", "pull", "push"))}
    assert served - document["paths"].keys() == not_served | {"/", "/openapi.json"}
    said = [operation["summary"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(said)) == len(said)
    assert all(" " in summary for summary in said)
