"""The paths of Anthropic's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response

from paceline.server.anthropic import intake
from paceline.server.anthropic import shape as replies
from paceline.server.anthropic.requests import CountTokensRequest, MessagesRequest
from paceline.server.fields import json_response
from paceline.server.replies import body_of, event_stream, refusals

if TYPE_CHECKING:
    from paceline.server.app import ApiService

PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


def add_routes(app: FastAPI, service: ApiService) -> None:
    """Serve Anthropic's API."""
    refused = refusals(replies.MessageFaultReply, service.settings)
    stream = event_stream("The event's JSON; its `type` is the event's name.")

    @app.post(
        "/v1/messages",
        responses={200: {"model": replies.AnsweredMessage, "content": stream}, **refused},
        openapi_extra=body_of(MessagesRequest),
    )
    async def messages(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer(request, intake.message_call)

    @app.post(
        "/v1/messages/count_tokens",
        responses={200: {"model": replies.TokenCount}, **refused},
        openapi_extra=body_of(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        tokens, ignored = await service.read(request, intake.count_prompt_tokens)
        return json_response({"input_tokens": tokens}, ignored)
