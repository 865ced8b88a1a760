"""`/tokenize` and `/detokenize`: what a text or a chat is in a model's tokens, and back, as vLLM's clients and llama-server's ask for it.

A text has the limits of a prompt: what fits no context of the model is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from paceline.core.errors import InvalidRequest
from paceline.server.fields import ignored_fields, inner_request, json_response
from paceline.server.messages import MAX_TOOLS, Message, Strict, Tool
from paceline.server.requests import ChatCompletionRequest, TokenId

if TYPE_CHECKING:
    from paceline.server.app import ApiService
    from paceline.server.intake import Intake

ModelName = Annotated[str, Field(min_length=1, max_length=512)]


class TokenizeRequest(Strict):
    """A text (vLLM's `prompt`, llama-server's `content`) or a chat."""

    model: ModelName | None = Field(default=None, description="Where missing: the first one served.")
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(default=None, description="What the model wants around a text; default true for `prompt`.")
    add_special: bool | None = Field(default=None, description="The same, default false, for `content`.")


class DetokenizeRequest(Strict):
    model: ModelName | None = None
    tokens: list[TokenId]


def tokenize(intake: Intake, body: bytes) -> Response:
    """The tokens of a text or a chat; raises as `Intake.chat` does."""
    asked = intake.parse(TokenizeRequest, body)
    model = intake.model(asked.model)
    match asked.prompt, asked.content, asked.messages:
        case str(text), None, None:
            ids = intake.ids_of(model, text, add_special=asked.add_special_tokens is not False)
        case None, str(text), None:
            ids = intake.ids_of(model, text, add_special=bool(asked.add_special))
        case None, None, list():
            shared = {"messages", "tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"}
            chat = asked.model_dump(include=shared, exclude_none=True) | {"model": model.name}
            ids = intake.prompt_of(inner_request(ChatCompletionRequest, chat)).ids
        case _:
            raise InvalidRequest("prompt: send one of prompt, content and messages", field="prompt")
    return json_response({"tokens": list(ids), "count": len(ids), "max_model_len": model.max_context}, ignored_fields(asked))


def detokenize(intake: Intake, body: bytes) -> Response:
    """The text that tokens spell; raises as `Intake.chat` does."""
    asked = intake.parse(DetokenizeRequest, body)
    text = intake.text_of(intake.model(asked.model), asked.tokens, "tokens")
    return json_response({"prompt": text, "content": text}, ignored_fields(asked))


def add_routes(app: FastAPI, service: ApiService) -> None:
    """Serve both."""

    @app.post("/tokenize", include_in_schema=False)
    async def tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.read(request, tokenize)

    @app.post("/detokenize", include_in_schema=False)
    async def text(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.read(request, detokenize)
