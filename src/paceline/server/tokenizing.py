"""`/tokenize` and `/detokenize`: what a text or a chat is in a model's tokens, and back, as vLLM's clients and llama-server's ask for it; and the ids
of prompts that ask for the text between two others.

A text has the limits of a prompt: what fits no context of the model is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import InvalidRequest
from paceline.core.text import Tokenizer
from paceline.server.application import Application
from paceline.server.fields import ignored_fields, inner_request, json_response
from paceline.server.lazy_model import LazyModel
from paceline.server.messages import MAX_TOOLS, Message, Strict, Tool
from paceline.server.replies import ErrorReply, body_of, refusals
from paceline.server.requests import FIRST_SERVED, ChatCompletionRequest, ModelName, TokenId

if TYPE_CHECKING:
    from paceline.server.intake import Intake
    from paceline.server.service import ApiService


class TokenizeRequest(Strict):
    """A text (vLLM's `prompt`, llama-server's `content`) or a chat."""

    model: ModelName | None = Field(default=None, description=FIRST_SERVED)
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = Field(default=None, description="False: a chat's ids end with its last message.")
    with_pieces: bool | None = Field(default=None, description="llama-server's: each token is an object with `id` and `piece`.")
    return_token_strs: bool | None = Field(default=None, description="vLLM's: `token_strs` has the text of each token.")
    add_special_tokens: bool | None = Field(
        default=None, description="Whether a text gets the tokens that the model wants around it; default true for `prompt`."
    )
    add_special: bool | None = Field(default=None, description="The same, default false, for `content`.")


class DetokenizeRequest(Strict):
    model: ModelName | None = Field(default=None, description=FIRST_SERVED)
    tokens: list[TokenId]


class TokenPiece(LazyModel):
    id: int
    piece: str | list[int] = Field(description="Its text, or its bytes where they are not UTF-8.")


class Tokenized(LazyModel):
    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = Field(default=None, description="With `return_token_strs`.")


class Detokenized(LazyModel):
    prompt: str
    content: str


def tokenize(intake: Intake, body: bytes) -> Response:
    """Return the tokens of a text or a chat; raises as `Intake.chat` does."""
    asked = intake.parse(TokenizeRequest, body)
    model, fitted = intake.model(asked.model), tuple[str, ...]()
    match asked.prompt, asked.content, asked.messages:
        case str(text), None, None:
            ids = intake.ids_of(model, text, add_special=asked.add_special_tokens is not False)
        case None, str(text), None:
            ids = intake.ids_of(model, text, add_special=bool(asked.add_special))
        case None, None, list():
            shared = {"messages", "tools", "chat_template_kwargs", "continue_final_message"}
            if asked.add_generation_prompt:
                shared.add("add_generation_prompt")
            chat = asked.model_dump(include=shared, exclude_none=True) | {"model": model.name}
            prompt = intake.prompt_of(inner_request(ChatCompletionRequest, chat), begins_turn=asked.add_generation_prompt is not False)
            ids, fitted = prompt.ids, prompt.fitted
        case _:
            raise InvalidRequest("prompt: send one of prompt, content and messages", field="prompt")
    shown = _pieces(model.tokenizer, ids) if asked.with_pieces or asked.return_token_strs else []
    tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, shown, strict=True)] if asked.with_pieces else list(ids)
    strings = {"token_strs": [piece if isinstance(piece, str) else bytes(piece).decode("utf-8", "replace") for piece in shown]}
    found: dict[str, Any] = {"tokens": tokens, "count": len(ids), "max_model_len": model.max_context}
    return json_response(found | (strings if asked.return_token_strs else {}), ignored_fields(asked), fitted=fitted)


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | list[int]]:
    """Return the text of each token, or its bytes if they are not UTF-8. A special token is what it spells."""
    special = {token: text for text, token in tokenizer.special_tokens.items()}
    pieces: list[str | list[int]] = []
    for token in ids:
        data = tokenizer.token_bytes(token)
        try:
            pieces.append(special.get(token) or data.decode())
        except UnicodeDecodeError:
            pieces.append(list(data))
    return pieces


def detokenize(intake: Intake, body: bytes) -> Response:
    """Return the text that tokens spell; raises as `Intake.chat` does."""
    asked = intake.parse(DetokenizeRequest, body)
    text = intake.text_of(intake.model(asked.model), asked.tokens, "tokens")
    return json_response({"prompt": text, "content": text}, ignored_fields(asked))


def add_routes(app: Application, service: ApiService) -> None:
    refused = refusals(ErrorReply, service.settings)

    @app.post(
        "/tokenize",
        summary="Turn a text or a chat into token ids",
        responses={200: {"model": Tokenized}, **refused},
        openapi_extra=body_of(TokenizeRequest),
    )
    async def tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.read(request, tokenize)

    @app.post(
        "/detokenize",
        summary="Turn token ids into text",
        responses={200: {"model": Detokenized}, **refused},
        openapi_extra=body_of(DetokenizeRequest),
    )
    async def text(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.read(request, detokenize)
