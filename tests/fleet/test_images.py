"""Images reach a model that takes them, through another machine and in the shape of each API, but no address of one. A model that takes none refuses them."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.foreign_engines import llama_server
from tests.fakes.seeing_model import N_TOKENS, png, write_projector
from tests.fleet.machines import EMPTY, free_port, machines, token_in, until
from tests.fleet.test_forwarding import client_of

from paceline.store.home import Home

HIDDEN = 576
SEES, BLIND = "sees", "blind"
IMAGE = base64.b64encode(png(255, 0, 0)).decode()
ADDRESS = "http://127.0.0.1:1/x.png"
TEXT = "Which colour is this?"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, bundled_gguf: Path) -> Generator[str]:
    """URL of a machine that has no model. Another one shares two engines."""
    folder = tmp_path_factory.mktemp("images")
    projector = write_projector(folder / "mmproj.gguf", HIDDEN)
    with machines(folder, Home.from_environment().kernels, "a", "b") as (a, b):
        a.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        a.up(*EMPTY)
        b.run("join", token_in(a.run("token", "--address", "127.0.0.1")), "--name", "b")
        b.up(*EMPTY)
        slots: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 1}
        with llama_server(bundled_gguf, projector=str(projector), **slots) as sees, llama_server(bundled_gguf, **slots) as blind:
            b.run("share", sees.url, "--name", SEES)
            b.run("share", blind.url, "--name", BLIND)
            until(lambda: {model.id for model in client_of(a).models.list()} == {SEES, BLIND})
            yield a.node.url


def asked(api: str, model: str, image: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a chat in the shape of an API."""
    uri = f"data:image/png;base64,{image}"
    match api:
        case "openai":
            parts = [{"type": "text", "text": TEXT}, *([{"type": "image_url", "image_url": {"url": uri}}] if image else [])]
            return "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        case "responses":
            parts = [{"type": "input_text", "text": TEXT}, *([{"type": "input_image", "image_url": uri}] if image else [])]
            return "/v1/responses", {"model": model, "input": [{"role": "user", "content": parts}], "max_output_tokens": 16}
        case "anthropic":
            source = {"type": "base64", "media_type": "image/png", "data": image}
            parts = [{"type": "text", "text": TEXT}, *([{"type": "image", "source": source}] if image else [])]
            return "/v1/messages", {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        case _:
            message = {"role": "user", "content": TEXT} | ({"images": [image]} if image else {})
            return "/api/chat", {"model": model, "messages": [message], "stream": False, "options": {"num_predict": 4}}


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage", {})
    return answer.get("prompt_eval_count") or usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


@pytest.mark.parametrize("api", ["openai", "responses", "anthropic", "ollama"])
def test_an_image_reaches_a_model_that_takes_it_and_no_other(door: str, api: str) -> None:
    counted = list[int]()
    for image in ("", IMAGE):
        path, body = asked(api, SEES, image)
        answer = httpx.post(door + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        counted.append(prompt_tokens(answer.json()))
    assert counted[1] - counted[0] >= N_TOKENS
    path, body = asked(api, SEES, IMAGE)
    source = {"type": "url", "url": ADDRESS} if api == "anthropic" else {}
    by_address = json.dumps(body).replace(f"data:image/png;base64,{IMAGE}", ADDRESS).replace(IMAGE, ADDRESS)
    body = json.loads(by_address, object_hook=lambda found: source if source and found.get("type") == "base64" else found)
    fetched = httpx.post(door + path, json=body, timeout=120)
    assert fetched.status_code == 400, fetched.text
    assert "image" in fetched.text
    path, body = asked(api, BLIND, IMAGE)
    refused = httpx.post(door + path, json=body, timeout=120)
    assert refused.status_code == 400
    assert "image" in refused.text
