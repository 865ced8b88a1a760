"""A model's chat template: a program of the model's maker, rendered in a sandbox.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `{% generation %}`), so a template renders the same text here as there.

The sandbox keeps a template from reaching the program, and bounds neither its time nor its memory: those are the process's that `bounded_tokenizer`
starts. So templates of models that are served are compiled and rendered there; in the server's process they are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from paceline.core.errors import InvalidRequest
from paceline.core.text import NOTHING_GIVEN, Given
from paceline.store.faults import damaged

MAX_TEMPLATE_CHARS: Final = 1 << 20
"""The longest templates have some ten thousand."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template. It is compiled when it is first rendered."""

    path: Path
    """The file it came from, for errors."""
    source: str
    """Jinja text."""
    special_tokens: Mapping[str, str]
    """What templates call `bos_token`, `eos_token` and so on."""
    response: Mapping[str, Any] | None = None
    """How answers are to be read, as the model's files say it."""

    def __post_init__(self) -> None:
        """Raise ModelFileError where it is too long."""
        if len(self.source) > MAX_TEMPLATE_CHARS:
            raise damaged(self.path, f"its chat template has {len(self.source)} characters")

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime, given: Given = NOTHING_GIVEN) -> str:
        """The text of a chat, up to where the assistant's answer begins.

        Args:
            messages: each with its content as one string.
            now: what `strftime_now` shows, however often the template asks.
            given: tools, and switches of the template's own.

        Raises:
            InvalidRequest: the template does not compile, refuses the messages, or trips over them.
        """
        try:
            template = self._compiled
        except Exception as error:  # a template is a stranger's program: it may raise anything
            raise InvalidRequest(
                f"the model's chat template does not compile ({_words(error)})",
                "Use /v1/completions, or get the model's files again (`paceline pull`)",
                field="messages",
            ) from error
        try:
            own = {
                "messages": messages,
                "add_generation_prompt": not given.continues,
                "tools": list(given.tools) or None,
                "strftime_now": now.strftime,
            }
            return template.render({**self.special_tokens, **given.switches, **own})
        except Exception as error:  # likewise
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {_words(error)}",
                "Give each message a role and a text content, in the order the model knows (system, user, assistant, ...)",
                field="messages",
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.source, globals={"raise_exception": _raise_exception})


def _words(error: Exception) -> str:
    """What an error says; a lack of memory says nothing."""
    return str(error) or type(error).__name__


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text parts joined: most templates know only strings."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for part in cast("list[Any]", content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise InvalidRequest("a message has a content part that is not text", "Send text parts only", field="messages")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own `tojson` escapes HTML, which a model should not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here the body is just rendered."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
