"""What drawing a sequence's tokens needs to remember from token to token: its parameters, seed, and the logits that are adjusted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.generation import SamplingParams
from paceline.engine.adjustments import AdjustedTokens, Adjustments
from paceline.engine.arithmetic import log_of
from paceline.engine.grammar import Mask, Matcher

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: their draws could not differ, but their division overflows."""
_LEAST_MIN_P = 1e-300
"""Shares below this are no number that has a plain logarithm; they keep every token."""


class DrawState:
    """Parameters of one sequence in the form samplers use, and what adjusts its logits."""

    __slots__ = ("adjustments", "greedy", "inverse_temperature", "log_min_p", "matcher", "params", "seed")

    def __init__(
        self, params: SamplingParams, seed: int, prompt_ids: Collection[int], banned: Iterable[int] = (), matcher: Matcher | None = None
    ) -> None:
        """Begin with a prompt.

        Args:
            params: within the ranges of `core.generation`.
            seed: of the sequence's noise; counts modulo 2**64.
            banned: tokens that are never drawn.
            matcher: of the form that the answer must have.
        """
        self.params, self.matcher = params, matcher
        self.seed = seed
        self.greedy = params.temperature < GREEDY_BELOW
        self.inverse_temperature = np.float32(1.0 if self.greedy else 1.0 / params.temperature)
        self.log_min_p = np.float32(log_of(max(params.min_p, _LEAST_MIN_P))) if params.min_p > 0 else np.float32(-math.inf)
        self.adjustments = Adjustments(params, prompt_ids, banned)

    def count(self, token_id: int) -> None:
        """A token was drawn."""
        self.adjustments.count(token_id)
        if self.matcher is not None:
            self.matcher.take(token_id)

    def row(self, logits_row: int, position: int, guessed: Sequence[int] = ()) -> DrawRow:
        """One draw.

        Args:
            logits_row: which row of a batch's logits.
            guessed: tokens in front of it that are not counted yet; the draw counts only if they come true.
        """
        adjustments = self.adjustments
        tokens = adjustments.after(guessed) if guessed and adjustments.grow else adjustments.now
        return DrawRow(logits_row, self, position, tokens, None if self.matcher is None else self.matcher.mask(guessed))


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A draw that is wanted: from which row of the logits, and of what."""

    logits_row: int
    state: DrawState
    position: int
    adjusted: AdjustedTokens
    mask: Mask | None = None
    """Tokens that may be drawn; None: all."""
