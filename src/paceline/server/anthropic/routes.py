"""The paths of Anthropic's API: requests of `/v1/messages` become chats, as those of every API do, and then calls or counts. Synchronous and in threads.

Turns of one role that follow one another are one turn. In a user's turn the results of tools come first, each as a message of its own, and then its
text. A system message among the others becomes the user's text in <system-reminder> tags, in which clients write such notes themselves: most templates
take a system message at the beginning alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import ContextOverflow, InvalidRequest
from paceline.server.anthropic import shape as replies
from paceline.server.anthropic.requests import (
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    MessageTurn,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoiceAsked,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.server.anthropic.shape import MessageShape
from paceline.server.application import Application
from paceline.server.call import Call
from paceline.server.fields import ignored_fields, inner_request, json_response
from paceline.server.intake import ChatPrompt, Intake
from paceline.server.messages import (
    MAX_CALLS,
    CalledFunction,
    Function,
    MediaPart,
    Message,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
    joined,
    json_bytes,
    refuse_media,
)
from paceline.server.replies import body_of, event_stream, refusals
from paceline.server.requests import ChatCompletionRequest, ExtendedSampling, reasoning_fields

if TYPE_CHECKING:
    from paceline.server.service import ApiService


REMINDER = "<system-reminder>\n{}\n</system-reminder>"
FAILED = "Error: "
"""Before the result of a call that failed, where it does not begin so."""
SAMPLING = ("stream", *ExtendedSampling.model_fields)
"""Fields that both have."""
THINKS = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}


def chat_of(asked: CountTokensRequest, *, takes_images: bool = False) -> ChatCompletionRequest:
    """Return the chat of a request, without `max_tokens`.

    Args:
        takes_images: the model reads images. Otherwise one in the last message is refused.

    Raises:
        InvalidRequest: parts of the request don't belong together.
    """
    fields: dict[str, Any] = {"model": asked.model, "messages": _messages(asked, takes_images=takes_images), "now": asked.now}
    if fields["messages"][-1].role == "assistant":
        fields["continue_final_message"] = True
    if asked.tools:
        fields["tools"] = [_tool(tool) for tool in asked.tools]
    if asked.tool_choice is not None:
        fields |= _choice(asked.tool_choice)
    config = asked.output_config
    thinks = None if asked.thinking is None else THINKS[asked.thinking.type]
    fields |= reasoning_fields(None if config is None else config.effort, asked.chat_template_kwargs, thinks=thinks)
    output = asked.output_format if config is None or config.format is None else config.format
    if output is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.schema_}}
    if isinstance(asked, MessagesRequest):
        fields |= {name: getattr(asked, name) for name in SAMPLING}
        fields["stop"] = asked.stop_sequences or None
    return inner_request(ChatCompletionRequest, fields)


def _tool(tool: ClientTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: ToolChoiceAsked) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    match choice.type:
        case "auto" | "none":
            fields["tool_choice"] = choice.type
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest("tool_choice.name: missing", "Name the tool that is to be called.", field="tool_choice.name")
            fields["tool_choice"] = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return fields


def _messages(asked: CountTokensRequest, *, takes_images: bool) -> list[Message]:
    system = [_text(asked.system)] if asked.system else []
    turns = list(enumerate(asked.messages))
    while turns and turns[0][1].role == "system":
        system += [_text(turn.content) for _, turn in turns[:1]]
        del turns[0]
    messages = [Message(role="system", content="\n".join(system))] if any(system) else []
    known = set[str]()
    while turns:
        role = turns[0][1].role
        count = next((place for place, (_, turn) in enumerate(turns) if (turn.role == "assistant") != (role == "assistant")), len(turns))
        together, turns = turns[:count], turns[count:]
        messages += (
            _assistant(together, known) if role == "assistant" else _user(together, known, is_last=not turns, takes_images=takes_images)
        )
    if not messages or messages[-1].role == "system":
        raise InvalidRequest("messages: there is nothing to answer", "Send a message of the user's.", field="messages")
    if messages[-1].role == "assistant" and (messages[-1].tool_calls or not messages[-1].text):
        raise InvalidRequest(
            f"messages[{len(asked.messages) - 1}]: the last message is the assistant's, and no text that the answer could go on with",
            "End with a message of the user's, or with text of the assistant's.",
            field="messages",
        )
    return messages


def _user(turns: Sequence[tuple[int, MessageTurn]], known: set[str], *, is_last: bool, takes_images: bool) -> list[Message]:
    results: list[Message] = []
    parts: list[TextPart | MediaPart] = []
    for at, turn in turns:
        if turn.role == "system":
            parts.append(_text_part(REMINDER.format(_text(turn.content))))
            continue
        for place, block in enumerate(turn.blocks):
            match block:
                case TextBlock(text=text):
                    parts += [_text_part(text)] if text else []
                case MediaPart(type=kind):
                    if is_last and at == turns[-1][0] and not (takes_images and kind == "image"):
                        raise refuse_media(kind, f"messages[{at}].content[{place}].type")
                    parts.append(block)
                case ToolResultBlock(tool_use_id=call, content=content, is_error=failed):
                    if call not in known:
                        field = f"messages[{at}].content[{place}].tool_use_id"
                        raise InvalidRequest(f"{field}: no tool_use block before it has the id {call!r}", field=field)
                    given: list[TextPart | MediaPart] = [
                        part if isinstance(part, MediaPart) else _text_part(part.text) for part in _blocks_of(content or "")
                    ]
                    if failed and not (given and given[0].text.startswith(FAILED)):
                        first = given[0].text if given and isinstance(given[0], TextPart) else ""
                        given[:1] = [_text_part(FAILED + first), *(part for part in given[:1] if isinstance(part, MediaPart))]
                    results.append(Message(role="tool", tool_call_id=call, content=given or ""))
                case ThinkingBlock() | RedactedThinkingBlock() | ToolUseBlock():
                    raise _misplaced(at, place, block.type, "the assistant's")
    if not results and not parts:
        raise InvalidRequest(f"messages[{turns[0][0]}].content: empty", "Say something.", field=f"messages[{turns[0][0]}].content")
    return [*results, Message(role="user", content=parts)] if parts else results


def _text_part(text: str) -> TextPart:
    return TextPart(type="text", text=text)


def _blocks_of(content: str | Sequence[TextBlock | MediaPart]) -> Sequence[TextBlock | MediaPart]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _assistant(turns: Sequence[tuple[int, MessageTurn]], known: set[str]) -> list[Message]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at, turn in turns:
        for place, block in enumerate(turn.blocks):
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking)
                case RedactedThinkingBlock():
                    pass
                case ToolUseBlock(id=call, name=name, input=arguments):
                    known.add(call)
                    calls.append(ToolCall(id=call, function=CalledFunction(name=name, arguments=json_bytes(arguments).decode())))
                case ToolResultBlock() | MediaPart():
                    raise _misplaced(at, place, block.type, "the user's")
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(
            f"messages[{turns[0][0]}].content: {len(calls)} calls in one turn, and {MAX_CALLS} are the most", field="messages"
        )
    content, reasoning = joined(texts), joined(thoughts)
    if not (content or reasoning or calls):
        return []
    return [Message(role="assistant", content=content, reasoning_content=reasoning or None, tool_calls=calls or None)]


def _misplaced(at: int, place: int, kind: str, whose: str) -> InvalidRequest:
    field = f"messages[{at}].content[{place}]"
    return InvalidRequest(f"{field}: a {kind} block stands in a message of {whose} alone", field=field)


def _text(content: str | Sequence[object]) -> str:
    """Return the text of a system message."""
    return content if isinstance(content, str) else joined([block.text for block in content if isinstance(block, TextBlock)])


TOO_LONG = "prompt is too long: "
"""How Anthropic's error begins. Claude Code compacts a conversation by it, and reads the two numbers behind it."""


def message_call(intake: Intake, body: bytes) -> Call:
    """Return the call of a message request. If `max_tokens` is more than the context leaves, the answer may take what it leaves.

    Raises:
        Refusal: the body is malformed.
        InvalidRequest, ContextOverflow, UnknownModel: it can't be served as asked.
    """
    asked = intake.parse(MessagesRequest, body)
    chat = chat_of(asked, takes_images=intake.takes_images(asked.model))
    if (passed := intake.passed(chat)) is not None:
        requests = tuple(replace(request, max_tokens=asked.max_tokens) for request in passed.requests)
        return replace(passed, id=f"msg_{uuid4().hex}", requests=requests, ignored=ignored_fields(asked), shape=MessageShape)
    prompt = _prompt(intake, chat)
    size, most = len(prompt.ids), prompt.model.max_context
    if size >= most:
        raise ContextOverflow(f"{TOO_LONG}{size} tokens > {most - 1} maximum", "Send less, or compact the conversation.", field="messages")
    call = intake.call_of(chat, prompt)
    room = None if asked.max_tokens > most - size else asked.max_tokens
    requests = tuple(replace(request, max_tokens=room) for request in call.requests)
    return replace(call, id=f"msg_{uuid4().hex}", requests=requests, ignored=ignored_fields(asked), shape=MessageShape)


def count_prompt_tokens(intake: Intake, body: bytes) -> Response:
    """Answer how many tokens a prompt has; raises as `message_call` does."""
    asked = intake.parse(CountTokensRequest, body)
    prompt = _prompt(intake, chat_of(asked))
    return json_response({"input_tokens": len(prompt.ids)}, ignored_fields(asked), fitted=prompt.fitted)


def _prompt(intake: Intake, chat: ChatCompletionRequest) -> ChatPrompt:
    try:
        return intake.prompt_of(chat)
    except ContextOverflow as error:
        raise ContextOverflow(TOO_LONG + error.message, error.hint, field=error.field) from error


def add_routes(app: Application, service: ApiService) -> None:
    refused = refusals(replies.MessageFaultReply, service.settings)
    stream = event_stream("The event's JSON; its `type` is the event's name.")

    @app.post(
        "/v1/messages",
        summary="Answer a chat (Anthropic's API)",
        responses={200: {"model": replies.AnsweredMessage, "content": stream}, **refused},
        openapi_extra=body_of(MessagesRequest),
    )
    async def messages(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.answer(request, message_call)

    @app.post(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a chat (Anthropic's API)",
        responses={200: {"model": replies.TokenCount}, **refused},
        openapi_extra=body_of(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await service.read(request, count_prompt_tokens)
