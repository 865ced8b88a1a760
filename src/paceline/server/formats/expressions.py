"""Expressions that the rules of a grammar consist of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

Spans = tuple[tuple[int, int], ...]
"""First and last letters, sorted, that do not touch."""


@dataclass(frozen=True, slots=True)
class Letters:
    """One of some letters."""

    spans: Spans


@dataclass(frozen=True, slots=True)
class Reference:
    """The text that another rule allows."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """All parts, one behind the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of several parts."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, several times. `most` None: without a limit."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A pattern that the lexer reads, not empty. Only in rules that `followed_rules` returns."""

    part: Expression


Expression = Letters | Reference | Sequence | Alternation | Repeat | Lexeme
Rules = Mapping[str, Expression]


def in_order(parts: Collection[Expression]) -> Expression:
    """Return parts one behind the other, without those that are always empty."""
    found = tuple(part for part in parts if part != Sequence(()))
    return found[0] if len(found) == 1 else Sequence(found)


def references(rule: Expression) -> Iterator[str]:
    match rule:
        case Reference(name):
            yield name
        case Sequence(parts) | Alternation(parts):
            for part in parts:
                yield from references(part)
        case Repeat(part):
            yield from references(part)
        case _:
            pass


def is_pattern(rule: Expression) -> bool:
    """Return whether an expression refers to no rule and has no lexeme."""
    match rule:
        case Sequence(parts) | Alternation(parts):
            return all(map(is_pattern, parts))
        case Repeat(part):
            return is_pattern(part)
        case _:
            return isinstance(rule, Letters)


def lexemes(rule: Expression) -> Iterator[Expression]:
    """Yield the patterns of a rule's lexemes, in the order of the text."""
    match rule:
        case Lexeme(part):
            yield part
        case Sequence(parts) | Alternation(parts):
            for part in parts:
                yield from lexemes(part)
        case Repeat(part):
            yield from lexemes(part)
        case _:
            pass


def mapped(rule: Expression, of_leaf: Callable[[Expression], Expression]) -> Expression:
    """Return a rule with other letters, references and lexemes. They are asked for in the order of the text."""
    match rule:
        case Sequence(parts):
            return Sequence(tuple(mapped(part, of_leaf) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(mapped(part, of_leaf) for part in parts))
        case Repeat(part, least, most):
            return Repeat(mapped(part, of_leaf), least, most)
        case _:
            return of_leaf(rule)


def n_letters(part: Expression) -> int:
    match part:
        case Sequence(parts) | Alternation(parts):
            return sum(map(n_letters, parts))
        case Repeat(inner) | Lexeme(inner):
            return n_letters(inner)
        case _:
            return 1


def may_be_empty(part: Expression) -> bool:
    match part:
        case Sequence(parts):
            return all(map(may_be_empty, parts))
        case Alternation(parts):
            return any(map(may_be_empty, parts))
        case Repeat(inner, least):
            return least == 0 or may_be_empty(inner)
        case _:
            return False


def starts_of(parts: tuple[Expression, ...]) -> list[int]:
    """Return the number of the first letter of each part."""
    starts, number = list[int](), 0
    for part in parts:
        starts.append(number)
        number += n_letters(part)
    return starts
