"""How one family of models writes reasoning and calls of tools: a description, read from data; and the parts that an answer is read into by it.

`families/*.toml` has a description for each family, and `find_format` says which one a model follows: by what its chat template spells, or by the
`response_template` that it brings. No family has code of its own: `reader` and `grammar` read descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names for what the assistant thought. Templates read one or another of them."""


class Body(StrEnum):
    """In what form a call's arguments are written."""

    OBJECT = "object"
    """One JSON object has both name and arguments."""
    JSON = "json"
    """A JSON object behind the name."""
    LAX = "lax"
    """The same with bare keys, and strings between delimiters of their own."""
    PARAMETERS = "parameters"
    """Each argument between tags of its own, strings as they are."""
    PYTHON = "python"
    """Keyword arguments of Python between parentheses."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How an argument is written between tags."""

    open: tuple[str, ...]
    key_end: tuple[str, ...]
    """Texts between key and value."""
    close: tuple[str, ...]
    pad: str = ""
    """Stands on each side of a value and is not part of it. A value that begins with it is bound to its lines: it ends with it, too."""
    string: str = ""
    """Where the tag has it behind the key, the value is a string."""
    json: str = ""
    """Where the tag has it behind the key, the value is JSON."""


@dataclass(frozen=True, slots=True)
class Written:
    """How calls are written, for a grammar: `{name}`, `{arguments}`, `{key}` and `{value}` stand for themselves."""

    call: str
    begin: str = ""
    """Before the first call."""
    between: str | None = None
    """Between two; None: there is but one."""
    end: str = ""
    """Behind the last one."""
    parameter: str = ""
    heads: tuple[str, ...] = ()
    """Other texts that a model may write between name and arguments."""
    trigger: str = ""
    """Part of `begin` and `call` that only calls have, if that is not their mark: from it on, a text is a call."""


@dataclass(frozen=True, slots=True)
class Calls:
    """One way to write calls: [begin] (open name head_end arguments close)... [end]. Blanks may stand between these."""

    body: Body
    written: Written | None = None
    begin: tuple[str, ...] = ()
    """Opens a section of calls."""
    end: tuple[str, ...] = ()
    """Closes it, where the model remembers to."""
    open: tuple[str, ...] = ()
    """Opens a call."""
    bare: bool = False
    """A call may stand without a section."""
    at_start: tuple[str, ...] = ()
    """Opens a call where nothing but blanks stands before it in the answer."""
    between: str = ""
    """Characters that may stand between calls."""
    head_end: tuple[str, ...] = ()
    """Texts between name and arguments."""
    name_prefix: tuple[str, ...] = ()
    """Texts that may stand before the name."""
    name_cut: tuple[str, ...] = ()
    """Where the name ends, if anything stands behind it and before `head_end`."""
    close: tuple[str, ...] = ()
    """Closes a call."""
    closed_head: tuple[str, ...] = ()
    """Stands in place of `head_end` and closes a call without arguments."""
    name_keys: tuple[str, ...] = ("name",)
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    delimiter: str = ""
    """Around strings in `Body.LAX`."""
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True)
class Thinking:
    """Between what a model thinks before it answers."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    anywhere: bool = False
    """Also behind the answer's start."""
    ended_by_calls: bool = False
    """A call ends it even if its mark is not a special token."""
    behind: str = ""
    """Text between the reasoning and a call, for a grammar."""


@dataclass(frozen=True, slots=True)
class Header:
    """The head of each message of an answer, for models that head their messages: [start role] [recipient] [channel name] [constraint] message.

    Each part may be missing. The recipient may stand before the channel or behind it, and the constraint with its mark or without.
    """

    start: str
    """Mark before the role. The prompt ends behind mark and role."""
    role: str
    channel: str
    constraint: str
    message: str
    """Mark between head and text."""
    ends: tuple[str, ...]
    """Marks behind the text."""
    thoughts: str
    """The channel of reasoning."""
    answers: str
    calls: str
    recipient: str = "to="
    tools: str = "functions."
    """Stands before a tool's name in a recipient."""

    def write(self, channel: str, constraint: str = "", recipient: str = "") -> str:
        """Return the head of a message, behind its role."""
        to = f" {self.recipient}{recipient}" if recipient else ""
        return f"{self.channel}{channel}{to}{f' {self.constraint}{constraint}' if constraint else ''}{self.message}"

    @property
    def marks(self) -> tuple[str, ...]:
        return self.start, self.channel, self.constraint, self.message, *self.ends

    def format(self, name: str) -> Format:
        """Return the format of a model that writes such heads."""
        turn, thought = self.start + self.role, self.write(self.thoughts)
        call = self.write(self.calls, "json", self.tools + "{name}") + "{arguments}"
        to_tool = f" {self.recipient}{self.tools}"
        heads = (
            f"{self.constraint}json{self.message}",
            self.message,
            *(self.write(self.calls, constraint) for constraint in ("json", "")),
            self.write(f"{self.calls} json"),
        )
        written = Written(call, heads=heads, trigger=to_tool)
        way = Calls(Body.JSON, written, open=(self.channel + self.calls + to_tool,), close=self.ends)
        thinking = Thinking((thought, turn + thought), self.ends[:1], anywhere=True, behind=turn)
        return Format(name, (way,), thinking, self.marks, header=self, content_begin=self.write(self.answers))


@dataclass(frozen=True, slots=True)
class Format:
    """How one model writes its answers."""

    name: str
    calls: tuple[Calls, ...] = ()
    """A grammar writes the first one, which has `written`."""
    thinking: Thinking | None = None
    skipped: tuple[str, ...] = ()
    """Marks that are no part of the content."""
    knows_tools: bool = False
    """The model's chat template renders `tools`, and the calls that it asks for can be read."""
    header: Header | None = None
    """The head of each message, for models that write several in an answer."""
    content_begin: str = ""
    """Text that a model writes before its content."""
    unread: str | None = None
    """The mark of the calls that the template asks for and no description knows; empty if it has no mark. None: it asks for none."""

    @property
    def why_unread(self) -> str | None:
        """Why the template's own calls are not used; None: they are, or it has none."""
        if self.unread is None:
            return None
        mark = f" ({self.unread})" if self.unread else ""
        return f"calls of tools in the form that the chat template asks for{mark} can't be read; tools are described to the model in plain text"

    def begins_in_reasoning(self, prompt_tail: str) -> bool:
        """Return whether the answer to this prompt begins inside an open reasoning block."""
        tail = prompt_tail.rstrip()
        return self.thinking is not None and any(tail.endswith(mark.rstrip()) for mark in self.thinking.open)


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. Its arguments follow in `CallArguments` of the same index."""

    index: int
    """Index among the calls of this answer, from 0 on."""
    name: str
    is_open: bool = field(default=False, compare=False)
    """Arguments follow: if none do, the call was cut off."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON text, whole once all pieces are joined."""

    index: int
    text: str
    is_open: bool = field(default=False, compare=False)
    """The arguments are not whole with this piece: if no other follows, the call was cut off."""


Part = Content | Reasoning | CallBegun | CallArguments
