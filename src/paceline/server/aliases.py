"""OpenAI's paths without `/v1`: clients whose base URL lacks it ask for these, as llama.cpp's server allows."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PATHS: Final = ("/chat/completions", "/completions", "/responses", "/embeddings", "/rerank", "/models")
"""With everything below them."""


class Aliases:
    """Serve these paths as those below `/v1`. Outermost, so that logs, limits and error shapes see one path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its path below `/v1`."""
        if scope["type"] == "http" and f"{scope['path']}/".startswith(tuple(f"{path}/" for path in PATHS)):
            scope = {**scope, "path": f"/v1{scope['path']}", "raw_path": b"/v1" + scope["raw_path"]}
        await self._app(scope, receive, send)
