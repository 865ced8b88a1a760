"""POST /v1/embeddings, as OpenAI's."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import ContextOverflow, InvalidRequest
from paceline.server.application import Application
from paceline.server.embedder import MOST_INPUTS, Embedded, Embedder, Input, TextEncoder
from paceline.server.fields import Body, ignored_fields, json_response, read_body
from paceline.server.intake import COMMAS_PER_TOKEN, SMALL_BODY_BYTES, Intake, find_model
from paceline.server.lazy_model import LazyModel
from paceline.server.messages import Strict
from paceline.server.replies import ErrorReply, body_of, refusals
from paceline.server.requests import ModelName

if TYPE_CHECKING:
    from paceline.server.service import ApiService


class EmbeddingRequest(Strict):
    """Body of POST /v1/embeddings."""

    model: ModelName
    input: Input
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="base64: of little-endian float32; default float.")
    dimensions: int | None = Field(default=None, ge=1, lt=1 << 31, description="Must be the number that the model's vectors have.")
    user: str | None = Field(default=None, description="Ignored.")
    add_special_tokens: None = Field(
        default=None, description="Only null: texts get the tokens that the model wants, ids stay as they are."
    )


class Embedding(LazyModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(LazyModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(LazyModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def add_routes(app: Application, service: ApiService) -> None:
    answers = {200: {"model": Embeddings}, **refusals(ErrorReply, service.settings)}

    @app.post("/v1/embeddings", summary="Embed texts", responses=answers, openapi_extra=body_of(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = await service.read(request, partial(parse_embedding_body, service.embedder, EmbeddingRequest))
        encoder = encoder_of(asked, service)
        embedded = await service.while_wanted(service.embedder.embed(encoder, inputs_of(asked)), request)
        written = await asyncio.to_thread(write_embeddings, asked, encoder, embedded)
        return json_response(written, ignored_fields(asked))


def parse_embedding_body(embedder: Embedder, kind: type[Body], _: Intake, body: bytes) -> Body:
    """Check a body against its model, unless it has more parts than any that fits.

    Raises:
        Refusal: it is malformed.
        ContextOverflow: it has too many parts.
    """
    longest = 0 if embedder.encoder is None else embedder.encoder.max_tokens
    commas = body.count(b",") if len(body) > SMALL_BODY_BYTES else 0
    if commas > max(MOST_INPUTS * (longest + 1), COMMAS_PER_TOKEN * longest) + SMALL_BODY_BYTES:
        raise ContextOverflow(f"The body has {commas} commas, more than {MOST_INPUTS} texts of {longest} tokens can need", "Send less.")
    return read_body(kind, body)


def encoder_of(asked: EmbeddingRequest, service: ApiService) -> TextEncoder:
    """Return the encoder that is asked for.

    Raises:
        InvalidRequest: the model answers chats, or its vectors have another length.
        UnknownModel, ModelAway: no model has that name.
    """
    encoder = service.embedder.encoder
    if encoder is None or not service.embedder.is_meant(asked.model):
        found = find_model(asked.model, service.inference, service.settings.served_names)
        hint = "Start `paceline up` with --embeddings and an encoder." if encoder is None else f"Ask for {encoder.name}."
        raise InvalidRequest(f"model: {found.name} writes text and makes no embeddings", hint, field="model")
    if asked.dimensions not in {None, encoder.dimensions}:
        raise InvalidRequest(
            f"dimensions: vectors of {encoder.name} have {encoder.dimensions} numbers, of which the first alone mean little",
            "Leave it out.",
            field="dimensions",
        )
    return encoder


def inputs_of(asked: EmbeddingRequest) -> list[str | list[int]]:
    """Return the inputs, one per text."""
    given = asked.input
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]


def write_embeddings(asked: EmbeddingRequest, encoder: TextEncoder, embedded: Embedded) -> bytes:
    """Write the answer, vector by vector: one call for all would hold the interpreter."""
    is_text = asked.encoding_format == "base64"
    parts: list[bytes] = []
    for index, vector in enumerate(embedded.vectors):
        written = b'"%s"' % base64.b64encode(vector.astype("<f4").tobytes()) if is_text else json_numbers(vector)
        parts.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (index, written))
    tokens = sum(embedded.tokens)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return b'{"object":"list","data":[%s],"model":%s,"usage":%s}' % (b",".join(parts), orjson.dumps(encoder.name), orjson.dumps(usage))


def json_numbers(vector: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """Write the shortest decimals that are read as the same float32."""
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
