"""Finds where lexemes read too far: behind which of their letters a lexer would go on where the grammar may need it to end.

The sets of letters and lexemes are those of Glushkov's construction. They may hold too much where a rule is used in several places, never too little.
Letters are compared by their first bytes, since the lexer decides at each byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import count
from operator import or_
from typing import Final

from paceline.server.formats.expressions import (
    Alternation,
    Expression,
    Letters,
    Lexeme,
    Reference,
    Repeat,
    Rules,
    Sequence,
    Spans,
    lexemes,
    starts_of,
)

_COPIES: Final = 256
"""Letters of a counted part that is written out, to compare it; a longer one is compared as if its count had no limit."""
_WORK: Final = 500_000
"""Steps of some three microseconds. Raising it: larger grammars are followed, and a hostile one takes longer to be refused."""

Edges = AbstractSet[tuple[int, int]]
"""Pairs of letters of a lexeme, by their numbers: between the two it reads too far."""


class NotFollowed(ValueError):
    """A grammar can't be followed. Its text names the rule."""


class Effort:
    """Counts steps, and compares parts once."""

    def __init__(self) -> None:
        self._left = _WORK
        self.rule = ""
        """The rule that is looked at."""
        self.automata: dict[Expression, Automaton] = {}
        self.compared: dict[tuple[int, int], _Comparison] = {}
        """By the numbers of the automata."""

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise NotFollowed(f"rule {self.rule[:50]} has too many parts that may begin alike, next to recursion")


class Automaton:
    """Glushkov's automaton of a pattern: its positions are its letters, and those of counted parts several times."""

    def __init__(self, part: Expression, work: Effort) -> None:
        self._work = work
        self.letters: list[Spans] = []
        self.number: list[int] = []
        """By position: the letter's number in the pattern."""
        self.follow: list[set[int]] = []
        self.first, self.last, _ = self._add(part, 0)
        self.begins = _union(_first_bytes(self.letters[position]) for position in self.first)

    def _add(self, part: Expression, number: int) -> tuple[set[int], set[int], bool]:
        """Add a part's positions. Returns the first ones, the last ones, and whether the part may be empty."""
        match part:
            case Letters(spans):
                self._work.spend()
                self.letters.append(spans)
                self.number.append(number)
                self.follow.append(set())
                return {len(self.letters) - 1}, {len(self.letters) - 1}, False
            case Sequence(parts):
                first, last, is_empty = set[int](), set[int](), True
                for start, each in zip(starts_of(parts), parts, strict=True):
                    begins, ends, may_miss = self._add(each, number + start)
                    self._link(last, begins)
                    first |= begins if is_empty else set()
                    last = last | ends if may_miss else ends
                    is_empty = is_empty and may_miss
                return first, last, is_empty
            case Alternation(parts):
                added = [self._add(each, number + start) for start, each in zip(starts_of(parts), parts, strict=True)]
                return set().union(*(a for a, _, _ in added)), set().union(*(b for _, b, _ in added)), any(c for _, _, c in added)
            case Repeat(inner, least, most):
                return self._add_repeat(inner, least, most, number)
            case _:
                raise AssertionError(f"{part} is not a pattern")

    def _add_repeat(self, inner: Expression, least: int, most: int | None, number: int) -> tuple[set[int], set[int], bool]:
        n_before = len(self.letters)
        first, ends, may_miss = self._add(inner, number)
        copies = max(1, least) if most is None else most
        if copies * (len(self.letters) - n_before) > _COPIES:
            copies, least, most = 1, min(least, 1), None
        begins, last = first, set(ends) if may_miss or least <= 1 else set[int]()
        before = ends
        for copy in range(2, copies + 1):
            begins, ends, _ = self._add(inner, number)
            self._link(before, begins)
            first = first | begins if may_miss else first
            last |= ends if may_miss or copy >= least else set()
            before = before | ends if may_miss else ends
        if most is None:
            self._link(before, begins)
        return first, last, least == 0 or may_miss

    def _link(self, before: set[int], after: set[int]) -> None:
        self._work.spend(len(before) * len(after))
        for position in before:
            self.follow[position] |= after


@dataclass(frozen=True)
class _Comparison:
    """Two patterns, of which the first ends where the second goes on."""

    meet: bool
    """A text is of both."""
    beyond: Mapping[tuple[int, int], int]
    """Edges of the second behind texts of the first, and the bytes that take them there."""


def _compare(one: Automaton, other: Automaton, work: Effort) -> _Comparison:
    meet, beyond = False, defaultdict[tuple[int, int], int](int)
    waiting = [(p, q) for p in one.first for q in other.first]
    seen = set[tuple[int, int]]()
    while waiting:
        work.spend()
        p, q = pair = waiting.pop()
        if pair in seen or not _overlap(one.letters[p], other.letters[q]):
            continue
        seen.add(pair)
        after = other.follow[q]
        if p in one.last:
            meet = meet or q in other.last
            for position in after:
                beyond[other.number[q], other.number[position]] |= _first_bytes(other.letters[position])
        work.spend(len(after) * len(one.follow[p]))
        waiting += [(p2, q2) for p2 in one.follow[p] for q2 in after]
    return _Comparison(meet, beyond)


def _overlap(one: Spans, other: Spans) -> bool:
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False


@lru_cache(1024)
def _first_bytes(spans: Spans) -> int:
    """Return a bit for each byte that one of the letters begins with."""
    found = 0
    for span in spans:
        low, high = (chr(code).encode()[0] for code in span)
        found |= (1 << high + 1) - (1 << low)
    return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class GreedyReading:
    """Finds which lexemes may stand next to each other, and in each other's place. Sets of lexemes are integers, with a bit for each."""

    def __init__(self, rules: Rules, root: str, work: Effort) -> None:
        self._rules, self._root, self._work = rules, root, work
        self._automata: list[Automaton] = []
        self._rule_of: list[str] = []
        self._next: list[int] = []
        """By lexeme: which may follow it."""
        self._known: dict[str, tuple[int, int, bool]] = dict.fromkeys(rules, (0, 0, False))
        """By rule: the first lexemes, the last ones, and whether it may be empty."""
        for name, rule in rules.items():
            for part in lexemes(rule):
                self._number(name, part)
        while self._look():
            pass
        self._look(links=True)

    def _number(self, rule: str, part: Expression) -> None:
        automaton = self._work.automata.get(part)
        if automaton is None:
            self._work.rule = rule
            automaton = self._work.automata[part] = Automaton(part, self._work)
        self._automata.append(automaton)
        self._rule_of.append(rule)
        self._next.append(0)

    def _look(self, *, links: bool = False) -> bool:
        """Go over all rules once. Returns whether more is known of one."""
        numbers, is_new = count(), False
        for name, rule in self._rules.items():
            self._work.rule = name
            found = self._ends(rule, numbers, links=links)
            is_new = is_new or found != self._known[name]
            self._known[name] = found
        return is_new

    def _ends(self, rule: Expression, numbers: Iterator[int], *, links: bool) -> tuple[int, int, bool]:
        self._work.spend(4)
        match rule:
            case Lexeme():
                bit = 1 << next(numbers)
                return bit, bit, False
            case Reference(name):
                return self._known[name]
            case Sequence(parts):
                first, last, is_empty = 0, 0, True
                for part in parts:
                    begins, ends, may_miss = self._ends(part, numbers, links=links)
                    self._link(last if links else 0, begins)
                    first |= begins if is_empty else 0
                    last = last | ends if may_miss else ends
                    is_empty = is_empty and may_miss
                return first, last, is_empty
            case Alternation(parts):
                found = [self._ends(part, numbers, links=links) for part in parts]
                return _union(a for a, _, _ in found), _union(b for _, b, _ in found), any(c for _, _, c in found)
            case Repeat(part, least, most):
                begins, ends, may_miss = self._ends(part, numbers, links=links)
                self._link(ends if links and most != 1 else 0, begins)
                return begins, ends, least == 0 or may_miss
            case Letters():
                raise AssertionError("letters are in lexemes")

    def _link(self, before: int, after: int) -> None:
        for lexeme in _bits(before):
            self._work.spend()
            self._next[lexeme] |= after

    def overruns(self) -> dict[int, set[tuple[int, int]]]:
        """Return where lexemes read too far, by the lexeme's number in the order of the text."""
        self._work.spend(sum(after.bit_count() for after in self._next))
        behind = [_union(self._automata[each].begins for each in _bits(after)) for after in self._next]
        alike = defaultdict[int, int](int)
        """By the number of an automaton: its lexemes."""
        for number, automaton in enumerate(self._automata):
            alike[id(automaton)] |= 1 << number
        together = [0] * len(self._next)
        """By lexeme: the lexemes that could stand in its place."""
        waiting = defaultdict[int, int](int)
        """By lexeme: those in `together` that are not compared with it yet."""

        def add(ones: int, others: int) -> None:
            for one in _bits(ones):
                self._work.spend()
                if new := others & ~together[one]:
                    together[one] |= new
                    waiting[one] |= new

        start = self._known[self._root][0]
        add(start, start)
        cuts = defaultdict[int, dict[tuple[int, int], int]](dict)
        while waiting:
            one, others = waiting.popitem()
            self._work.rule = self._rule_of[one]
            while others:
                other = self._automata[(others & -others).bit_length() - 1]
                same = others & alike[id(other)]
                others ^= same
                compared = self._comparison(self._automata[one], other)
                for edge, begins in compared.beyond.items():
                    if begins & behind[one]:
                        cuts[id(other)][edge] = cuts[id(other)].get(edge, 0) | same
                if compared.meet:
                    self._work.spend(same.bit_count())
                    add(self._next[one], _union(self._next[each] for each in _bits(same)))
        edges = defaultdict[int, set[tuple[int, int]]](set)
        for at in cuts.values():
            for edge, numbers in at.items():
                for number in _bits(numbers):
                    edges[number].add(edge)
        return edges

    def _comparison(self, one: Automaton, other: Automaton) -> _Comparison:
        self._work.spend()
        key = id(one), id(other)
        found = self._work.compared.get(key)
        if found is None:
            found = self._work.compared[key] = _compare(one, other, self._work)
        return found


def _union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)
