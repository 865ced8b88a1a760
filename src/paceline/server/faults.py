"""Every failure as the API it happened in writes errors: one table from what went wrong to (status, type, code, param)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from paceline.core.errors import (
    ERROR_TABLE,
    SERVER_STOPPING,
    ImpossiblePin,
    ModelNotFound,
    NodeStopping,
    PacelineError,
    PlacementError,
    UnknownModel,
    UserError,
    VocabularyMismatch,
    code_of,
    kind_of,
)
from paceline.server.requests import REFUSED, TOOL_TYPES, UNION_TAGS


class Api(Enum):
    """API that decides the form of a path's errors."""

    OPENAI = auto()
    RESPONSES = auto()
    ANTHROPIC = auto()
    OLLAMA = auto()


def api_of(path: str) -> Api:
    """Return the API that a path belongs to; OpenAI's if it belongs to none."""
    if path.startswith("/v1/messages"):
        return Api.ANTHROPIC
    if path.startswith("/v1/responses"):
        return Api.RESPONSES
    return Api.OLLAMA if path.startswith("/api/") else Api.OPENAI


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


OWN_NAMES: Mapping[Api, Mapping[str, str]] = {
    Api.ANTHROPIC: {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        ".function.parameters": ".input_schema",
    },
    Api.RESPONSES: {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        ".function.parameters": ".parameters",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
    },
    Api.OLLAMA: {"response_format.json_schema.schema": "format", "response_format": "format"},
}
"""Names of fields of the chat that an API's requests become, and its own: of beginnings, and with a dot in front of parts."""


def own_field(names: Mapping[str, str], inner: str | None) -> str | None:
    """Return the name that an API has for a field of the chat, or for a place in one; None: it has no other name."""
    if inner is None:
        return None
    found = inner
    for theirs, ours in names.items():
        if theirs.startswith("."):
            found = found.replace(theirs, ours, 1)
        elif found == theirs or found.startswith((f"{theirs}.", f"{theirs}[")):
            found = ours + found[len(theirs) :]
    return None if found == inner else found


def rename_field(message: str, inner: str | None, outer: str | None) -> str:
    """Replace the field's name at the beginning of a message by another one."""
    return outer + message[len(inner) :] if inner and outer and message.startswith(inner) else message


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as a client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    partial_text: str = ""
    """Text that an answer without streaming had before it failed."""
    is_as_sent: bool = False
    """`param` and `message` have the field's name as the client sent it. Otherwise they have the chat's, and `body` writes the API's own."""

    def body(self, api: Api = Api.OPENAI) -> bytes:
        """Return the JSON of the error. A message may quote a model's files, and with them lone surrogates."""
        own = None if self.is_as_sent else own_field(OWN_NAMES.get(api, {}), self.param)
        message = rename_field(self.message, self.param, own).encode("utf-8", "replace").decode()
        partial = {"partial_text": self.partial_text} if self.partial_text else {}
        match api:
            case Api.OPENAI | Api.RESPONSES:
                return orjson.dumps(
                    {"error": {"message": message, "type": self.type, "param": own or self.param, "code": self.code, **partial}}
                )
            case Api.ANTHROPIC:
                kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
                return orjson.dumps({"error": {"type": kind, "message": message, **partial}, "type": "error"})
            case Api.OLLAMA:
                return orjson.dumps({"error": message, **partial})

    def response(self, api: Api) -> Response:
        """Return the whole HTTP answer."""
        return Response(self.body(api), self.status, self.headers, "application/json")


class Refusal(Exception):
    """Carries a fault up to where the answer is written."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault

    def with_text(self, text: str) -> Refusal:
        """Return the same refusal with the text that the answer had before it failed."""
        return Refusal(replace(self.fault, partial_text=text))


STOPPING = Fault(503, "The server is stopping. Try again in a moment.", "server_error", code=SERVER_STOPPING, headers={"Retry-After": "2"})
NOT_JSON = Fault(415, "The body should be JSON: send 'Content-Type: application/json'.", code="unsupported_media_type")
COMPRESSED = Fault(
    415,
    "The body is compressed, which is not supported. Send it without Content-Encoding.",
    code="unsupported_media_type",
    headers={"Accept-Encoding": "identity"},
)
BAD_KEY = Fault(
    401,
    "Missing or wrong API key. Send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def overloaded(message: str, retry_after_s: int) -> Fault:
    """429: come back later."""
    return Fault(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": str(max(1, retry_after_s))})


def server_fault(message: str) -> Fault:
    """500: ours, not the client's."""
    return Fault(500, message, "server_error", code="internal_error")


def no_machines(message: str, code: str) -> Fault:
    """503: the machines that the model takes are not there. They may be, in a moment."""
    return Fault(503, message, "server_error", code=code, headers={"Retry-After": "5"})


def fault_of_error(error: PacelineError) -> Fault:
    """Return the fault for a typed error of Paceline's."""
    match ERROR_TABLE[kind_of(error)].http:
        case 429:
            return overloaded(str(error), getattr(error, "retry_after_s", 1))
        case 500:
            return server_fault(str(error))
        case 503:
            return STOPPING if isinstance(error, NodeStopping) else no_machines(str(error), code_of(error))
        case status:
            return Fault(
                status, str(error), param="model" if isinstance(error, UnknownModel) else getattr(error, "field", None), code=code_of(error)
            )


def fault_of_mistake(error: UserError) -> Fault:
    """Return the fault for an error that the machine's owner reads: a mistake in the request, which API clients would see as a server's fault."""
    if isinstance(error, PlacementError) and not isinstance(error, ImpossiblePin | VocabularyMismatch):
        return fault_of_error(error)
    status, code = (404, "model_not_found") if isinstance(error, ModelNotFound) else (400, "invalid_value")
    return Fault(status, str(error), param="model", code=code)


WORDS: Mapping[str, str] = {
    "list_type": "Input should be a list",
    "string_type": "Input should be a string",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "Input should be an object"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "Input should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "Input should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "Input should be true or false"),
    **dict.fromkeys(("too_short", "string_too_short"), "Input should not be empty"),
    "too_long": "Input should have {max_length} entries at most",
    "string_too_long": "Input should have {max_length} letters at most",
}
"""By the kind of pydantic's error. Of other kinds its own words do, or are ours."""


_CLASS = re.compile(r"\^\[(.+)\]\{(\d+),(\d+)\}\$")
"""How the patterns of fields are written: one class of letters, and how many of them."""


def _said_of_pattern(pattern: str) -> str:
    """Return which letters a field takes, and how many."""
    if (found := _CLASS.fullmatch(pattern)) is None:
        return "Input has letters that are not taken here"
    letters, least, most = found.groups()
    others = re.sub(r"\w-\w", "", letters)
    named = ", ".join([*re.findall(r"\w-\w", letters), *others])
    return f"Input should have {least} to {most} characters, each one of {named}"


def fault_of_validation(error: ValidationError) -> Fault:
    """Return the fault for a body that does not fit its model: the first field at fault, by name."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Fault(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    param = _param(first["loc"])
    if not param:
        return Fault(400, "The body should be a JSON object", code="invalid_type")
    match first["type"]:
        case "missing":
            return Fault(400, f"Missing required field: {param}", param=param, code="missing_required_parameter")
        case "not_served":
            return Fault(400, f"{param}: {first['msg']}", param=param, code="unsupported_parameter")
        case _:
            of_tool = "tools" in first["loc"] or "tool_calls" in first["loc"]
            refused = TOOL_TYPES if of_tool and first["loc"][-1] == "type" else None
            refused = refused or next((REFUSED[part] for part in first["loc"] if isinstance(part, str) and part in REFUSED), None)
            if refused is REFUSED["type"] and "content" not in first["loc"]:
                refused = None  # another field called so
            if refused is not None:
                return Fault(400, f"{param}: {refused}", param=param, code="unsupported_parameter")
            if first["type"] == "string_pattern_mismatch":
                return Fault(
                    400, f"{param}: {_said_of_pattern(first.get('ctx', {}).get('pattern', ''))}", param=param, code="invalid_value"
                )
            wrong = WORDS[first["type"]].format_map(first.get("ctx", {})) if first["type"] in WORDS else first["msg"]
            if first["type"] == "list_type" and first["loc"][-1] in UNION_TAGS:
                wrong = "Input should be a string or a list"
            return Fault(400, f"{param}: {wrong}", param=param, code="invalid_value")


def _param(location: tuple[int | str, ...]) -> str:
    """Write a pydantic location as OpenAI does: messages[0].content."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in UNION_TAGS and part != "[key]":
            name += f".{part}" if name else part
    return name
