"""A model's chat template, rendered in a sandbox: templates come with downloads and are code.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `{% generation %}`), so a template renders the same text here as there.

A template's loops and texts are bounded as its reach is. Every loop's turn, call and filter costs a little of one render's allowance, and what they
make costs by its size. A chat of a hundred thousand messages stays within it; what loops for ever, or doubles a text until memory is full, is cut off
after a few seconds. Rendering holds the interpreter, so without an end it would hold up every stream, and Ctrl-C too.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from paceline.core.errors import InvalidRequest
from paceline.store.faults import damaged

ALLOWANCE: Final = 10_000_000
"""Steps of one render: some seconds. Raising it lets a template that never ends hold up everyone for longer."""
_PER_STEP: Final = 64
"""Characters that cost as much as one step: C code walks them."""
_ITEM: Final = 64
"""What an item of a list costs, in characters: some filters call Python for each."""
_MOST_BITS: Final = 1 << 14
"""Of a number that is multiplied: the time that takes grows faster than its size."""
_CALL: Final = 16 * _PER_STEP
"""What a call or a filter costs, as the size of a text: the sandbox looks at each."""
_WIDEST: Final = 1_000_000
"""Largest number a call or filter may be given: a width or a count, not a size of memory."""
_TOO_LARGE: Final = "it asks for a text or a number larger than any chat needs"
_WIDE_FORMAT: Final = re.compile(r"\d{7}|%[^a-zA-Z%]*\*")


class _Generator(jinja2.compiler.CodeGenerator):
    """Counts the turns of loops, also of those a loop's condition skips, and what `~` joins."""

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        """Compile a loop."""
        # Lines of code and not nodes: a node could only call through the sandbox, and a loop's turn would cost ten times as much.
        self._bodies = {*getattr(self, "_bodies", ()), id(node.body)}
        self._tests = {*getattr(self, "_tests", ()), id(node.test)} - {id(None)}
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        """Compile a block."""
        if id(nodes) in getattr(self, "_bodies", ()):
            self.writeline("environment.spend()")
        super().blockvisit(nodes, frame)

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Compile anything."""
        if id(node) in getattr(self, "_tests", ()):
            self.write("environment.spend() and ")
        return super().visit(node, *args, **kwargs)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """Compile a `~`."""
        self.write("environment.made(")
        super().visit_Concat(node, frame)
        self.write(")")


class BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose renders end. One render a thread at a time."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        """As Jinja's. Filters added later should go through `counted`."""
        super().__init__(finalize=self.made, **options)
        self._allowance = threading.local()
        self.filters = {name: self.counted(filter_) for name, filter_ in self.filters.items()}

    def begin(self) -> None:
        """A render of this thread begins: its allowance is whole."""
        self._allowance.left = ALLOWANCE

    def spend(self, size: int = 0) -> bool:
        """Take one step, and as many more as something of this size costs. Always true, so that a condition may ask."""
        left: int = getattr(self._allowance, "left", ALLOWANCE) - 1 - size // _PER_STEP
        self._allowance.left = left
        if left < 0:
            raise jinja2.TemplateRuntimeError("it does not end, or writes more than any chat needs")
        return True

    def made(self, value: Any) -> Any:
        """Pay for what was made."""
        self.spend(_size(value))
        return value

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call what a template calls."""
        owner: Any = getattr(obj, "__self__", None)
        self._check((owner, *args, *kwargs.values()), getattr(obj, "__name__", ""))
        return self.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Add, multiply, raise or format."""
        match operator, left, right:
            case "%", str(), _:
                self._check((left, right), "format")
            case "*", int(), int() if left.bit_length() + right.bit_length() > _MOST_BITS:
                raise jinja2.TemplateRuntimeError(_TOO_LARGE)
            case "**", int(), int() if left.bit_length() * abs(right) > _MOST_BITS:
                raise jinja2.TemplateRuntimeError(_TOO_LARGE)
            case "*", _, int():
                self.spend(_size(left) * max(right, 0))
            case "*", int(), _:
                self.spend(max(left, 0) * _size(right))
            case _:
                pass
        return self.made(super().call_binop(context, operator, left, right))

    def counted(self, filter_: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for what it does."""

        @functools.wraps(filter_)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._check((*args, *kwargs.values()), filter_.__name__.removeprefix("do_"))
            return self.made(filter_(*args, **kwargs))

        return counted

    def _check(self, given: tuple[Any, ...], name: str) -> None:
        """Pay for what a function walks, and refuse what would make more than it can be charged for."""
        texts = [value for value in given if isinstance(value, str)]
        self.spend(_CALL + sum(map(_size, given)))
        if any(isinstance(value, int) and abs(value) > _WIDEST for value in given) or (
            name in {"format", "format_map"} and any(map(_WIDE_FORMAT.search, texts))
        ):
            raise jinja2.TemplateRuntimeError(_TOO_LARGE)
        match name, texts:
            case "replace", [text, old, new, *_]:
                self.spend(text.count(old) * len(new))
            case "join", [separator, *_]:
                self.spend(len(separator) * max(map(_size, given)))
            case _:
                pass


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return _ITEM * len(cast("Sized", value)) if isinstance(value, list | tuple | dict | set | range) else 0


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
