"""Figures of a model at an engine, from answers that passed: its rates, its first token, its capacity, and how long it may be silent."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

from paceline.machine.foreign.capacity import FEWEST, LEAST_TOKENS, Capacity, FirstToken

NEWER: Final = 0.3
"""Weight of the newest answer in a measured rate. Raising it: rates follow sooner, and flap more."""
LEAST_READ, LEAST_WRITTEN = 64, 8
"""Tokens from which a prompt's or an answer's time counts as a rate."""
FLOOR_S: Final = 6.0
"""Seconds of silence that every request is allowed. Raising it: an engine that hangs is found later; it has to be found within 10 s."""
TIMES: Final = 4.0
"""Factor between the expected time of a prompt and the silence that is allowed. Raising it: as above. Attention makes a prompt of four times the length
up to four times slower by the token; see `LONGER`.
"""
LONGER: Final = 4
"""Factor by which a prompt may be longer than the longest that was measured. The time of longer ones counts as not known. Raising it: honest prompts may be ended."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The time and the tokens of one sequence at the engine."""

    read_tokens: int
    """Prompt tokens that the engine computed."""
    first_s: float
    """Seconds until the first token."""
    tokens: int
    """Tokens of the answer."""
    rest_s: float
    """Seconds from the first token to the last."""
    size: int = 0
    """Size of the part of the prompt that the engine computed, as it was sent: tokens, or letters of a whole chat."""
    place: int = 0
    """Sequences of the same request that were sent before it."""
    loaded: bool = True
    """False: the engine loaded the model for it."""


class Rates:
    """Measured figures of one model at one engine."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0: not measured."""
        self.prompt_per_s = 0.0
        """Prompt tokens in a second, where no other request was waited for; 0: not measured."""
        self.first_s = 0.0
        """Median of the last times to a first token, where no other request was waited for; 0: not measured."""
        self._capacity = Capacity()
        self._pace = 0.0
        """`tokens_per_s` at the last answer."""
        self._slowest_s = 0.0
        """Longest time to a first token, by the token or letter of its prompt."""
        self._largest = 0
        """Size of the largest prompt."""

    def learn(self, timed: Timed, in_flight: int) -> None:
        """Take note of an answer.

        Args:
            in_flight: requests at the engine when it was sent, itself included.
        """
        if timed.tokens >= LEAST_WRITTEN and timed.rest_s > 0:
            rate = (timed.tokens - 1) / timed.rest_s
            self.tokens_per_s = (1 - NEWER) * self.tokens_per_s + NEWER * rate if self.tokens_per_s else rate
        if not timed.loaded or timed.first_s <= 0:
            return
        self._capacity.learn(FirstToken(in_flight, timed.read_tokens, timed.first_s))
        uncrowded = self._capacity.uncrowded
        if len(uncrowded) >= FEWEST or not self.first_s:
            self.first_s = median(one.seconds for one in uncrowded)
            if rates := [one.tokens / one.seconds for one in uncrowded if one.tokens >= LEAST_READ]:
                self.prompt_per_s = median(rates)
        elif self._pace:  # all waited for others: prompts change as the tokens of answers do
            self.first_s *= self._pace / self.tokens_per_s
            self.prompt_per_s *= self.tokens_per_s / self._pace
        self._pace = self.tokens_per_s
        self._slowest_s = max(self._slowest_s, timed.first_s / max(timed.size, LEAST_TOKENS))
        self._largest = max(self._largest, timed.size, LEAST_TOKENS)

    def at_once(self, slots: int) -> int:
        """See `Capacity.at_once`."""
        return self._capacity.at_once(slots)

    def prompt_s(self, tokens: int) -> float:
        """Return the expected seconds to a first token after a prompt; 0: not known."""
        return tokens / self.prompt_per_s if self.prompt_per_s else self.first_s

    def silence_s(self, size: int) -> float | None:
        """Return the seconds of silence after a prompt that no honest answer took by far, from its size. None: too little is known.

        The slowest token that was ever measured counts: an engine that keeps prompts in memory and does not say so would look faster than it is.
        """
        if not self.first_s or size > LONGER * self._largest:
            return None
        longest_s = max(one.seconds for one in self._capacity.last)
        return FLOOR_S + TIMES * max(longest_s, size * self._slowest_s)
