"""Bodies of the Responses API, made into calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import ValidationError
from starlette.responses import Response

from paceline.core.clock import Clock
from paceline.core.errors import InvalidRequest
from paceline.server.call import Call
from paceline.server.faults import Fault, Refusal
from paceline.server.fields import ignored_fields, json_response
from paceline.server.intake import Intake
from paceline.server.requests import ChatCompletionRequest
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

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Responses:
    """The Responses API: turns its requests into chats, and keeps its responses."""

    kept: KeptResponses
    clock: Clock

    def call(self, intake: Intake, body: bytes) -> Call:
        """Return the call of a response; raises as `Intake.chat` does."""
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
        """Return a kept response.

        Raises:
            Refusal: it is not kept.
        """
        found = self.kept.find(response_id)
        if found is None:
            raise Refusal(not_found(response_id))
        return found


def not_found(response_id: str) -> Fault:
    return Fault(404, f"Response with id '{response_id[:80]}' not found. It was not kept, or is no longer.", code="not_found")
