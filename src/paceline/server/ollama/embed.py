"""`/api/embed`, and the older `/api/embeddings`: vectors of texts, as `/v1/embeddings` makes them. No text is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from paceline.core.inference import ModelFacts, ServedModel
from paceline.server.embedding_routes import EmbeddingRequest, Input, encoder_of, inputs_of, numbers, parse
from paceline.server.fields import ignored_fields, json_response
from paceline.server.messages import Strict

if TYPE_CHECKING:
    from paceline.server.app import ApiService
    from paceline.server.embeddings import Embedded, TextEncoder


class _Request(Strict):
    model: Annotated[str, Field(min_length=1, max_length=512)]
    keep_alive: Any = Field(default=None, description="Ignored: models stay loaded.")


class OllamaEmbedRequest(_Request):
    """Body of POST /api/embed."""

    input: Input
    dimensions: int | None = Field(default=None, ge=1, lt=1 << 31, description="Only as many as the model's vectors have.")


class OllamaEmbeddingsRequest(_Request):
    """Body of POST /api/embeddings."""

    prompt: Annotated[str, Field(min_length=1)]


class OllamaEmbeddings(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(BaseModel):
    embedding: list[float]


def add_routes(
    app: FastAPI, service: ApiService, refused: dict[int | str, dict[str, Any]], body_of: Callable[[str], dict[str, Any]]
) -> None:
    """Serve the paths.

    Args:
        refused: what else they may answer, for the document.
        body_of: a route's body in the document, by its schema's name.
    """

    async def embedded(asked: EmbeddingRequest, request: Request, field: str) -> tuple[TextEncoder, Embedded]:
        encoder = encoder_of(asked, service)
        return encoder, await service.while_wanted(service.embedder.embed(encoder, inputs_of(asked), field), request)

    @app.post("/api/embed", responses={200: {"model": OllamaEmbeddings}, **refused}, openapi_extra=body_of("OllamaEmbedRequest"))
    async def embed(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        arrived_s = service.clock.monotonic()
        asked = await service.read(request, partial(parse, service.embedder, OllamaEmbedRequest), declared=False)
        wanted = EmbeddingRequest(model=asked.model, input=asked.input, dimensions=asked.dimensions)
        encoder, made = await embedded(wanted, request, "input")
        answer: dict[str, object] = {
            "model": encoder.name,
            "total_duration": int((service.clock.monotonic() - arrived_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(made.tokens),
        }
        written = await asyncio.to_thread(lambda: b",".join([numbers(vector) for vector in made.vectors]))
        body = orjson.dumps(answer)[:-1] + b',"embeddings":[' + written + b"]}"
        return json_response(body, ignored_fields(asked))

    @app.post("/api/embeddings", responses={200: {"model": OllamaEmbedding}, **refused}, openapi_extra=body_of("OllamaEmbeddingsRequest"))
    async def embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = await service.read(request, partial(parse, service.embedder, OllamaEmbeddingsRequest), declared=False)
        _, made = await embedded(EmbeddingRequest(model=asked.model, input=asked.prompt), request, "prompt")
        body = b'{"embedding":' + numbers(made.vectors[0]) + b"}"
        return json_response(body, ignored_fields(asked))


def as_model(encoder: TextEncoder) -> ServedModel:
    """An encoder, as the lists of models show it."""
    facts = ModelFacts(hidden=encoder.dimensions)
    return ServedModel(encoder.name, encoder.created, encoder.max_tokens, encoder.tokenizer, "", facts)
