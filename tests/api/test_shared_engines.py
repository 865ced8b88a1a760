"""Models of engines of other makers, as clients of the API see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.generation import GenerationRequest
from paceline.core.inference import ChunkStream, ModelFacts, ServedModel
from paceline.core.via import VIA_HEADER, write_via
from paceline.server.settings import ServerSettings

HOME = ModelFacts(stored_as="Q4_K_M", engine="llama-server b9000")


class Holding(ScriptedInference):
    """Has models of several names, with the facts given."""

    facts: dict[str, ModelFacts]

    def models(self) -> Sequence[ServedModel]:
        (model,) = super().models()
        return [replace(model, name=name, facts=facts) for name, facts in self.facts.items()]

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        assert model in self.facts
        return super().generate("echo", request)


def holding(serve_with: Callable[..., Served[ScriptedInference]], facts: dict[str, ModelFacts], **settings: object) -> str:
    inference = Holding()
    inference.facts = facts
    return serve_with(inference, **settings).url


def test_models_are_listed_with_engine_version_quantisation_and_promise(serve_with: Callable[..., Served[ScriptedInference]]) -> None:
    url = holding(serve_with, {"own": ModelFacts(), "m": HOME, "unversioned": ModelFacts(engine="openai")})
    own, shared, unversioned = httpx.get(f"{url}/v1/models").json()["data"]
    assert "engine" not in own
    fields = {"engine": "llama-server", "engine_version": "b9000", "promise": "none", "quantisation": "Q4_K_M", "leaves_network": False}
    assert fields.items() <= shared.items()
    assert (unversioned["engine"], unversioned["engine_version"]) == ("openai", "")
    assert httpx.get(f"{url}/v1/models/m").json() == shared


AWAY = replace(HOME, leaves_network=True)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def answered_by(url: str, model: str | None) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | ({} if model is None else {"model": model}))
    return str(answer.json().get("model") or answer.status_code)


def test_requests_reach_an_engine_outside_by_its_models_name_alone(serve_with: Callable[..., Served[ScriptedInference]]) -> None:
    settings = ServerSettings(served_names=("gpt-4o",))
    url = holding(serve_with, {"away": AWAY, "m": HOME}, settings=settings)
    assert [answered_by(url, name) for name in (None, "gpt-4o", "m", "away", "away:latest")] == ["m", "m", "m", "away", "away"]
    assert [answered_by(url, name) for name in ("AWAY", "Away:latest", "M")] == ["404", "404", "m"]
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["m", "away", "gpt-4o"]
    assert "engine" in httpx.get(f"{url}/v1/models/gpt-4o").json()
    assert not httpx.get(f"{url}/v1/models/gpt-4o").json()["leaves_network"]


@pytest.mark.parametrize("name", ["big:latest", "Big", "BIG", "Big:latest"])
def test_no_engine_outside_answers_for_a_model_at_home_that_is_away(
    serve_with: Callable[..., Served[ScriptedInference]], name: str
) -> None:
    inference = Holding()
    inference.facts = {"big": AWAY}
    inference.awaited = {"big:latest"}
    assert answered_by(serve_with(inference).url, name) in {"404", "503"}


def test_where_all_models_leave_the_network_a_request_has_to_name_one(serve_with: Callable[..., Served[ScriptedInference]]) -> None:
    url = holding(serve_with, {"away": AWAY}, settings=ServerSettings(served_names=("gpt-4o",)))
    assert [answered_by(url, name) for name in (None, "gpt-4o", "away")] == ["404", "404", "away"]
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["away"]
    unnamed = httpx.post(f"{url}/v1/chat/completions", json=CHAT).json()["error"]["message"]
    assert "away" in unnamed


@pytest.mark.parametrize(
    ("via", "status"),
    [
        ("", 200),
        (write_via(("a~00000000000000aa",)), 200),
        (f"b~{'0' * 16}, a~{'1' * 16}", 508),
        ("1" * 16, 508),
        ("x" * 4096, 400),
        ("no mark", 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
def test_a_request_that_was_here_before_is_refused(
    serve_with: Callable[..., Served[ScriptedInference]], via: str, status: int, path: str
) -> None:
    url = holding(serve_with, {"m": HOME}, settings=ServerSettings(mark=f"a~{'1' * 16}"))
    body: dict[str, object] = {"model": "m", "stream": False, **CHAT} if path != "/v1/responses" else {"model": "m", "input": "hi"}
    answer = httpx.post(url + path, json=body, headers={VIA_HEADER: via})
    assert answer.status_code == status
    if status == 508:
        assert "a~" in answer.text
