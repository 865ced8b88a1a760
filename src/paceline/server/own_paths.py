"""Paths that belong to no API: the page at `/`, and what only this machine's owner may do.

The page is one file: what runs here, a chat, and how programs use it. It asks only this endpoint, and runs no script but its own.

The owner sees what models take here, loads and unloads them. `paceline ps`, `load` and `unload` ask here, with the key that lies in the note of this
endpoint (`cli.running`); an API key opens none of it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from paceline.core.errors import UserError
from paceline.machine.foreign.state import EngineState
from paceline.machine.models import Models
from paceline.server.application import Application
from paceline.server.faults import Refusal, fault_of_mistake
from paceline.server.fields import json_response
from paceline.server.lazy_model import LazyModel

if TYPE_CHECKING:
    from paceline.server.service import ApiService

Result = TypeVar("Result")
EngineStates = Callable[[], Sequence[EngineState]]


@cache
def _page() -> tuple[str, dict[str, str]]:
    """Return the page, and headers that let a browser run its script and style, known by their hashes, and nothing else."""
    html = (files("paceline.server") / "page.html").read_text("utf-8")
    script, style = (_hash_of(html, tag) for tag in ("script", "style"))
    policy = f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
    # Another page that opens it can neither reach into it nor show it in a frame.
    alone = {"X-Frame-Options": "DENY", "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin"}
    return html, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", **alone}


def _hash_of(html: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None, f"the page has no {tag}"
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()


def front_page(accept: str) -> Response:
    """Return the answer to `/`: the page for browsers, a few words in JSON for programs."""
    if "text/html" in accept:
        html, headers = _page()
        return HTMLResponse(html, headers=headers)
    return JSONResponse({"name": "paceline", "api": "/v1", "models": "/v1/models", "health": "/health", "openapi": "/openapi.json"})


class LoadRequest(LazyModel):
    model: str = Field(min_length=1, max_length=4096)


class UnloadRequest(LoadRequest):
    wait_s: float = Field(default=0.0, ge=0, le=3600)


def add_routes(app: Application, service: ApiService, models: Models[Any], engines: EngineStates) -> None:
    """Add the owner's paths.

    Args:
        engines: returns the state of the engines of other makers that this machine shares.
    """

    async def done(work: Coroutine[Any, Any, Result], request: Request) -> Result:
        try:
            return await service.while_wanted(work, request)
        except UserError as error:
            raise Refusal(fault_of_mistake(error)) from error

    @app.get("/owner/models", include_in_schema=False)
    async def in_use() -> Response:  # pyright: ignore[reportUnusedFunction]
        uses, shared = [asdict(use) for use in models.in_use()], [asdict(state) for state in engines()]
        return json_response({"models": uses, "on_demand": models.on_demand, "engines": shared})

    @app.post("/owner/load", include_in_schema=False)
    async def load(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = await service.read(request, lambda intake, body: intake.parse(LoadRequest, body))
        return json_response({"model": await done(models.load(asked.model), request)})

    @app.post("/owner/unload", include_in_schema=False)
    async def unload(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = await service.read(request, lambda intake, body: intake.parse(UnloadRequest, body))
        await done(models.unload(asked.model, asked.wait_s), request)
        return json_response({"model": asked.model})
