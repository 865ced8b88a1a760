"""Jinja's sandbox with an end: a template comes with a download, and its loops and texts are bounded as its reach is.

Every loop's turn, call and filter costs a little of one render's allowance, and what they make costs by its size. A chat of a
hundred thousand messages stays within it; what loops for ever, or doubles a text until memory is full, is cut off after a few seconds.
Rendering holds the interpreter, so without an end it would hold up every stream, and Ctrl-C too.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Sized
from typing import Any, Final, cast

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

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
