"""What drawing a sequence's tokens needs to remember from token to token: its parameters, seed, and what penalties count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.generation import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: their draws could not differ, but their division overflows."""
_TINY = np.finfo(np.float32).tiny
_HUGE = np.float32(1e30)
"""Where a repetition penalty near zero stops raising logits: beyond any model's, and finite when divided by any temperature."""


class DrawState:
    """Parameters of one sequence in the form the sampler uses, and counts of its tokens. V: vocabulary."""

    __slots__ = (
        "_bias",
        "_bias_ids",
        "_counts",
        "_seen",
        "bans_eos",
        "greedy",
        "inverse_temperature",
        "log_min_p",
        "params",
        "plain",
        "seed",
    )

    def __init__(self, params: SamplingParams, seed: int, prompt_ids: Sequence[int], *, bans_eos: bool) -> None:
        self.params = params
        self.seed = seed
        self.bans_eos = bans_eos
        self.greedy = params.temperature < GREEDY_BELOW
        self.inverse_temperature = np.float32(1.0 if self.greedy else 1.0 / params.temperature)
        self.log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        subtracts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._counts: dict[int, int] | None = {} if subtracts else None
        self._seen: dict[int, None] | None = dict.fromkeys(prompt_ids) if params.repetition_penalty != 1 else None
        self.plain = self.greedy and not params.logit_bias and params.logprobs is None and self._counts is None and self._seen is None
        """Nothing but the largest logit is asked for."""

    def count(self, token_id: int) -> None:
        """A token was drawn."""
        if self._counts is not None:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._seen is not None:
            self._seen[token_id] = None

    def adjust(self, row_V: npt.NDArray[np.float32]) -> None:
        """Apply bias and penalties to a row, in place.

        Repetition counts prompt and answer and scales, as in transformers; presence and frequency count the answer and subtract,
        as OpenAI documents them.
        """
        if len(self._bias_ids):
            row_V[self._bias_ids] += self._bias
        if self._seen:
            ids = np.fromiter(self._seen, np.intp, len(self._seen))
            logits = row_V[ids]
            penalty = np.maximum(np.float32(self.params.repetition_penalty), _TINY)
            row_V[ids] = np.where(logits > 0, np.minimum(logits, _HUGE * penalty) / penalty, logits * penalty)
        if self._counts:
            ids = np.fromiter(self._counts, np.intp, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row_V[ids] -= np.float32(self.params.presence_penalty) + np.float32(self.params.frequency_penalty) * counts
