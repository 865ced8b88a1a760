"""The page at `/`: what runs here, a chat, and how programs use it. One file that asks only this endpoint, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, JSONResponse, Response


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The page, and headers that let a browser run its script and style, found by their hashes, and nothing else."""
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
    """The answer to `/`: the page for browsers, a few words in JSON for programs."""
    if "text/html" in accept:
        html, headers = _page()
        return HTMLResponse(html, headers=headers)
    return JSONResponse({"name": "paceline", "api": "/v1", "models": "/v1/models", "health": "/health", "openapi": "/openapi.json"})
