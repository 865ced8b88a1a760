"""The list of models as Anthropic's API has it, for requests that carry its version header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from starlette.requests import Request


def is_asked(request: Request) -> bool:
    """Return whether a client of Anthropic's API sent the request."""
    return "anthropic-version" in request.headers


def model_entry(listed: Mapping[str, object]) -> dict[str, object]:
    """Return a model as Anthropic's API lists it, from its entry in OpenAI's list."""
    created = listed["created"]
    at = datetime.fromtimestamp(created if isinstance(created, int) else 0, UTC)
    name = listed["id"]
    return {"type": "model", "id": name, "display_name": name, "created_at": at.strftime("%Y-%m-%dT%H:%M:%SZ")}


def models_page(listed: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return all models on one page."""
    data = [model_entry(each) for each in listed]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"data": data, "has_more": False, **ends}
