"""The paths of Ollama's API, and the description of the served models for its clients. Figures that are not known here are left out.

Models are fetched and removed at the machine, not through it. Every name has a tag, as in Ollama, since some clients look for `NAME:latest` in the
list where a person wrote NAME. Embeddings are as `/v1/embeddings` makes them; no text is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.core.encoding import EncoderModel, Task, meant_encoder
from paceline.core.errors import InvalidRequest
from paceline.core.inference import ModelFacts, ServedModel
from paceline.core.no_tokenizer import NoTokenizer
from paceline.server.application import Application
from paceline.server.embeddings import EmbeddingRequest, Input, json_numbers, parse_texts_body
from paceline.server.embeddings import embed as embed_texts
from paceline.server.faults import Fault, Refusal
from paceline.server.fields import ignored_fields, json_response
from paceline.server.formats.format import Format
from paceline.server.intake import listed_models
from paceline.server.lazy_model import LazyModel
from paceline.server.messages import Strict
from paceline.server.ollama import requests as intake
from paceline.server.ollama import shape as replies
from paceline.server.ollama.requests import LoadOnly
from paceline.server.ollama.shape import Fields, line_head, rfc3339
from paceline.server.replies import Documented, body_of, refusals
from paceline.server.requests import ModelName
from paceline.store.catalog import LocalModel, changed

if TYPE_CHECKING:
    from paceline.server.call import Call
    from paceline.server.intake import Intake
    from paceline.server.service import ApiService


FOREVER: Final = "2300-01-01T00:00:00Z"
"""When a model that stays loaded is unloaded."""
_BILLION, _MILLION = 1e9, 1e6


def tagged_name(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


def capabilities(form: Format) -> list[str]:
    """Return the abilities of a model, read from its template. Other models get tools as well, in plain text."""
    return ["completion", *(["tools"] if form.knows_tools else []), *(["thinking"] if form.thinking is not None else [])]


def model_details(facts: ModelFacts) -> Fields:
    """Family and size, in words."""
    return {
        "parent_model": "",
        "format": facts.file_format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _in_words(facts.parameters),
        "quantization_level": facts.stored_as,
    }


def model_entry(name: str, facts: ModelFacts) -> Fields:
    """Return the fields of a model that every list has."""
    name = tagged_name(name)
    return {"name": name, "model": name, "size": facts.size_bytes, "digest": facts.digest, "details": model_details(facts)}


def tag_entry(name: str, created: int, facts: ModelFacts) -> Fields:
    """Return an entry of `/api/tags`."""
    return {**model_entry(name, facts), "modified_at": rfc3339(created)}


def disk_entry(model: LocalModel) -> Fields:
    """Return an entry of `/api/tags` for a model that is not loaded."""
    form, _, stored_as = model.format.partition(" ")
    return tag_entry(model.name, changed(model), ModelFacts(model.digest or "", model.nbytes, model.family, 0, stored_as, form.lower()))


def loaded_entry(model: ServedModel) -> Fields:
    """Return an entry of `/api/ps`: a served model is loaded, and stays so."""
    vram = model.facts.size_bytes if model.facts.on_gpu else 0
    return {**model_entry(model.name, model.facts), "expires_at": FOREVER, "size_vram": vram, "context_length": model.max_context}


def show_entry(model: ServedModel, can: Sequence[str]) -> Fields:
    facts = model.facts
    family = facts.family or "model"
    info: Fields = {
        "general.architecture": family,
        "general.basename": model.name,
        f"{family}.context_length": model.max_context,
    }
    if facts.parameters:
        info["general.parameter_count"] = facts.parameters
    if facts.hidden:
        info[f"{family}.embedding_length"] = facts.hidden
    return {
        "modelfile": f"# Served by Paceline.\nFROM {model.name}\n",
        "parameters": "",
        "template": model.tokenizer.chat_template or "",
        "details": model_details(facts),
        "model_info": info,
        "capabilities": list(can),
        "modified_at": rfc3339(model.created),
    }


def _in_words(parameters: int) -> str:
    """Write a number of parameters as Ollama does: 134.5M, 8.0B."""
    if parameters >= _BILLION:
        return f"{parameters / _BILLION:.1f}B"
    return f"{parameters / _MILLION:.2f}M" if parameters else ""


VERSION = "0.13.0"
"""Version of Ollama with this API: some clients ask for a minimum."""

_FETCHING = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")
_LINES = {"application/x-ndjson": {"schema": {"type": "string", "description": "A JSON object a line; the last one has `done: true`."}}}


def add_routes(app: Application, service: ApiService) -> None:
    refused = refusals(replies.OllamaError, service.settings)
    guarded = refusals(replies.OllamaError, service.settings, 401)

    def models() -> list[ServedModel]:
        writers = listed_models(service.inference, service.settings.served_names)
        names = {model.name for model in writers}
        return [*writers, *(as_model(each) for each in service.encoders.encoders() if each.name not in names)]

    def show_of(checked: Intake, body: bytes) -> dict[str, object]:
        name = intake.name_to_show(checked, body)
        encoder = meant_encoder(name, service.encoders.encoders())
        able = [] if encoder is None else [WORDS[task] for task in sorted(encoder.tasks)]
        try:
            model = checked.model(name)
        except InvalidRequest:
            if encoder is None:
                raise
            return show_entry(as_model(encoder), able)
        return show_entry(model, [*capabilities(checked.formats.of(model).described), *able])

    async def settle(asked: LoadOnly) -> str:
        """Load or unload one of this machine's models, where any client may have it loaded again."""
        own, name = service.models, asked.model.name
        if own is None or not own.on_demand or name not in {model.name for model in own.models()}:
            return "load"
        if asked.keep:
            await own.host_of(name)
            return "load"
        await own.unload_idle(name)  # a wish: a client never takes a model from others
        return "load" if own.is_loaded(name) else "unload"

    async def answer(request: Request, parse: Callable[[Intake, bytes], Call | LoadOnly]) -> Response:
        arrived_s = service.clock.monotonic()
        asked = await service.read(request, parse, declared=False)
        if isinstance(asked, LoadOnly):
            reason = await service.while_wanted(settle(asked), request)
            return json_response(
                {**line_head(asked.model, service.clock.wall()), **asked.shape.gained(), "done": True, "done_reason": reason}
            )
        return service.answer_to(asked, request, arrived_s)

    @app.post(
        "/api/chat",
        summary="Answer a chat (Ollama's API)",
        responses={200: {"model": replies.OllamaChat, "content": _LINES}, **refused},
        openapi_extra=body_of(intake.OllamaChatRequest),
    )
    async def chat(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await answer(request, intake.chat_call)

    @app.post(
        "/api/generate",
        summary="Continue a text (Ollama's API)",
        responses={200: {"model": replies.OllamaText, "content": _LINES}, **refused},
        openapi_extra=body_of(intake.OllamaGenerateRequest),
    )
    async def generate(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await answer(request, intake.generate_call)

    @app.post(
        "/api/show",
        summary="Describe a model (Ollama's API)",
        responses={200: {"model": replies.OllamaShown}, **refused},
        openapi_extra=body_of(intake.OllamaShowRequest),
    )
    async def show(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return json_response(await service.read(request, show_of, declared=False))

    @app.head("/api/tags", include_in_schema=False)
    @app.get("/api/tags", summary="List the models (Ollama's API)", responses={200: {"model": replies.OllamaModels}, **guarded})
    async def tags() -> Response:  # pyright: ignore[reportUnusedFunction]
        return json_response(
            {
                "models": [
                    *(tag_entry(model.name, model.created, model.facts) for model in models()),
                    *map(disk_entry, await service.loadable()),
                ]
            }
        )

    @app.get("/api/ps", summary="List the loaded models (Ollama's API)", responses={200: {"model": replies.OllamaLoadedModels}, **guarded})
    async def ps() -> Response:  # pyright: ignore[reportUnusedFunction]
        own = service.models
        away = set[str]() if own is None else {model.name for model in own.models() if not own.is_loaded(model.name)}
        return json_response({"models": [loaded_entry(model) for model in models() if model.name not in away]})

    @app.head("/api/version", include_in_schema=False)
    @app.get("/api/version", summary="Show the version (Ollama's API)", responses={200: {"model": replies.OllamaVersion}, **guarded})
    async def version() -> Response:  # pyright: ignore[reportUnusedFunction]
        return json_response({"version": VERSION, "paceline": __version__})

    _add_embeddings(app, service, refused)

    async def not_here(request: Request) -> Response:
        command = "rm" if request.url.path == "/api/delete" else "pull"
        raise Refusal(
            Fault(
                501, f"{request.url.path}: models are not fetched or changed through the API. Run `paceline {command} NAME` on the machine."
            )
        )

    for name in _FETCHING:
        app.add(f"/api/{name}", not_here, ("GET", "HEAD", "POST", "DELETE"), include_in_schema=False)


class _Request(Strict):
    model: ModelName
    keep_alive: Any = Field(default=None, description="Ignored: models stay loaded.")


class OllamaEmbedRequest(_Request):
    """Body of POST /api/embed."""

    input: Input
    dimensions: int | None = Field(default=None, ge=1, lt=1 << 31, description="Must be the number that the model's vectors have.")


class OllamaEmbeddingsRequest(_Request):
    """Body of POST /api/embeddings."""

    prompt: Annotated[str, Field(min_length=1)]


class OllamaEmbeddings(LazyModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(LazyModel):
    embedding: list[float]


def _add_embeddings(app: Application, service: ApiService, refused: Documented) -> None:
    @app.post(
        "/api/embed",
        summary="Embed texts (Ollama's API)",
        responses={200: {"model": OllamaEmbeddings}, **refused},
        openapi_extra=body_of(OllamaEmbedRequest),
    )
    async def embed(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        arrived_s = service.clock.monotonic()
        asked = await service.read(request, partial(parse_texts_body, service.encoders, OllamaEmbedRequest), declared=False)
        wanted = EmbeddingRequest(model=asked.model, input=asked.input, dimensions=asked.dimensions)
        name, made = await embed_texts(wanted, request, service)
        answer: dict[str, object] = {
            "model": name,
            "total_duration": int((service.clock.monotonic() - arrived_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": made.tokens,
        }
        written = await asyncio.to_thread(lambda: b",".join([json_numbers(vector) for vector in made.values]))
        body = orjson.dumps(answer)[:-1] + b',"embeddings":[' + written + b"]}"
        return json_response(body, ignored_fields(asked))

    @app.post(
        "/api/embeddings",
        summary="Embed a text (Ollama's older API)",
        responses={200: {"model": OllamaEmbedding}, **refused},
        openapi_extra=body_of(OllamaEmbeddingsRequest),
    )
    async def embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = await service.read(request, partial(parse_texts_body, service.encoders, OllamaEmbeddingsRequest), declared=False)
        _, made = await embed_texts(EmbeddingRequest(model=asked.model, input=asked.prompt), request, service, "prompt")
        body = b'{"embedding":' + json_numbers(made.values[0]) + b"}"
        return json_response(body, ignored_fields(asked))


WORDS: Final = {Task.EMBED: "embedding", Task.RERANK: "rerank"}
"""Ollama's words for what a model can do."""


def as_model(encoder: EncoderModel) -> ServedModel:
    """Return an encoder as the lists of models show it."""
    return ServedModel(encoder.name, encoder.created, encoder.max_tokens, NoTokenizer(), "", encoder.facts)
