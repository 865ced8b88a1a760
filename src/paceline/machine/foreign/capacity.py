"""How many requests an engine takes at once, found from the time to the first token of answers that pass. No clock: callers pass what they measured.

An answer is slow if its first token took `GROWS` times what the answers with the fewest requests in flight explain. Those explain a longer prompt by taking
longer in proportion, and a shorter one by taking as long: so a mix of prompts alone makes no answer slow. The capacity is the number of requests that
separates slow answers from the others with the fewest exceptions. Answers with one number of requests in flight, or only more than the known capacity,
say nothing about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

WINDOW: Final = 20
"""Number of last answers that figures come from. Raising it: a change of the engine shows later where few answers waited for no other."""
NEWEST: Final = 10
"""Number of them that figures come from where enough waited for no other. Raising it: noise changes figures less, and a change of the engine shows later."""
MEMORY: Final = 64
"""Number of last answers that others are compared with. Raising it: an engine that is busy for long is still compared with how it was when it had less to do,
and answers of a slower engine are compared for longer with those of a faster one.
"""
GROWS: Final = 2.5
"""Factor by which the first token must be later. Raising it: queues are seen later. Below 2.4, an engine that becomes half as fast would look like a queue: a
half, with 20 % of noise on either side.
"""
FEWEST: Final = 3
"""Answers that are compared with, and slow ones that it takes to find a capacity. Raising it: outliers count less, and changes show later."""
LEAST_TOKENS: Final = 16
"""Tokens that a prompt counts at least. The engine may have had it in memory, and its time then says nothing about a token's. Raising it: such prompts explain
longer times of others.
"""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The start of one answer."""

    in_flight: int
    """Requests at the engine when this one was sent, itself included."""
    tokens: int
    """Prompt tokens that the engine computed."""
    seconds: float
    """Seconds to the first token."""

    def explains_s(self, tokens: int) -> float:
        """Return the longest time that another prompt should take by this answer: time grows at most in proportion to a prompt's length."""
        return self.seconds * max(1.0, max(tokens, LEAST_TOKENS) / max(self.tokens, LEAST_TOKENS))


class Capacity:
    """The capacity of one model at one engine."""

    def __init__(self) -> None:
        self._memory: deque[tuple[FirstToken, bool | None]] = deque(maxlen=MEMORY)
        """Answers, and whether each was slow; None: there was nothing to compare it with."""
        self._most = 0
        """Requests in flight that made no answer slow; 0: no answer was slow."""
        self._slow = 0
        """Fewest requests in flight that made answers slow."""

    def learn(self, first: FirstToken) -> None:
        """Take note of an answer."""
        few = sorted((one for one, _ in reversed(self._memory)), key=lambda one: one.in_flight)[:FEWEST]  # of equal ones, the latest
        is_slow: bool | None = None
        # With more in flight than the capacity, they may have waited themselves.
        if len(few) == FEWEST and few[-1].in_flight < first.in_flight and not 0 < self._most < few[-1].in_flight:
            is_slow = first.seconds > GROWS * median(one.explains_s(first.tokens) for one in few)
        self._memory.append((first, is_slow))
        if is_slow is not None:
            self._judge()

    def at_once(self, slots: int = 0) -> int:
        """Return the number of requests at which the first token is not later yet; 0: not known.

        Args:
            slots: what the engine says itself; 0: nothing. It decides where answers leave room for it.
        """
        return min(max(slots, self._most), self._slow - 1) if self._most else 0

    @property
    def last(self) -> Sequence[FirstToken]:
        """The last answers."""
        return [one for one, _ in self._memory][-WINDOW:]

    @property
    def uncrowded(self) -> Sequence[FirstToken]:
        """The last answers without those that waited for others, as far as is known."""
        last = list(self._memory)[-WINDOW:]
        return [one for one, is_slow in last if not is_slow and (not self._most or one.in_flight <= self._most)][-NEWEST:]

    def _judge(self) -> None:
        by_load: dict[int, list[bool]] = {}
        for one, is_slow in reversed(self._memory):
            if is_slow is not None and len(seen := by_load.setdefault(one.in_flight, [])) < FEWEST:
                seen.append(is_slow)

        def exceptions(most: int) -> int:
            return sum(seen.count(in_flight <= most) for in_flight, seen in by_load.items())

        best = min((min(by_load) - 1, *by_load), key=lambda most: (exceptions(most), -most))
        if self._most and exceptions(self._most) <= exceptions(best) + 1:
            return  # what is known fits as well
        slow = [in_flight for in_flight, seen in by_load.items() if in_flight > best for is_slow in seen if is_slow]
        if len(slow) >= FEWEST:
            self._most, self._slow = best, min(slow)
        elif best > self._most:
            self._most = self._slow = 0
