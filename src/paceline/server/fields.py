"""Fields that a body's model does not have: one rule for every API.

Law: a field that is known to change an answer elsewhere, and is not served here, is refused by name, unless its value means "off". In an object where
every field changes the answer (`messages.ClosedObject`), each unknown name is refused. Any other is ignored, and the answer's header says so: nothing
is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.responses import Response

from paceline.server.faults import Fault, Refusal, fault_of_validation
from paceline.server.messages import ClosedObject, is_whole, json_bytes

HEADER: Final = "x-paceline-ignored"
FITTED: Final = "x-paceline-fitted"
MAX_NAMES: Final = 40
MAX_HEADER_BYTES: Final = 1000
"""Maximum length of the names in the header. Raising it: proxies refuse answers with long headers, some from 4 KiB on."""
MAX_NAME_LETTERS: Final = 80


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that would change the answer."""

    why: str
    off: tuple[Any, ...] = ()
    """Values that ask for the default behaviour, in addition to null."""

    def is_off(self, value: object) -> bool:
        """Return whether the value asks for nothing. `true` is not 1."""
        return value is None or any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)


FORM: Final = "Send response_format, regex or grammar"
NOT_DRAWN_SO: Final = "Answers are not drawn so here"
UNSERVED: Final[Mapping[str, Unserved]] = {
    # OpenAI's.
    "functions": Unserved("Functions are served as tools: send tools", ([],)),
    "function_call": Unserved("Functions are served as tools: send tool_choice", ("none", "auto")),
    "modalities": Unserved("Only text is served", (["text"],)),
    "audio": Unserved("Audio is not served"),
    "web_search_options": Unserved("Web search is not served"),
    "moderation": Unserved("Nothing is moderated here"),
    "verbosity": Unserved("Only verbosity medium is served", ("medium",)),
    "best_of": Unserved("Only best_of 1 is served", (1,)),
    "suffix": Unserved("Texts are filled in by /v1/completions", ("",)),
    "echo": Unserved("Prompts are repeated by /v1/completions", (False,)),
    # Fields of other servers of embeddings.
    **dict.fromkeys(("input_type", "prompt_name"), Unserved("Write the prefix that the model wants into the text")),
    # vLLM's and transformers'.
    **dict.fromkeys(("use_beam_search", "early_stopping"), Unserved("Beams are not searched here", (False,))),
    **dict.fromkeys(("num_beams", "length_penalty"), Unserved("Beams are not searched here", (1,))),
    "do_sample": Unserved("Send temperature: 0 for greedy answers", (True,)),
    "max_new_tokens": Unserved("Send max_tokens"),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), Unserved("Answers may be as short as they are", (0,))),
    "skip_special_tokens": Unserved("Special tokens are never shown", (True,)),
    "spaces_between_special_tokens": Unserved("Special tokens are never shown", (True, False)),
    "include_stop_str_in_output": Unserved("Texts that stop an answer are not part of it", (False,)),
    "bad_words": Unserved("Send logit_bias", ([],)),
    "allowed_token_ids": Unserved("Send grammar or regex"),
    "add_special_tokens": Unserved("A chat's special tokens are its template's", (False,)),
    "add_generation_prompt": Unserved("Only chats have turns", (True,)),
    "continue_final_message": Unserved("Only chats have turns", (False,)),
    "chat_template": Unserved("The model's own is used", ("",)),
    "documents": Unserved("Send documents as text in a message", ([],)),
    "truncate_prompt_tokens": Unserved("Prompts are not cut", (-1,)),
    "prompt_logprobs": Unserved("/v1/completions serves echo with logprobs"),
    "prompt_embeds": Unserved("Send prompt"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_tokens"), Unserved("Token ids are not shown", (False,))),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema"), Unserved(FORM)
    ),
    # llama.cpp's and those of its kin.
    **dict.fromkeys(("n_predict", "num_predict"), Unserved("Send max_tokens", (-1,))),
    "repeat_penalty": Unserved("Send repetition_penalty", (1,)),
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z"), Unserved(NOT_DRAWN_SO, (1,))),
    **dict.fromkeys(("no_repeat_ngram_size", "top_a", "mirostat", "mirostat_mode", "xtc_probability"), Unserved(NOT_DRAWN_SO, (0,))),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range"), Unserved(NOT_DRAWN_SO, (0,))),
    "top_n_sigma": Unserved(NOT_DRAWN_SO, (-1, 0)),
    "samplers": Unserved("The order of the samplers is fixed", ([], "")),
    "n_probs": Unserved("Send logprobs", (0,)),
    "lora": Unserved("Adapters are not served", ([],)),
    "lora_request": Unserved("Adapters are not served"),
    # Other APIs'.
    "options": Unserved("Send the options as fields of the body", ({},)),
    "format": Unserved(FORM, ("",)),
    "reasoning": Unserved("Send reasoning_effort, or chat_template_kwargs", ({},)),
    "system": Unserved("Send a message whose role is system", ("", [])),
    "images": Unserved("Only text is served", ([],)),
    "stop_sequences": Unserved("Send stop", ([],)),
    "random_seed": Unserved("Send seed"),
    "safe_prompt": Unserved("The model's own is used", (False,)),
}
"""Fields that are not served, by name. A body with a field of that name in its model serves it."""


Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], body: bytes) -> Body:
    """Read a body and check it against its model.

    Raises:
        Refusal: it does not fit, or has a field that would change the answer and is not served.
    """
    if not body.strip():
        raise Refusal(Fault(400, "The body is empty: send a JSON object", code="invalid_json"))
    try:
        asked = _validated(kind, body)
    except ValidationError as error:
        raise Refusal(replace(fault_of_validation(error), is_as_sent=True)) from error
    check_fields(asked)
    return asked


MOST_ROUNDS: Final = 4
"""Times that whole floats are taken as integers in one body: validation names only the first error of a list. Raising it: more such bodies are taken,
and a bad one costs more."""


def _validated(kind: type[Body], body: bytes) -> Body:
    """Check a body. A float without a fraction (`42.0`) is an integer where one is asked for, as JSON Schema has it.

    Raises:
        ValidationError: the body doesn't fit.
    """
    for _ in range(MOST_ROUNDS):
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            whole = [each for each in error.errors(include_url=False) if each["type"] == "int_type" and is_whole(each["input"])]
            if not whole:
                raise
        fields = from_json(body)
        for each in whole:
            _make_whole(fields, each["loc"])
        body = to_json(fields)
    return kind.model_validate_json(body)


def _make_whole(fields: Any, place: tuple[int | str, ...]) -> None:
    """Make the float at a place an integer, and in a list all whole floats. Names of a union's branches are part of a place and of no body."""
    found: Any = fields
    for name in place:
        inner: Any = None
        if isinstance(found, dict):
            inner = cast("dict[object, Any]", found).get(name)
        elif isinstance(found, list) and isinstance(name, int) and name < len(cast("list[Any]", found)):
            inner = found[name]
        if isinstance(inner, (dict, list)):
            found = inner
        elif is_whole(inner) and isinstance(found, list):
            numbers = cast("list[Any]", found)
            numbers[:] = [int(one) if is_whole(one) else one for one in numbers]
        elif is_whole(inner):
            cast("dict[object, Any]", found)[name] = int(inner)


def inner_request(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Make the inner request of another API's request. Its own body passed its checks, so a failure here is rare, and still the client's error.

    Raises:
        Refusal: it does not pass the inner checks.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise Refusal(fault_of_validation(error)) from error


def check_fields(asked: BaseModel, at: str = "") -> None:
    """Look at what a body has beside its model's fields.

    Args:
        at: what stands before their names.

    Raises:
        Refusal: one of them would change the answer.
    """
    for name, value in (asked.model_extra or {}).items():
        unserved = UNSERVED.get(name)
        if unserved is not None and not unserved.is_off(value):
            raise _refused(at + name, unserved.why)
    for name in CLOSED_IN & asked.model_fields_set & type(asked).model_fields.keys():
        _check_closed(getattr(asked, name), at + name)


def _refused(name: str, why: str) -> Refusal:
    return Refusal(Fault(400, f"{name}: {why}", param=name, code="unsupported_parameter", is_as_sent=True))


CLOSED_IN: Final = frozenset({"response_format", "tool_choice", "tools", "stream_options", "text", "documents"})
"""Fields of bodies in which closed objects stand."""


def _check_closed(value: object, at: str) -> None:
    """Refuse unknown names in closed objects, however deep."""
    if isinstance(value, list):
        for place, one in enumerate(cast("list[object]", value)):
            _check_closed(one, f"{at}[{place}]")
    if not isinstance(value, BaseModel):
        return
    for name, extra in (value.model_extra or {}).items() if isinstance(value, ClosedObject) else ():
        if extra is not None:
            known = ", ".join(field.alias or name for name, field in type(value).model_fields.items())
            raise _refused(f"{at}.{name}", f"is not known there. Known: {known}.")
    for name in value.model_fields_set & type(value).model_fields.keys():
        _check_closed(getattr(value, name), f"{at}.{type(value).model_fields[name].alias or name}")


def ignored_fields(asked: BaseModel) -> tuple[str, ...]:
    """Return the fields that had no effect because the server does not know them, as in `messages[].mood`. Each once; null asks for nothing."""
    return tuple(dict.fromkeys(name for name in _unknown(asked, "") if name not in UNSERVED))


def notes(ignored: tuple[str, ...], fitted: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the headers that say which fields were ignored, and what was changed to fit a chat to its template; each only where there is something."""
    return _ignored_header(ignored) | ({FITTED: ", ".join(fitted)} if fitted else {})


def _ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    if not names:
        return {}
    shown: list[str] = []
    for name in names:
        word = quote(name[:MAX_NAME_LETTERS].encode("utf-8", "replace"), safe="[]._-")
        if len(shown) == MAX_NAMES or sum(map(len, shown)) + 2 * len(shown) + len(word) > MAX_HEADER_BYTES:
            shown.append("...")
            break
        shown.append(word)
    return {HEADER: ", ".join(shown)}


def json_response(body: object, ignored: tuple[str, ...] = (), status: int = 200, *, fitted: tuple[str, ...] = ()) -> Response:
    """Return an answer of JSON, or of bytes that are JSON already, with the headers of `notes`."""
    return Response(body if isinstance(body, bytes) else json_bytes(body), status, notes(ignored, fitted), "application/json")


def _unknown(asked: BaseModel, at: str) -> Iterator[str]:
    for name, value in (asked.model_extra or {}).items():
        if value is not None:
            yield at + name
    for name in asked.model_fields_set & type(asked).model_fields.keys():
        value = getattr(asked, name)
        inside = f"{at}{type(asked).model_fields[name].alias or name}"
        if isinstance(value, BaseModel):
            yield from _unknown(value, inside + ".")
        elif isinstance(value, list):
            for one in cast("list[object]", value):
                if not isinstance(one, BaseModel):
                    break  # lists are of one kind, and those of ids may be long
                yield from _unknown(one, inside + "[].")
