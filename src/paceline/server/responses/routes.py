"""The paths of the Responses API, and how a body becomes a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from paceline.core.clock import Clock
from paceline.core.errors import InvalidRequest
from paceline.server.call import Call
from paceline.server.faults import Fault, Refusal
from paceline.server.fields import ignored_fields, json_response
from paceline.server.intake import Intake
from paceline.server.replies import Documented, ErrorReply, body_of, event_stream, refusals
from paceline.server.requests import ChatCompletionRequest
from paceline.server.responses import shape as replies
from paceline.server.responses.conversation import (
    Kept,
    KeptItem,
    KeptResponses,
    chat_request_of,
    keep_item,
    new_id,
    translate_error,
    write_messages,
)
from paceline.server.responses.requests import AnyItem, MessageItem, ReferenceItem, ResponsesRequest
from paceline.server.responses.shape import AnswerTurn

if TYPE_CHECKING:
    from paceline.server.app import ApiService

Read = TypeVar("Read")
PATH = "/v1/responses"
MAX_LISTED = 100
"""Items in one answer."""


@dataclass(frozen=True, slots=True)
class Responses:
    """What this API knows beside the chat's."""

    kept: KeptResponses
    clock: Clock

    def call(self, intake: Intake, body: bytes) -> Call:
        """A response; raises as `Intake.chat` does."""
        asked = intake.parse(ResponsesRequest, body)
        before, items, call = self._read(asked, intake.chat_of)
        kept = [one if isinstance(one, KeptItem) else keep_item(one) for one in items]
        turn = AnswerTurn(asked, before, kept, None if asked.store is False else self.kept, self.clock)
        return replace(call, id=new_id("response"), shape=turn.shape, ignored=ignored_fields(asked))

    def input_tokens(self, intake: Intake, body: bytes) -> Response:
        """Count the tokens of a prompt without answering it; raises as `Intake.chat` does."""
        asked = intake.parse(ResponsesRequest, body)
        _, _, prompt = self._read(asked, intake.prompt_of)
        return json_response(
            {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}, ignored_fields(asked), fitted=prompt.fitted
        )

    def _read(
        self, asked: ResponsesRequest, read: Callable[[ChatCompletionRequest], Read]
    ) -> tuple[list[KeptItem], list[AnyItem | KeptItem], Read]:
        """Read a request as a chat. Returns: the items before it, its own items, and what `read` makes of the chat."""
        before = self._before(asked.previous_response_id)
        is_list = not isinstance(asked.input, str)
        given = asked.input if not isinstance(asked.input, str) else [MessageItem(role="user", content=asked.input)]
        items = [self._resolved(item.id, place) if isinstance(item, ReferenceItem) else item for place, item in enumerate(given)]
        try:
            written = write_messages(
                asked.instructions,
                [one.item for one in before],
                [one.item if isinstance(one, KeptItem) else one for one in items],
                is_list=is_list,
            )
        except ValidationError as error:  # several items are one message, which may be more than a message can be
            raise InvalidRequest(f"input: {error.errors()[0]['msg']}", "Send fewer items of one turn.", field="input") from error
        if not written.messages:
            raise InvalidRequest("input: has nothing for the model to read", "Send a message.", field="input")
        try:
            return before, items, read(chat_request_of(asked, written.messages))
        except InvalidRequest as error:
            raise translate_error(error, written.origins) from error

    def _before(self, response_id: str | None) -> list[KeptItem]:
        if response_id is None:
            return []
        found = self.kept.find(response_id)
        if found is None:
            message = f"Previous response with id '{response_id[:80]}' not found. It was not kept, or is no longer: send its items."
            raise Refusal(Fault(400, message, param="previous_response_id", code="previous_response_not_found"))
        return found.items

    def _resolved(self, item_id: str, place: int) -> KeptItem:
        found = self.kept.item(item_id)
        if found is None:
            message = f"input[{place}]: item with id '{item_id[:80]}' not found. It was not kept, or is no longer: send the item itself."
            raise Refusal(Fault(400, message, param=f"input[{place}].id", code="item_not_found"))
        return found

    def find(self, response_id: str) -> Kept:
        """A kept response.

        Raises:
            Refusal: there is none.
        """
        found = self.kept.find(response_id)
        if found is None:
            raise Refusal(_not_found(response_id))
        return found


def _not_found(response_id: str) -> Fault:
    return Fault(404, f"Response with id '{response_id[:80]}' not found. It was not kept, or is no longer.", code="not_found")


def add_routes(app: FastAPI, service: ApiService) -> None:
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
            raise Refusal(_not_found(response_id))
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
