"""The OpenAPI document: FastAPI's, with the bodies that are read by hand and the models that are served."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from paceline.server.inference import Inference
from paceline.server.requests import ChatCompletionRequest, CompletionRequest

REF = "#/components/schemas/{model}"


def body_of(name: str) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is the schema `name`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": REF.format(model=name)}}}}}


def document(app: FastAPI, inference: Inference, *, with_key: bool) -> dict[str, Any]:
    """The document. `model` is an enumeration of the models served now, so that it tells the truth about what is accepted."""
    api = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    _, definitions = models_json_schema([(ChatCompletionRequest, "validation"), (CompletionRequest, "validation")], ref_template=REF)
    schemas = api.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    names = [model.name for model in inference.models()]
    if names:
        for request in (ChatCompletionRequest, CompletionRequest):
            schemas[request.__name__]["properties"]["model"] = {"type": "string", "title": "Model", "enum": names}
    for path in api["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI adds it to every route with a parameter; none answers so
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if with_key:
        api["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        api["security"] = [{"key": []}]
        api["paths"]["/health"]["get"]["security"] = []
    return api
