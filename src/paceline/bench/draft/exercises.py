"""The texts that drafts are measured on: chats of four kinds, each with a real answer.

A file of `texts/` is one chat: `=== role` on a line of its own begins a message, and the last one, the assistant's, is the answer. They
were written for this, so no other licence is on them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files

from paceline.core.text import Tokenizer

_MESSAGE = re.compile(r"^=== (system|user|assistant)\n", re.MULTILINE)


class ExerciseKind(StrEnum):
    """What a text is. The first two repeat much of what was said before, the last one hardly anything."""

    CODE_EDIT = "code-edit"
    AGENT = "agent"
    SUMMARY = "summary"
    PROSE = "prose"


@dataclass(frozen=True, slots=True)
class ExerciseMessage:
    """Of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Exercise:
    """A chat, and how it goes on."""

    kind: ExerciseKind
    name: str
    messages: tuple[ExerciseMessage, ...]
    answer: str

    def prompt_ids(self, tokenizer: Tokenizer, variant: int = 0) -> tuple[int, ...]:
        """The chat, ready for the answer. Variants differ in a few words at the beginning, so that no two sequences are alike."""
        chat = [{"role": message.role, "content": message.content} for message in self.messages]
        if variant:
            chat[0]["content"] += f" This is request {variant + 1}."
        return tuple(tokenizer.render_chat(chat))

    def answer_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The answer and its end."""
        return (*tokenizer.encode(self.answer, add_special=False), min(tokenizer.eos_ids))


def parse(kind: ExerciseKind, name: str, text: str) -> Exercise:
    """Read a file of `texts/`.

    Raises:
        ValueError: it does not end with an answer.
    """
    parts = _MESSAGE.split(text)
    messages = [ExerciseMessage(role, content.strip("\n")) for role, content in zip(parts[1::2], parts[2::2], strict=True)]
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise ValueError(f"{name} does not end with the assistant's answer")
    return Exercise(kind, name, tuple(messages[:-1]), messages[-1].content)


def load(kind: ExerciseKind) -> list[Exercise]:
    """All of a kind, in the order of their names."""
    found = [file for file in files("paceline.bench.draft").joinpath("texts").iterdir() if file.name.startswith(f"{kind}-")]
    return [parse(kind, file.name.removesuffix(".txt"), file.read_text("utf-8")) for file in sorted(found, key=lambda file: file.name)]
