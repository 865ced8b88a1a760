"""The application: routes, and nothing that happens per token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.core.clock import SystemClock
from paceline.core.encoding import NO_ENCODERS, EncoderModel, Encoders, Task, meant_encoder
from paceline.core.errors import ModelAway, PacelineError, UnknownModel
from paceline.core.inference import Inference, ModelFacts, ServedModel
from paceline.core.via import outside
from paceline.fleet.engines import PROMISE
from paceline.machine.models import Models
from paceline.server import embeddings, own_paths, replies, rerank, tokenizing
from paceline.server.aliases import Aliases
from paceline.server.anthropic import models as anthropic_models
from paceline.server.anthropic import routes as anthropic
from paceline.server.anthropic.requests import CountTokensRequest, MessagesRequest
from paceline.server.application import Application
from paceline.server.embeddings import EmbeddingRequest
from paceline.server.faults import Fault, Refusal, api_of, fault_of_error, server_fault
from paceline.server.fields import json_response
from paceline.server.guard import Guard
from paceline.server.intake import Intake, find_model, listed_models
from paceline.server.metrics import RequestLog
from paceline.server.ollama import requests as ollama_requests
from paceline.server.ollama import routes as ollama
from paceline.server.ollama.routes import OllamaEmbeddingsRequest, OllamaEmbedRequest
from paceline.server.replies import REF, body_of, refusals
from paceline.server.requests import ChatCompletionRequest, CompletionRequest
from paceline.server.rerank import RerankRequest
from paceline.server.responses import routes as responses
from paceline.server.responses.requests import ResponsesRequest
from paceline.server.service import ApiService, request_id_of
from paceline.server.settings import ServerSettings
from paceline.store.catalog import changed

BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    tokenizing.TokenizeRequest,
    tokenizing.DetokenizeRequest,
    *ollama_requests.BODIES,
)
"""Bodies that name a model that writes text, for the document."""
ENCODING_BODIES: Mapping[type[BaseModel], Task] = {
    **dict.fromkeys((EmbeddingRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest), Task.EMBED),
    RerankRequest: Task.RERANK,
}
"""Bodies that name an encoder, and the task it must do."""


def document(app: Application, names: Sequence[str], encoders: Mapping[Task, Sequence[str]], *, with_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document. `model` is an enumeration of the models served now, so that it lists exactly what is accepted."""
    api = app.described()
    _, definitions = models_json_schema([(body, "validation") for body in (*BODIES, *ENCODING_BODIES)], ref_template=REF)
    schemas = api.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    if names:
        for request in BODIES:
            named = {"anyOf": [{"type": "string", "enum": list(names)}, {"type": "null"}], "title": "Model"}
            schemas[request.__name__]["properties"]["model"] = schemas[request.__name__]["properties"]["model"] | named
    for request, task in ENCODING_BODIES.items():
        if encoders[task]:
            schemas[request.__name__]["properties"]["model"] = {"type": "string", "title": "Model", "enum": list(encoders[task])}
    for path in api["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI adds it to every route with a parameter; none answers so
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if with_key:
        api["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        api["security"] = [{"key": []}, {"header": []}]
        api["paths"]["/health"]["get"]["security"] = []
    return api


HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
"""The router's own refusals."""


def service_of(app: Application) -> ApiService:
    """Return the service of an application made by `create_app`."""
    return cast("ApiService", app.state.service)


def create_app(
    inference: Inference,
    settings: ServerSettings | None = None,
    encoders: Encoders = NO_ENCODERS,
    models: Models[Any] | None = None,
    engines: own_paths.EngineStates = list,
) -> Application:
    """Make the OpenAI API over `inference`.

    Args:
        settings: bounds and the key; the defaults where missing.
        encoders: make embeddings and rank texts.
        models: this machine's own, which requests and its owner may have loaded; None: nothing is loaded on demand.
        engines: returns the state of the engines of other makers that this machine shares.
    """
    service = ApiService(inference, settings or ServerSettings(), SystemClock(), encoders, models)

    @asynccontextmanager
    async def lifespan(_: Application) -> AsyncGenerator[None, None]:
        yield
        service.close()

    app = Application(
        title="Paceline",
        version="1",
        description="One OpenAI endpoint out of the machines you own.",
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(Guard, settings=service.settings, meter=service.meter)
    app.add_middleware(RequestLog, clock=service.clock)
    app.add_middleware(Aliases)
    _add_faults(app)
    _add_routes(app, service, engines)

    @lru_cache(maxsize=1)  # it takes the event loop some 50 ms, and a client may ask again and again
    def documented(names: tuple[str, ...], of_task: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
        return document(app, names, dict(zip(Task, of_task, strict=True)), with_key=service.settings.api_key is not None)

    def openapi() -> dict[str, Any]:
        found = encoders.encoders()
        of_task = tuple(tuple(each.name for each in found if task in each.tasks) for task in Task)
        return documented(tuple(model.name for model in inference.models()), of_task)

    app.openapi = openapi
    return app


def _add_faults(app: Application) -> None:
    """Errors leave as the path's API writes them, wherever they were raised."""

    async def answered(request: Request, error: Exception) -> Response:
        match error:
            case ClientDisconnect():
                return Response(status_code=400)  # the client is gone
            case Refusal(fault=fault):
                pass
            case PacelineError():
                fault = fault_of_error(error)
            case HTTPException():
                fault = _of_router(app, request, error)
            case _:
                answer = server_fault("The server failed while it answered; its log says why").response(api_of(request.url.path))
                answer.headers["x-request-id"] = request_id_of(request)  # it is written outside of the guard
                return answer
        return fault.response(api_of(request.url.path))

    for kind in (Refusal, PacelineError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answered)


def _of_router(app: Application, request: Request, error: HTTPException) -> Fault:
    """Return the router's own refusals as faults."""
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # the router names the methods of one route of the path
        routes = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(request.url.path)]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Fault(error.status_code, message, code=HTTP_CODES.get(error.status_code), headers=headers)


def _add_routes(app: Application, service: ApiService, engines: own_paths.EngineStates) -> None:
    settings = service.settings
    refused, key = refusals(replies.ErrorReply, settings), refusals(replies.ErrorReply, settings, 401)
    stream = replies.event_stream(
        "A chunk's JSON, or [DONE] after the last one.", "Only with `include_events`: what happened to the machines."
    )

    @app.post(
        "/v1/chat/completions",
        summary="Answer a chat",
        responses={200: {"model": replies.ChatCompletion, "content": stream}, **refused},
        openapi_extra=body_of(ChatCompletionRequest),
    )
    async def chat_completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer(request, Intake.chat)

    @app.post(
        "/v1/completions",
        summary="Continue a text",
        responses={200: {"model": replies.Completion, "content": stream}, **refused},
        openapi_extra=body_of(CompletionRequest),
    )
    async def completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer(request, Intake.completion)

    for api in (responses, ollama, anthropic, embeddings, rerank, tokenizing):
        api.add_routes(app, service)
    if service.models is not None:
        own_paths.add_routes(app, service, service.models, engines)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return own_paths.front_page(request.headers.get("accept", ""))

    def listed(name: str, created: int, length: int, drawn: Mapping[str, float] | None, via: tuple[str, ...] = ()) -> dict[str, object]:
        shown: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "paceline"}
        shown |= {"max_model_len": length, "sampling_defaults": drawn if drawn is None else dict(drawn)}
        return shown | {"via": outside((settings.mark, *via))}

    def model_entry(model: ServedModel) -> dict[str, object]:
        drawn = model.tokenizer.sampling_defaults if settings.uses_model_sampling else {}
        return listed(model.name, model.created, model.max_context, drawn, model.facts.via) | _engine_fields(model.facts)

    def encoder_entry(found: EncoderModel) -> dict[str, object]:
        return (
            listed(found.name, found.created, found.max_tokens, {}, found.facts.via)
            | _engine_fields(found.facts)
            | {"tasks": sorted(found.tasks)}
        )

    @app.get("/v1/models", summary="List the models", responses={200: {"model": replies.ModelList}, **key})
    async def models(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        data = [model_entry(model) for model in listed_models(service.inference, settings.served_names)]
        # How tokens of those on disk are drawn is known once one was asked for.
        data += [listed(model.name, changed(model), model.context, None) for model in await service.loadable()]
        by_name = {entry["id"]: entry for entry in data}
        for each in service.encoders.encoders():
            if each.name in by_name:  # it writes, too
                by_name[each.name]["tasks"] = ["chat", *sorted(each.tasks)]
            else:
                data.append(encoder_entry(each))
        return json_response(anthropic_models.models_page(data) if anthropic_models.is_asked(request) else {"object": "list", "data": data})

    @app.get(
        "/v1/models/{model_id:path}",
        summary="Describe a model",
        responses={200: {"model": replies.ListedModel}, **refusals(replies.ErrorReply, settings, 401, 404)},
    )
    async def model(model_id: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        try:
            entry = model_entry(find_model(model_id, service.inference, settings.served_names))
        except (UnknownModel, ModelAway):
            opened = None if service.models is None else await asyncio.to_thread(service.models.open, model_id)
            if opened is not None:
                entry = model_entry(opened)
            elif (encoder := meant_encoder(model_id, service.encoders.encoders())) is not None:
                entry = encoder_entry(encoder)
            else:
                raise
        return json_response(anthropic_models.model_entry(entry) if anthropic_models.is_asked(request) else entry)

    @app.head("/health", include_in_schema=False)
    @app.get(
        "/health",
        summary="Say whether work advances",
        responses={200: {"model": replies.Health}, 503: {"model": replies.Health, "description": "No progress"}},
    )
    async def health(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        status, body = service.health(has_key=bool(request.scope.get("state", {}).get("has_key")))
        return json_response(body, status=status)

    @app.get(
        "/metrics",
        summary="Show metrics as Prometheus reads them",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **key},
        response_class=Response,
    )
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _engine_fields(facts: ModelFacts) -> dict[str, object]:
    """Return what a list of models says besides of one that an engine of another maker runs."""
    if not facts.engine:
        return {}
    name, _, version = facts.engine.partition(" ")
    said: dict[str, object] = {"engine": name, "engine_version": version, "promise": PROMISE, "quantisation": facts.stored_as}
    return said | {"leaves_network": facts.leaves_network}
