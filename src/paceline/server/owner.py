"""What only this machine's owner may do: see what models take here, load and unload them. `paceline ps`, `load` and `unload` ask here, with the key
that lies in the note of this endpoint (`cli.running`); an API key opens none of it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from paceline.machine.models import Models
from paceline.server.faults import STOPPING, Refusal
from paceline.server.fields import json_response

if TYPE_CHECKING:
    from paceline.server.app import ApiService


class LoadRequest(BaseModel):
    model: str = Field(min_length=1, max_length=4096)


class UnloadRequest(LoadRequest):
    wait_s: float = Field(default=0.0, ge=0, le=3600)


def add_routes(app: FastAPI, service: ApiService, models: Models[Any]) -> None:
    """Serve the paths."""

    @app.get("/owner/models", include_in_schema=False)
    async def in_use() -> Response:  # pyright: ignore[reportUnusedFunction]
        return json_response({"models": [asdict(use) for use in models.in_use()], "on_demand": models.on_demand})

    @app.post("/owner/load", include_in_schema=False)
    async def load(asked: LoadRequest, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if service.is_draining or service.is_stopping:
            raise Refusal(STOPPING)
        return json_response({"model": await service.while_wanted(models.load(asked.model), request)})

    @app.post("/owner/unload", include_in_schema=False)
    async def unload(asked: UnloadRequest, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        await service.while_wanted(models.unload(asked.model, asked.wait_s), request)
        return json_response({"model": asked.model})
