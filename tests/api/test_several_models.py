"""Several models of one machine over HTTP: named by requests, listed, unloaded, and what only the machine's owner may do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.served import BOUND_S, Served
from tests.unit.machine.test_models import NAMES, SETTINGS, Builds, files, home, one_bytes  # noqa: F401

from paceline.core.clock import SystemClock
from paceline.machine.models import Models
from paceline.machine.settings import NodeSettings
from paceline.node.build import BuiltNode
from paceline.server.settings import OWNER_HEADER, ServerSettings
from paceline.store.home import Home

pytestmark = pytest.mark.timeout(600)  # the first load on a machine compiles kernels

KEY, OWNER = "a-key-of-clients-0123", "what-lies-in-the-note-of-this-home"
OWN = {OWNER_HEADER: OWNER}
ASKED: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
Several = Served[Models[BuiltNode]]


@pytest.fixture
def builds() -> Builds:
    return Builds()


@pytest.fixture
def several(home: Home, builds: Builds, one_bytes: int) -> Iterator[Several]:  # noqa: F811
    """With room for two of three."""
    models = Models(builds, SETTINGS, home, SystemClock(), on_demand=True, budget_bytes=2 * one_bytes + one_bytes // 2)
    served = Served(models, ServerSettings(api_key=KEY, owner_key=OWNER, comment_s=0.05))
    yield served
    served.close()
    models.close()


def text(several: Several, name: str) -> str:
    answer = several.http.post("/v1/completions", json={**ASKED, "model": name})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def loaded(several: Several) -> list[str]:
    return [model["name"].removesuffix(":latest") for model in several.http.get("/api/ps").json()["models"]]


def test_a_client_names_what_it_wants(several: Several, builds: Builds) -> None:
    entries = several.http.get("/v1/models").json()["data"]
    listed = [model["id"] for model in entries]
    assert set(listed) >= set(NAMES)
    assert {str(model["sampling_defaults"]) for model in entries if model["id"] in NAMES} == {"None"}, "not known before a model is opened"
    assert several.http.get(f"/v1/models/{NAMES[0]}").json()["sampling_defaults"] is not None
    assert "damaged" not in listed
    assert several.http.get("/v1/models/b").json()["max_model_len"] == 256
    assert loaded(several) == []
    first = {name: text(several, name) for name in NAMES}
    assert len(set(first.values())) == 3
    assert loaded(several) == ["b", "c"]
    assert text(several, "A:latest") == first["a"]
    assert builds.count == {"a": 2, "b": 1, "c": 1}
    assert sorted(model["name"] for model in several.http.get("/api/tags").json()["models"])[:3] == ["a:latest", "b:latest", "c:latest"]
    refused = several.http.post("/v1/completions", json={**ASKED, "model": "none"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    broken = several.http.post("/v1/completions", json={**ASKED, "model": "damaged"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (503, "load_failed")
    assert "damaged" in broken.json()["error"]["message"]


def test_a_stream_is_kept_alive_while_its_model_loads(several: Several, builds: Builds) -> None:
    builds.hold("a")
    with several.http.stream("POST", "/v1/completions", json={**ASKED, "model": "a", "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        builds.held["a"].set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1]) == text(several, "a")


def test_ollamas_clients_load_and_unload(several: Several) -> None:
    for name, reason, then in (("a", "load", ["a"]), ("b:latest", "load", ["a", "b"])):
        answer = several.http.post("/api/generate", json={"model": name})
        assert (answer.json()["done_reason"], loaded(several)) == (reason, then)
    for _ in range(2):
        answer = several.http.post("/api/chat", json={"model": "a", "keep_alive": 0})
        assert (answer.json()["done_reason"], loaded(several)) == ("unload", ["b"])


def test_only_the_owner_loads_and_unloads(several: Several, files: dict[str, Path]) -> None:  # noqa: F811
    for headers in ({}, several.headers, {OWNER_HEADER: KEY}, {OWNER_HEADER: ""}, {"Authorization": f"Bearer {OWNER}"}):
        for method, path in (("GET", "/owner/models"), ("POST", "/owner/load"), ("POST", "/owner/unload"), ("GET", "/owner/x")):
            assert httpx.request(method, several.url + path, headers=headers, json={"model": "a"}).status_code == 401
    assert httpx.get(f"{several.url}/v1/models", headers=OWN).status_code == 401  # it opens nothing else
    evil = {**OWN, "Origin": "https://evil.example"}
    assert httpx.post(f"{several.url}/owner/load", headers=evil, json={"model": "a"}).status_code == 403
    with httpx.Client(base_url=several.url, headers=OWN, timeout=BOUND_S) as owner:
        assert owner.post("/owner/load", json={"model": str(files["a"])}).json() == {"model": "a"}
        (use,) = owner.get("/owner/models").json()["models"]
        assert (use["name"], use["path"], use["state"], use["live"], use["context"]) == ("a", str(files["a"]), "loaded", 0, 256)
        assert use["memory_bytes"] > use["weights_bytes"] + use["kv_bytes"] > 0
        assert owner.post("/owner/unload", json={"model": "b"}).status_code == 404
        assert owner.post("/owner/unload", json={"model": "a"}).is_success
        assert owner.get("/owner/models").json()["models"] == []


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ('{"model": "none"}', 404, "model_not_found", "none"),
        ('{"model": "/none/x.gguf"}', 404, "model_not_found", "/none/x.gguf"),
        ('{"model": "\\u0000"}', 404, "model_not_found", ""),
        ('{"model": "~nobody-is-called-so/x"}', 400, "invalid_value", "no home folder"),
        ('{"model": "damaged"}', 400, "invalid_value", "damaged"),
        ('{"model": ""}', 400, "invalid_value", "model: "),
        ('{"model": 7}', 400, "invalid_value", "model: "),
        ("{}", 400, "missing_required_parameter", "model"),
        ("no JSON", 400, "invalid_json", "JSON"),
    ],
)
def test_the_owner_s_mistakes_are_answered_as_the_api_s(several: Several, body: str, status: int, code: str, says: str) -> None:
    headers = {**OWN, "Content-Type": "application/json"}
    answer = httpx.post(f"{several.url}/owner/load", headers=headers, content=body, timeout=BOUND_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert says in error["message"]
    assert loaded(several) == []


def test_a_model_that_never_fits_is_the_owner_s_to_hear(several: Several) -> None:
    several.inference._settings = NodeSettings(kv_tokens=1 << 20, threads=1)
    answer = httpx.post(f"{several.url}/owner/load", headers=OWN, json={"model": "a"}, timeout=BOUND_S)
    assert answer.status_code == 400
    assert "--kv-tokens" in answer.json()["error"]["message"]


def test_a_machine_without_an_owners_key_has_no_such_paths(home: Home) -> None:  # noqa: F811
    models = Models(Builds(), SETTINGS, home, SystemClock())
    served = Served(models, ServerSettings(api_key=KEY))
    try:
        for headers in ({}, served.headers, {OWNER_HEADER: ""}):
            assert httpx.get(f"{served.url}/owner/models", headers=headers).status_code == 401
    finally:
        served.close()
