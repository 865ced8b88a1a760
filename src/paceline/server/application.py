"""The application: Starlette's router, with what the OpenAPI document says of each route.

FastAPI writes the document, when it is first asked for. To import it and to give it every route took a sixth of a start.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

Handler = Callable[..., Awaitable[Response]]
"""Its parameters are the request, if it is named so, and the path's."""


@dataclass(frozen=True, slots=True)
class _Documented:
    path: str
    handler: Handler
    methods: tuple[str, ...]
    described: Mapping[str, Any]
    """Arguments of FastAPI's `add_api_route`."""


class Application(Starlette):
    """An application without routes, but for its document."""

    def __init__(self, *, title: str, version: str, description: str, lifespan: Lifespan[Application]) -> None:
        super().__init__(lifespan=lifespan)
        self.title, self.version, self.description = title, version, description
        self.openapi: Callable[[], dict[str, Any]] = self.described
        """Returns the document."""
        self.router.redirect_slashes = False
        self._documented: list[_Documented] = []

        async def document(_: Request) -> Response:
            return JSONResponse(self.openapi())

        self.router.routes.append(Route("/openapi.json", document, include_in_schema=False))

    def add(self, path: str, handler: Handler, methods: Sequence[str], *, include_in_schema: bool = True, **described: Any) -> None:
        """Add a route.

        Args:
            described: what the document says of it, as FastAPI's `add_api_route` takes it.
        """
        names = tuple(inspect.signature(handler).parameters)

        async def answer(request: Request) -> Response:
            return await handler(**{name: request if name == "request" else request.path_params[name] for name in names})

        route = Route(path, answer, methods=list(methods), name=handler.__name__)
        route.methods = set(methods)  # Starlette would answer HEAD wherever it answers GET
        self.router.routes.append(route)
        if include_in_schema:
            self._documented.append(_Documented(path, handler, tuple(methods), described))

    def get(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        """Decorate the handler of a GET; arguments as `add` has them."""
        return self._adding("GET", path, described)

    def head(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        """Decorate the handler of a HEAD."""
        return self._adding("HEAD", path, described)

    def post(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        """Decorate the handler of a POST."""
        return self._adding("POST", path, described)

    def delete(self, path: str, **described: Any) -> Callable[[Handler], Handler]:
        """Decorate the handler of a DELETE."""
        return self._adding("DELETE", path, described)

    def _adding(self, method: str, path: str, described: Mapping[str, Any]) -> Callable[[Handler], Handler]:
        def decorate(handler: Handler) -> Handler:
            self.add(path, handler, (method,), **described)
            return handler

        return decorate

    def described(self) -> dict[str, Any]:
        """Return the OpenAPI document of the routes, as FastAPI writes it."""
        from fastapi import FastAPI
        from fastapi.openapi.utils import get_openapi

        app = FastAPI()
        for one in self._documented:
            app.add_api_route(one.path, one.handler, methods=list(one.methods), **one.described)
        return get_openapi(title=self.title, version=self.version, routes=app.routes, description=self.description)
