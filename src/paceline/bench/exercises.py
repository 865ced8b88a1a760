"""The texts that drafts are measured on, and an executor that forces a model to answer with them.

The texts are chats of four kinds, each with a real answer. A file of `texts/` is one chat: `=== role` on a line of its own begins a message. The last
message, the assistant's, is the answer. The texts were written for this purpose, so no other licence applies to them.

The executor runs the whole model, and then raises the logit of the wanted token above all others. The speed of a small model is thus measured on text
that only a large model would write. A row's wanted token depends on its position alone, as a model's own would where a draft is right; rows behind a
wrong token are not read.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from paceline.core.ids import SequenceId
from paceline.core.text import Tokenizer
from paceline.engine.executor import Executor, StepBatch, StepOutput

_MESSAGE = re.compile(r"^=== (system|user|assistant)\n", re.MULTILINE)


class ExerciseKind(StrEnum):
    """Kind of a text. The first two repeat much of their earlier text, the last one hardly anything."""

    CODE_EDIT = "code-edit"
    AGENT = "agent"
    SUMMARY = "summary"
    PROSE = "prose"


@dataclass(frozen=True, slots=True)
class ExerciseMessage:
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
        """Return the ids of the chat up to the answer. Variants differ in a few words at the beginning, so that no two sequences are alike."""
        chat = [{"role": message.role, "content": message.content} for message in self.messages]
        if variant:
            chat[0]["content"] += f" This is request {variant + 1}."
        return tuple(tokenizer.render_chat(chat))

    def answer_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of the answer and its end token."""
        return (*tokenizer.encode_inside(self.answer), min(tokenizer.eos_ids))


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
    """Load all exercises of a kind, in the order of their names."""
    found = [file for file in files("paceline.bench").joinpath("texts").iterdir() if file.name.startswith(f"{kind}-")]
    return [parse(kind, file.name.removesuffix(".txt"), file.read_text("utf-8")) for file in sorted(found, key=lambda file: file.name)]


CERTAIN = 1e30
"""A logit above any model's, and finite."""


@dataclass(frozen=True, slots=True)
class Script:
    """Forced answer of one sequence."""

    first_position: int
    """Where its answer begins: the length of its prompt."""
    token_ids: tuple[int, ...]
    """Forced tokens, including the end token. Positions beyond them get the end token again."""

    def at(self, position: int) -> int:
        return self.token_ids[min(position - self.first_position, len(self.token_ids) - 1)]


class ForcedExecutor:
    """An `Executor` that wraps another one. Without scripts it changes nothing."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._scripts: Sequence[Script] = ()
        self._first: SequenceId | None = None
        self._pending: deque[StepBatch] = deque()

    def begin(self, scripts: Sequence[Script]) -> None:
        """Set the scripts of the sequences that arrive from now on, in order of arrival; without scripts the model answers freely. No sequence may be live."""
        self._scripts, self._first = scripts, None

    def __getattr__(self, name: str) -> Any:
        """Forward every other attribute to the inner executor."""
        return getattr(self._inner, name)

    def submit(self, batch: StepBatch) -> None:
        if self._first is None and batch.steps:
            # Ids count up in the order of arrival, and sequences are admitted in that order.
            self._first = min(step.sequence for step in batch.steps)
        self._pending.append(batch)
        self._inner.submit(batch)

    def collect(self, deadline: float) -> StepOutput | None:
        output = self._inner.collect(deadline)
        batch = self._pending.popleft()
        if output is not None and self._scripts and self._first is not None:
            row = 0
            for step in batch.steps:
                script = self._scripts[step.sequence - self._first]
                for place in step.logits_rows:
                    output.logits_RV[row, script.at(step.first_position + place + 1)] = CERTAIN
                    row += 1
        return output

    def reset(self) -> None:
        self._pending.clear()
        self._inner.reset()
