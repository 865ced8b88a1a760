"""/v1/embeddings by OpenAI's own client, over a real encoder with random weights."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types import EmbeddingCreateParams
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.seeded_encoders import SPEC, write_encoder
from tests.fakes.served import BOUND_S, Served

from paceline.core.clock import SystemClock
from paceline.core.encoding import EncodeRequest
from paceline.core.errors import ContextOverflow, Overloaded
from paceline.machine import embedder
from paceline.machine.build import LoadedEncoder, load_encoder
from paceline.machine.embedder import Embedder, parts_of_work
from paceline.machine.models import Models
from paceline.machine.settings import NodeSettings
from paceline.node.build import build_node
from paceline.server.embeddings import EmbeddingRequest
from paceline.store.home import Home

TEXTS = ["hello world", "the cat sat on the mat.", "cats"]
Live = Served[ScriptedInference]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Generator[LoadedEncoder, None, None]:
    loaded = load_encoder(str(write_encoder(tmp_path_factory.mktemp("encoders") / "small-bert")), SystemClock())
    yield loaded
    loaded.tokenizer.close()


@pytest.fixture(scope="module")
def live(encoder: LoadedEncoder) -> Generator[Live, None, None]:
    served = Served(ScriptedInference(), encoder=encoder)
    yield served
    served.close()


@pytest.fixture(scope="module")
def client(live: Live) -> Generator[OpenAI, None, None]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=BOUND_S) as client:
        yield client


def test_vectors_of_texts_in_order_whatever_the_batch(client: OpenAI, encoder: LoadedEncoder) -> None:
    together = client.embeddings.create(model="small-bert", input=TEXTS)
    assert [item.index for item in together.data] == [0, 1, 2]
    assert together.model == "small-bert"
    alone = [client.embeddings.create(model="small-bert", input=text) for text in TEXTS]
    assert [item.embedding for item in together.data] == [one.data[0].embedding for one in alone]
    assert together.usage.prompt_tokens == together.usage.total_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert alone[0].usage.prompt_tokens == len(encoder.tokenizer.encode(TEXTS[0]))
    assert abs(np.linalg.norm(together.data[0].embedding) - 1) < 1e-6


def test_base64_and_numbers_are_the_same_vectors(live: Live) -> None:
    asked: dict[str, Any] = {"model": "small-bert", "input": TEXTS, "user": "someone"}
    whole = live.http.post("/v1/embeddings", json={**asked, "encoding_format": "float"}).json()
    packed = live.http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()
    for numbers, text in zip(whole["data"], packed["data"], strict=True):
        assert np.array(numbers["embedding"], np.float32).tobytes() == base64.b64decode(text["embedding"])
    assert live.http.post("/v1/embeddings", json=asked).json() == whole


def test_token_ids_are_taken_as_they_are(client: OpenAI, encoder: LoadedEncoder) -> None:
    ids = [encoder.tokenizer.encode(text) for text in TEXTS]
    by_text, by_ids = (client.embeddings.create(model="small-bert", input=given) for given in (TEXTS, ids))
    assert by_text.data == by_ids.data
    assert client.embeddings.create(model="small-bert", input=ids[0]).data[0].embedding == by_ids.data[0].embedding


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": ["a", 1]}, "input", "invalid_value"),
        ({"input": [[1], []]}, "input", "invalid_value"),
        ({"input": [[1], [10**6]]}, "input[1]", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": ["a", "cat " * 63]}, "input[1]", "context_length_exceeded"),
        ({"input": [[5] * 65]}, "input", "context_length_exceeded"),
        ({"dimensions": 8}, "dimensions", "invalid_value"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"add_special_tokens": False}, "add_special_tokens", "invalid_value"),
        ({"input_type": "query"}, "input_type", "unsupported_parameter"),
        ({"model": "echo"}, "model", "invalid_value"),
    ],
)
def test_what_cannot_be_is_refused_by_name(live: Live, changed: dict[str, Any], param: str, code: str) -> None:
    answer = live.http.post("/v1/embeddings", content=json.dumps({"model": "small-bert", "input": "a", **changed}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


def test_what_nobody_knows_is_ignored_and_named(live: Live) -> None:
    answer = live.http.post("/v1/embeddings", json={"model": "small-bert", "input": "a", "mood": 1, "truncate": True, "user": "me"})
    assert (answer.status_code, answer.headers["x-paceline-ignored"]) == (200, "mood, truncate")


def test_openais_own_fields_are_all_known() -> None:
    assert set(EmbeddingCreateParams.__annotations__) <= EmbeddingRequest.model_fields.keys()


def test_models_are_not_mixed_up(client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(BadRequestError, match=r"no embeddings.*small-bert"):
        client.embeddings.create(model="echo", input="a")
    with pytest.raises(BadRequestError, match=r"writes no text.*/v1/embeddings"):
        client.chat.completions.create(model="small-bert", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(BadRequestError, match="writes no text"):
        client.completions.create(model="small-bert", prompt="hi")
    assert [model.id for model in client.models.list()] == ["echo", "small-bert"]
    assert client.models.retrieve("Small-BERT:latest").model_dump()["max_model_len"] == SPEC.max_tokens
    assert client.embeddings.create(model="small-bert", input="a", dimensions=SPEC.hidden).data


def test_without_an_encoder_the_error_says_how_to_have_one(shared: Live) -> None:
    answer = shared.http.post("/v1/embeddings", json={"model": "echo", "input": "a"})
    assert answer.status_code == 400
    assert "--embeddings" in answer.json()["error"]["message"]


def test_an_encoder_may_be_served_alone(encoder: LoadedEncoder) -> None:
    served = Served(Models(build_node, NodeSettings(), Home.from_environment(), SystemClock()), encoder=encoder)
    try:
        assert served.http.post("/v1/embeddings", json={"model": "small-bert", "input": "a"}).status_code == 200
        many = {"model": "small-bert", "input": [", " * 40] * 2000}  # more commas than a machine without a chat model takes elsewhere
        assert len(served.http.post("/api/embed", json=many).json()["embeddings"]) == 2000
        chat = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
        assert served.http.post("/v1/chat/completions", json=chat).status_code == 404
        assert served.http.get("/health").status_code == 200
    finally:
        served.close()


class Held:
    """The encoder, which waits before each part until it is let go on."""

    def __init__(self, encoder: LoadedEncoder) -> None:
        self.name, self.created, self.tokenizer = encoder.name, encoder.created, encoder.tokenizer
        self.max_tokens, self.dimensions = encoder.max_tokens, encoder.dimensions
        self._encoder, self.go_on = encoder, threading.Event()
        self.begun = threading.Semaphore(0)
        self.sizes: list[int] = []

    def vectors(self, texts: Sequence[embedder.Ids]) -> embedder.Vectors:
        self.sizes.append(sum(len(ids) for ids in texts))
        self.begun.release()
        assert self.go_on.wait(BOUND_S)
        return self._encoder.vectors(texts)


def test_a_client_that_goes_away_leaves_no_work(encoder: LoadedEncoder) -> None:
    held = Held(encoder)
    served = Served(ScriptedInference(), encoder=held)
    try:

        async def leave() -> None:
            async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=BOUND_S) as client:
                asking = asyncio.create_task(client.embeddings.create(model="small-bert", input=[[5] * 64] * 2048))
                await asyncio.to_thread(held.begun.acquire)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        asyncio.run(leave())
        while served.metric("paceline_client_disconnects_total") == 0:  # bounded by pytest's timeout
            pass
        held.go_on.set()
        # The next request is answered, and of the other no more was run than was under way.
        assert served.http.post("/v1/embeddings", json={"model": "small-bert", "input": "a"}).status_code == 200
        assert len(held.sizes) <= 3
        assert max(held.sizes) <= embedder.PART_TOKENS
    finally:
        held.go_on.set()
        served.close()


def test_a_short_request_does_not_wait_for_a_long_one(encoder: LoadedEncoder) -> None:
    held = Held(encoder)

    async def both() -> None:
        embedder = Embedder(held, workers=1)
        long = asyncio.create_task(embedder.embed(EncodeRequest([[5] * 64] * 2048)))
        await asyncio.to_thread(held.begun.acquire)
        short = asyncio.create_task(embedder.embed(EncodeRequest(["a"])))
        held.go_on.set()
        await short
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        embedder.close()

    asyncio.run(both())


def test_the_queue_is_bounded(encoder: LoadedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedder, "MOST_REQUESTS", 1)
    held = Held(encoder)

    async def two() -> None:
        embedder = Embedder(held, workers=1)
        first = asyncio.create_task(embedder.embed(EncodeRequest(["a"])))
        await asyncio.to_thread(held.begun.acquire)
        with pytest.raises(Overloaded):
            await embedder.embed(EncodeRequest(["a"]))
        held.go_on.set()
        await first
        with pytest.raises(ContextOverflow):
            await embedder.embed(EncodeRequest([[5] * 65]))
        assert (await embedder.embed(EncodeRequest(["a"]))).tokens == 3
        embedder.close()

    asyncio.run(two())


@pytest.mark.parametrize("given", ["a" * 5000, " " * 5000 + "a"])
def test_a_text_that_few_tokens_hide_is_too_long_by_its_letters(live: Live, given: str) -> None:
    """A word that the vocabulary lacks is one token however long it is, and blanks are none: such a text would keep the tokenizer from all others."""
    answer = live.http.post("/v1/embeddings", json={"model": "small-bert", "input": ["a", given]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input[1]", "context_length_exceeded")


def test_what_waiting_requests_hold_is_bounded(encoder: LoadedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedder, "MOST_HELD_BYTES", 100 * embedder.ID_BYTES)
    held = Held(encoder)

    async def several() -> None:
        embedder = Embedder(held, workers=1)
        first = asyncio.create_task(embedder.embed(EncodeRequest([[5] * 64] * 2)))  # alone a request may be larger
        await asyncio.to_thread(held.begun.acquire)
        with pytest.raises(Overloaded):
            await embedder.embed(EncodeRequest(["a"]))
        held.go_on.set()
        await first
        both = await asyncio.gather(embedder.embed(EncodeRequest([[5] * 64])), embedder.embed(EncodeRequest(["a cat"])))
        assert [made.tokens for made in both] == [64, 4]
        embedder.close()

    asyncio.run(several())


def test_parts_hold_every_text_once_and_few_tokens() -> None:
    texts = [np.zeros(length, np.int32) for length in (1000, 24, 1, 5000, 1, 1, 1023, 7)]
    cut = list(parts_of_work(texts))
    assert [place for part in cut for place in range(len(texts))[part]] == list(range(len(texts)))
    assert [sum(len(ids) for ids in texts[part]) for part in cut] == [1024, 1, 5000, 2, 1023, 7]
