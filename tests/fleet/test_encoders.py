"""A machine with an encoder and two engines, and one without: texts are embedded and ranked at either door alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from tests.fakes.foreign_engines import llama_server
from tests.fakes.seeded_encoders import write_encoder, write_encoder_gguf
from tests.fleet.machines import BOUND_S, EMPTY, Machine, free_port, machines, token_in, until

from paceline.machine.foreign.shares import EngineShare, add_share
from paceline.store.home import Home

OWN, VECTORS, RANKS = "small-bert", "vectors", "ranks"
TEXTS = ["hello world", "the cat sat on the mat.", "cats"]
RANK = 4
"""llama.cpp's number of the pooling that scores a pair of texts."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    """A machine that has encoders, and one that asks for them."""
    root = tmp_path_factory.mktemp("encoders")
    folder = write_encoder(root / OWN)
    engines = {
        VECTORS: (write_encoder_gguf(root / "e.gguf", folder), {}),
        RANKS: (write_encoder_gguf(root / "r.gguf", folder, pooling=RANK), {"pooling_type": RANK}),
    }
    with machines(root, Home.from_environment().kernels, "has", "asks") as (has, asks), ExitStack() as stack:
        has.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        for name, (file, params) in engines.items():
            engine = stack.enter_context(llama_server(file, n_ctx=128, n_parallel=2, embedding=True, **params))
            add_share(Home(has.home), EngineShare(engine.url, name))
        has.up(*EMPTY, "--embeddings", str(folder))
        asks.run("join", token_in(has.run("token", "--address", "127.0.0.1")), "--name", "asks")
        asks.up(*EMPTY)
        until(lambda: set(listed(asks)) == {OWN, VECTORS, RANKS})
        yield has, asks


def ask(machine: Machine, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{machine.node.url}{path}", json=body, timeout=BOUND_S)


def listed(machine: Machine) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in httpx.get(f"{machine.node.url}/v1/models", timeout=BOUND_S).json()["data"]}


@pytest.mark.parametrize("model", [OWN, VECTORS])
def test_vectors_are_the_same_bytes_at_both_doors(pair: tuple[Machine, Machine], model: str) -> None:
    for more in ({}, {"encoding_format": "base64"}):
        here, there = (ask(machine, "/v1/embeddings", {"model": model, "input": TEXTS, **more}) for machine in pair)
        assert here.status_code == 200
        assert here.content == there.content
        assert here.json()["usage"]["prompt_tokens"] > len(TEXTS)


def test_texts_are_ranked_at_both_doors_alike(pair: tuple[Machine, Machine]) -> None:
    here, there = (ask(machine, "/v1/rerank", {"model": RANKS, "query": "cat", "documents": TEXTS, "top_n": 2}) for machine in pair)
    assert here.content == there.content
    scores = [one["relevance_score"] for one in here.json()["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def test_encoders_are_listed_with_their_tasks_and_answer_no_chat(pair: tuple[Machine, Machine]) -> None:
    _, asks = pair
    for machine in pair:
        assert {name: one["tasks"] for name, one in listed(machine).items()} == {
            OWN: ["embeddings"], VECTORS: ["embeddings"], RANKS: ["rerank"],
        }  # fmt: skip
    refused = ask(asks, "/v1/chat/completions", {"model": VECTORS, "messages": [{"role": "user", "content": "hi"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    offers = {offer.model_id: offer for offer in (asks.card_of("has") or pytest.fail("it is in view")).models}
    assert {offers[name].role for name in (OWN, VECTORS, RANKS)} == {"embedder"}
