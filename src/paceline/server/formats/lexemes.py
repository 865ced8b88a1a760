"""Decides which parts of a recursive grammar a lexer may read, so that reading loses no text of the grammar.

The matcher's lexer reads one of the lexemes that may come next, and reads on as long as one of them may go on. So a lexeme is exact if behind none of its
texts a letter can follow that continues it, or another lexeme that could stand in its place. At first each run of parts without recursion is one lexeme:
the fewer there are, the faster a mask is made. Then every lexeme that reads too far is cut where it does, until none does: lexemes of one letter never do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Final

from paceline.server.formats.expressions import (
    Alternation,
    Expression,
    Lexeme,
    Reference,
    Repeat,
    Rules,
    Sequence,
    in_order,
    is_pattern,
    mapped,
    may_be_empty,
    n_letters,
    references,
    starts_of,
)
from paceline.server.formats.loops import with_flat_loops, without_tail_calls
from paceline.server.formats.overruns import Automaton, Edges, Effort, GreedyReading, NotFollowed


@dataclass(frozen=True)
class Followed:
    """Rules as the matcher should have them."""

    rules: Rules
    root: str
    is_regular: bool
    """No rule recurs: the root is one pattern, and there are no lexemes."""


_LETTERS: Final = 60
"""Letters of a lexeme at first, or of a rule that is part of one. Raising it: fewer lexemes, and comparing two of them takes longer."""
_DEPTH: Final = 60
"""Expressions in each other in such a rule. Raising it: the functions that walk an expression need more stack."""
_OPTIONAL: Final = 8
"""Parts of one lexeme that may all be missing. Raising it: fewer lexemes, which grow with its square."""


def followed_rules(rules: Rules, root: str) -> Followed:
    """Divide rules into lexemes.

    Args:
        rules: without lexemes; they define each name that they refer to.

    Raises:
        NotFollowed: a rule never ends, or the rules take too much work.
    """
    rules, work = _reached(rules, root), Effort()
    _check_ends(rules, work)
    rules = {name: without_tail_calls(name, rule) for name, rule in rules.items()}
    if root in _patterns(rules, None):
        return Followed(rules, root, is_regular=True)
    inlined: dict[str, Expression] = {}

    def inline(leaf: Expression) -> Expression:
        return inlined.get(leaf.name, leaf) if isinstance(leaf, Reference) else leaf

    for name in _patterns(rules, _LETTERS):
        inlined[name] = mapped(rules[name], inline)
    recursive = {name: mapped(rule, inline) for name, rule in rules.items() if name not in inlined}
    flat = _reached({name: with_flat_loops(rule, recursive) for name, rule in recursive.items()}, root)
    divided = {name: _divided(rule) for name, rule in flat.items()}
    while overruns := GreedyReading(divided, root, work).overruns():
        cuts = (overruns.get(number, frozenset()) for number in count())

        def cut(leaf: Expression, cuts: Iterator[Edges] = cuts) -> Expression:
            return _cut(leaf.part, next(cuts)) if isinstance(leaf, Lexeme) else leaf

        divided = {name: mapped(rule, cut) for name, rule in divided.items()}
    return Followed(divided, root, is_regular=False)


def _reached(rules: Rules, root: str) -> Rules:
    found, waiting = {root: rules[root]}, [root]
    while waiting:
        for name in references(rules[waiting.pop()]):
            if name not in found:
                found[name] = rules[name]
                waiting.append(name)
    return found


def _check_ends(rules: Rules, work: Effort) -> None:
    ended = set[str]()

    def ends(rule: Expression) -> bool:
        match rule:
            case Reference(name):
                return name in ended
            case Sequence(parts):
                return all(map(ends, parts))
            case Alternation(parts):
                return any(map(ends, parts))
            case Repeat(part, least):
                return least == 0 or ends(part)
            case _:
                return True

    left = list(rules)
    while left:
        work.rule = left[0]
        work.spend(sum(n_letters(rules[name]) + 1 for name in left))
        ended.update(name for name in reversed(left) if ends(rules[name]))
        if not ended.intersection(left):
            raise NotFollowed(f"rule {left[0][:50]} never ends: every way through it needs itself, or a rule that never ends, again")
        left = [name for name in left if name not in ended]


def _patterns(rules: Rules, most: int | None) -> list[str]:
    """Return the rules without recursion, each behind those that it refers to; with `most`, those of no more letters and of bounded depth."""
    waiting = {name: set(references(rule)) for name, rule in rules.items()}
    users = defaultdict[str, list[str]](list)
    for name, used in waiting.items():
        for each in used:
            users[each].append(name)
    ready = [name for name, used in waiting.items() if not used]
    sizes: dict[str, tuple[int, int]] = {}

    def size(rule: Expression) -> tuple[int, int]:
        match rule:
            case Reference(name):
                return sizes[name]
            case Sequence(parts) | Alternation(parts):
                inner = [size(part) for part in parts]
                return sum(letters for letters, _ in inner), 1 + max((depth for _, depth in inner), default=0)
            case Repeat(part):
                letters, depth = size(part)
                return letters, 1 + depth
            case _:
                return 1, 1

    while ready:
        name = ready.pop()
        letters, depth = size(rules[name]) if most is not None else (0, 0)
        if most is not None and (letters > most or depth > _DEPTH):
            continue
        sizes[name] = letters, depth
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)
    return list(sizes)


def _divided(rule: Expression) -> Expression:
    """Return a rule with a lexeme for each run of parts without recursion."""
    if n_letters(rule) <= _LETTERS and is_pattern(rule):
        return _lexeme(rule)
    match rule:
        case Sequence(parts):
            found: list[Expression] = []
            run, size = list[Expression](), 0
            for part in parts:
                letters = n_letters(part)
                fits = letters <= _LETTERS and is_pattern(part)
                if run and not (fits and size + letters <= _LETTERS):
                    found.append(_lexeme(in_order(run)))
                    run, size = [], 0
                if fits:
                    run.append(part)
                    size += letters
                else:
                    found.append(_divided(part))
            found.append(_lexeme(in_order(run)))
            return in_order(found)
        case Alternation(parts):
            return Alternation(tuple(map(_divided, parts)))
        case Repeat(part, least, most):
            return Repeat(_divided(part), least, most)
        case _:
            return rule


def _lexeme(part: Expression) -> Expression:
    """Return a pattern as a lexeme, which may be missing if the pattern may be empty."""
    if not may_be_empty(part):
        return Lexeme(part)
    if isinstance(part, Sequence) and len(part.parts) > _OPTIONAL:
        return in_order([_lexeme(each) for each in part.parts])
    rest = _not_empty(part)
    return Sequence(()) if rest is None else Repeat(Lexeme(rest), 0, 1)


def _not_empty(part: Expression) -> Expression | None:
    """Return a pattern without the empty text. None: it has no other."""
    if not may_be_empty(part):
        return part
    match part:
        case Sequence(parts):
            heads = [(number, _not_empty(each)) for number, each in enumerate(parts)]
            ways = [Sequence((head, *parts[number + 1 :])) for number, head in heads if head is not None]
        case Alternation(parts):
            ways = [way for way in map(_not_empty, parts) if way is not None]
        case Repeat(inner, _, most):
            rest = _not_empty(inner)
            ways = [] if rest is None else [Repeat(rest, 1, most)]
        case _:
            raise AssertionError("such a part is never empty")
    return None if not ways else ways[0] if len(ways) == 1 else Alternation(tuple(ways))


def _cut(part: Expression, edges: Edges) -> Expression:
    """Return a pattern as lexemes that end where it read too far."""
    if not edges:
        return _lexeme(part)
    match part:
        case Sequence(parts):
            starts = starts_of(parts)
            cuts, inner = set[int](), defaultdict[int, set[tuple[int, int]]](set)
            for before, after in edges:
                first, last = _place(starts, before), _place(starts, after)
                if first == last:
                    cuts |= {first, first + 1}
                    inner[first].add((before - starts[first], after - starts[first]))
                elif first < last:
                    cuts.add(last)
            ends = sorted(cuts | {0, len(parts)})
            runs = [(begin, parts[begin:end]) for begin, end in pairwise(ends)]
            return in_order([_cut(run[0], inner[begin]) if inner[begin] else _lexeme(in_order(run)) for begin, run in runs])
        case Alternation(parts):
            starts = starts_of(parts)
            within = defaultdict[int, set[tuple[int, int]]](set)
            for before, after in edges:
                place = _place(starts, before)
                if place == _place(starts, after):
                    within[place].add((before - starts[place], after - starts[place]))
            return Alternation(tuple(_cut(each, within[place]) for place, each in enumerate(parts)))
        case Repeat(inner_part, least, most):
            automaton = Automaton(inner_part, Effort())
            ends_at = {automaton.number[position] for position in automaton.last}
            begins_at = {automaton.number[position] for position in automaton.first}
            return Repeat(_cut(inner_part, {(i, j) for i, j in edges if i not in ends_at or j not in begins_at}), least, most)
        case _:
            return Lexeme(part)


def _place(starts: list[int], number: int) -> int:
    return bisect_right(starts, number) - 1
