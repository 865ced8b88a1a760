"""POST /v1/embeddings, as OpenAI's."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
import orjson
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.encoding import Encoded, EncodeRequest, EncoderModel, Encoders, Task, meant_encoder
from paceline.core.errors import ContextOverflow, InvalidRequest, ModelAway, UnknownModel
from paceline.server.application import Application
from paceline.server.fields import Body, ignored_fields, json_response, read_body
from paceline.server.intake import COMMAS_PER_TOKEN, SMALL_BODY_BYTES, Intake, find_model
from paceline.server.lazy_model import LazyModel
from paceline.server.messages import Strict
from paceline.server.replies import ErrorReply, body_of, refusals
from paceline.server.requests import ModelName, check_texts, texts_schema

if TYPE_CHECKING:
    from paceline.server.service import ApiService


MOST_INPUTS: Final = 2048
"""Maximum number of inputs of one request, as OpenAI has it."""
ASSUMED_TOKENS: Final = 8192
"""Context of an encoder that does not say its own, for the bound on a body's size. Lowering it: bodies of token ids are refused that would fit."""
Input = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(partial(check_texts, most=MOST_INPUTS)),
    WithJsonSchema(texts_schema(MOST_INPUTS, shortest=1)),
]


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
        asked = await service.read(request, partial(parse_texts_body, service.encoders, EmbeddingRequest))
        name, made = await embed(asked, request, service)
        written = await asyncio.to_thread(write_embeddings, asked, name, made)
        return json_response(written, ignored_fields(asked))


def parse_texts_body(encoders: Encoders, kind: type[Body], _: Intake, body: bytes) -> Body:
    """Check a body against its model, unless it has more parts than any that fits.

    Raises:
        Refusal: it is malformed.
        ContextOverflow: it has too many parts.
    """
    commas = body.count(b",") if len(body) > SMALL_BODY_BYTES else 0
    longest = max((each.max_tokens or ASSUMED_TOKENS for each in encoders.encoders()), default=0) if commas else 0
    if commas > max(MOST_INPUTS * (longest + 1), COMMAS_PER_TOKEN * longest) + SMALL_BODY_BYTES:
        raise ContextOverflow(f"The body has {commas} commas, more than {MOST_INPUTS} texts of {longest} tokens can need", "Send less.")
    return read_body(kind, body)


async def embed(asked: EmbeddingRequest, request: Request, service: ApiService, field: str = "input") -> tuple[str, Encoded]:
    """Make the vectors that are asked for. Return them with the encoder's name.

    Args:
        field: the inputs' field in the client's body.

    Raises:
        InvalidRequest: the model makes no vectors, or its vectors have another length.
        UnknownModel, ModelAway: no model has that name.
        PacelineError: see `Encoders.encode`.
    """
    encoder = encoder_of(asked.model, Task.EMBED, service)
    _check_length(asked, encoder.name, encoder.dimensions)
    wanted = EncodeRequest(inputs_of(asked), via=service.via_of(request), field=field)
    made = await service.while_wanted(service.encoders.encode(encoder.name, wanted), request)
    _check_length(asked, encoder.name, made.values.shape[1])
    service.meter.embedded_tokens += made.tokens
    return encoder.name, made


def _check_length(asked: EmbeddingRequest, name: str, dimensions: int) -> None:
    if dimensions and asked.dimensions not in {None, dimensions}:
        raise InvalidRequest(
            f"dimensions: vectors of {name} have {dimensions} numbers, of which the first alone mean little",
            "Leave it out.",
            field="dimensions",
        )


def encoder_of(name: str, task: Task, service: ApiService) -> EncoderModel:
    """Return the encoder that is asked for.

    Raises:
        InvalidRequest: the model does not do this.
        UnknownModel, ModelAway: no model has that name.
    """
    encoders = service.encoders.encoders()
    found = meant_encoder(name, encoders)
    if found is not None and task in found.tasks:
        return found
    able = ", ".join(each.name for each in encoders if task in each.tasks)
    hint = f"Ask for {able}." if able else HOW_TO_HAVE[task]
    if found is None:
        if service.encoders.expects(name):
            raise ModelAway(f"No machine serves the encoder {name!r} at this moment", "Try again in a few seconds.")
        try:
            known = find_model(name, service.inference, service.settings.served_names).name
        except UnknownModel as error:
            raise UnknownModel(error.message, hint) from error
        does = "writes text"
    else:
        known, does = found.name, DOES[next(iter(found.tasks))]
    raise InvalidRequest(f"model: {known} {does} and {DOES_NOT[task]}", hint, field="model")


DOES: Final = {Task.EMBED: "makes embeddings", Task.RERANK: "ranks texts"}
DOES_NOT: Final = {Task.EMBED: "makes no embeddings", Task.RERANK: "makes no ranking of texts"}
HOW_TO_HAVE: Final = {
    Task.EMBED: "No machine serves embeddings: start `paceline up` with --embeddings and an encoder, or share an engine that makes them.",
    Task.RERANK: "No machine ranks texts: share an engine that does, such as a llama-server that was started with --reranking.",
}


def inputs_of(asked: EmbeddingRequest) -> list[str | list[int]]:
    """Return the inputs, one per text."""
    given = asked.input
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]


def write_embeddings(asked: EmbeddingRequest, name: str, made: Encoded) -> bytes:
    """Write the answer, vector by vector: one call for all would hold the interpreter."""
    is_text = asked.encoding_format == "base64"
    parts: list[bytes] = []
    for index, vector in enumerate(made.values):
        written = b'"%s"' % base64.b64encode(vector.astype("<f4").tobytes()) if is_text else json_numbers(vector)
        parts.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (index, written))
    usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
    return b'{"object":"list","data":[%s],"model":%s,"usage":%s}' % (b",".join(parts), orjson.dumps(name), orjson.dumps(usage))


def json_numbers(vector: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Write the shortest decimals that are read as the same float32."""
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
