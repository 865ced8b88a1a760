"""What an answer is made of, once its text was read: what a client shows, what the model thought, and the tools it calls."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Of the calls of this answer, from 0 on."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON text, whole once all pieces are joined."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments
