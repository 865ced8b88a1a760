"""Writes recursion that only repeats as repetition, and repetitions in each other as one: each text is then read in one way, and masks are made quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from paceline.server.formats.expressions import Alternation, Expression, Reference, Repeat, Rules, Sequence, in_order, n_letters, references

_EMPTY: Final = Sequence(())
_LETTERS: Final = 60
"""Maximum number of letters of a rule that is written out within a repetition. Raising it: rules grow, and fewer repetitions stand in each other."""


def without_tail_calls(name: str, rule: Expression) -> Expression:
    """Return a rule that refers to itself at the end of its ways, or at their beginning, without these references: `a ::= x a | y` is `x* y`."""
    before: list[Expression] = []
    behind: list[Expression] = []
    bases: list[Expression] = []
    own = Reference(name)
    for way in _ways(rule):
        parts = way.parts if isinstance(way, Sequence) else (way,)
        if name not in references(way):
            bases.append(way)
        elif way == own:
            continue
        elif parts[-1] == own and name not in references(Sequence(parts[:-1])):
            before.append(in_order(parts[:-1]))
        elif parts[0] == own and name not in references(Sequence(parts[1:])):
            behind.append(in_order(parts[1:]))
        else:
            return rule
    if (before and behind) or not (before or behind) or not bases:
        return rule
    loop, base = Repeat(_one_of(before or behind), 0, None), _one_of(bases)
    return in_order((loop, base) if before else (base, loop))


def with_flat_loops(rule: Expression, rules: Rules) -> Expression:
    """Return a rule in which no repetition without a limit repeats another one: `(x+ | y)*` is `(x | y)*`.

    Args:
        rules: those that it may refer to. The ways through them are written out where they are repeated.
    """
    match rule:
        case Sequence(parts):
            return in_order([with_flat_loops(part, rules) for part in parts])
        case Alternation(parts):
            return Alternation(tuple(with_flat_loops(part, rules) for part in parts))
        case Repeat(part, least, None):
            ways = list[Expression]()
            for way in _ways(with_flat_loops(part, rules)):
                known = rules.get(way.name) if isinstance(way, Reference) else None
                if isinstance(known, Alternation | Repeat) and n_letters(known) <= _LETTERS:
                    ways += _ways(with_flat_loops(known, {}))
                else:
                    ways.append(way)
            is_empty = any(way == _EMPTY or (isinstance(way, Repeat) and way.most is None and way.least == 0) for way in ways)
            flat = [way.part if isinstance(way, Repeat) and way.most is None and way.least < 2 else way for way in ways]
            ways = [inner for way in flat for inner in _ways(way) if inner != _EMPTY]
            return Repeat(_one_of(ways), 0 if is_empty else least, None) if ways else _EMPTY
        case Repeat(part, least, most):
            return Repeat(with_flat_loops(part, rules), least, most)
        case _:
            return rule


def _ways(rule: Expression) -> Iterator[Expression]:
    """Yield the ways through a rule: what its choices choose from, and the empty one."""
    match rule:
        case Alternation(parts):
            for part in parts:
                yield from _ways(part)
        case Repeat(part, 0, 1):
            yield _EMPTY
            yield from _ways(part)
        case _:
            yield rule


def _one_of(ways: list[Expression]) -> Expression:
    return ways[0] if len(ways) == 1 else Alternation(tuple(dict.fromkeys(ways)))
