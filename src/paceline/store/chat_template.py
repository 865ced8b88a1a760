"""A model's chat template, rendered in a sandbox: templates come with downloads and are code.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `{% generation %}`), so a template renders the same text here as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from paceline.core.errors import InvalidRequest
from paceline.store.faults import damaged
from paceline.store.template_sandbox import BoundedSandbox

MAX_TEMPLATE_CHARS: Final = 1 << 20
"""The longest templates have some ten thousand."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, path: Path, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            path: the file it came from, for errors.
            source: Jinja text.
            special_tokens: what templates call `bos_token`, `eos_token` and so on.

        Raises:
            ModelFileError: the template does not compile.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise damaged(path, f"its chat template has {len(source)} characters")

        self.source = source
        self.special_tokens: Mapping[str, str] = dict(special_tokens)
        environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = environment.counted(_to_json)
        try:
            self._template = environment.from_string(source, globals={"raise_exception": _raise_exception})
            self._environment = environment
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise damaged(path, f"its chat template does not compile ({error})") from error

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime) -> str:
        """The text of a chat, up to where the assistant's answer begins.

        Args:
            messages: each with its content as one string.
            now: what `strftime_now` shows, however often the template asks.

        Raises:
            InvalidRequest: the template refuses the messages, or trips over them.
        """
        self._environment.begin()
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, strftime_now=now.strftime, **self.special_tokens
            )
        except Exception as error:  # a template is a stranger's program: it may raise anything
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}",
                "Give each message a role and a text content, in the order the model knows (system, user, assistant, ...)",
                field="messages",
            ) from error


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
