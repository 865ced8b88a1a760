"""The paths of the Responses API, and how a body becomes a call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import InvalidRequest
from paceline.server.application import Application
from paceline.server.faults import Refusal
from paceline.server.fields import json_response
from paceline.server.replies import Documented, ErrorReply, body_of, event_stream, refusals
from paceline.server.responses import shape as replies
from paceline.server.responses.calls import not_found
from paceline.server.responses.requests import ResponsesRequest

if TYPE_CHECKING:
    from paceline.server.service import ApiService

PATH = "/v1/responses"
MAX_LISTED = 100
"""Items in one answer."""


def add_routes(app: Application, service: ApiService) -> None:
    responses, refused = service.responses, refusals(ErrorReply, service.settings)
    response: Documented = {200: {"model": replies.ResponseReply}, **refused}
    streamed: Documented = {200: {"model": replies.ResponseReply, "content": event_stream("The event's JSON.")}, **refused}

    @app.post(PATH, summary="Create a response", responses=streamed, openapi_extra=body_of(ResponsesRequest))
    async def create(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer(request, responses.call)

    @app.post(
        PATH + "/input_tokens",
        summary="Count the tokens of a response's input",
        responses={200: {"model": replies.InputTokens}, **refused},
        openapi_extra=body_of(ResponsesRequest),
    )
    async def count(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.read(request, responses.input_tokens)

    @app.get(PATH + "/{response_id}", summary="Show a kept response", responses=response)
    async def retrieve(response_id: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("stream: a kept response comes whole", "Leave it out.", field="stream")
        return json_response(responses.find(response_id).body)

    @app.delete(PATH + "/{response_id}", summary="Delete a kept response", responses={200: {"model": replies.Deleted}, **refused})
    async def delete(response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not responses.kept.delete(response_id):
            raise Refusal(not_found(response_id))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get(
        PATH + "/{response_id}/input_items",
        summary="List the input of a kept response",
        responses={200: {"model": replies.ItemList}, **refused},
    )
    async def input_items(response_id: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        items = [item.shown for item in responses.find(response_id).input]
        query = request.query_params
        if query.get("order") != "asc":
            items.reverse()
        limit = query.get("limit", "20")
        if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_LISTED:
            raise InvalidRequest(f"limit: should be from 1 to {MAX_LISTED}", field="limit")
        ids = [item["id"] for item in items]
        start = ids.index(after) + 1 if (after := query.get("after")) in ids else 0
        page = items[start : start + int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": start + len(page) < len(items)})
