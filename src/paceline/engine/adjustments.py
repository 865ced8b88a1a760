"""What is added to and taken from the logits of single tokens before a draw: bans, bias, penalties.

A token's logit is changed in this order: bias (minus infinity bans it); the repetition penalty, if it stands in prompt or answer, which scales as in
transformers; presence and frequency penalty, if it stands in the answer, which subtract as OpenAI documents them. Float32, each operation rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.generation import SamplingParams

Float32 = npt.NDArray[np.float32]

TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.float32(1e30))
"""Where a repetition penalty near zero stops raising logits: beyond any model's, and finite when divided by any temperature."""


@dataclass(frozen=True, slots=True)
class AdjustedTokens:
    """Columns of A tokens, each named once."""

    ids_A: npt.NDArray[np.int32]
    bias_A: Float32
    seen_A: npt.NDArray[np.bool_]
    """The repetition penalty counts it."""
    count_A: Float32
    """How often it was drawn, where that is counted."""

    def __len__(self) -> int:
        return len(self.ids_A)


_NONE = AdjustedTokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_), np.empty(0, np.float32))


class Adjustments:
    """Of one sequence. Grows by a token in constant time, so that a long prompt is gone through once."""

    __slots__ = ("_bias", "_counts", "_ids", "_n", "_place", "_repeats", "_seen", "_subtracts")

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int], banned: Iterable[int]) -> None:
        self._repeats = params.repetition_penalty != 1
        self._subtracts = params.presence_penalty != 0 or params.frequency_penalty != 0
        bias = dict(params.logit_bias) | dict.fromkeys(banned, -math.inf)
        tokens = dict.fromkeys(bias) | (dict.fromkeys(prompt_ids) if self._repeats else {})
        self._place = {token: place for place, token in enumerate(tokens)}
        self._n = len(tokens)
        self._ids = np.fromiter(tokens, np.int32, self._n)
        self._bias = np.zeros(self._n, np.float32)
        self._bias[: len(bias)] = list(bias.values())
        self._seen = np.zeros(self._n, np.bool_)
        if self._repeats:
            self._seen[[self._place[token] for token in {*prompt_ids}]] = True
        self._counts = np.zeros(self._n, np.float32)

    @property
    def grow(self) -> bool:
        """Whether a draw depends on the tokens drawn before it."""
        return self._repeats or self._subtracts

    @property
    def now(self) -> AdjustedTokens:
        """Views, valid until the next token is counted."""
        n = self._n
        if not n:
            return _NONE
        return AdjustedTokens(self._ids[:n], self._bias[:n], self._seen[:n], self._counts[:n])

    def count(self, token: int) -> None:
        """A token was drawn."""
        if not self.grow:
            return
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._n
            self._reserve(self._n + 1)
            self._n += 1
            self._ids[place] = token
        self._seen[place] = self._repeats
        self._counts[place] += self._subtracts

    def after(self, tokens: Iterable[int]) -> AdjustedTokens:
        """As they would be if these were drawn next; their own copies."""
        fork = copy(self)
        fork.detach()
        for token in tokens:
            fork.count(token)
        return fork.now

    def detach(self) -> None:
        """Share nothing with what this was copied from."""
        self._place = dict(self._place)
        self._ids, self._bias = self._ids.copy(), self._bias.copy()
        self._seen, self._counts = self._seen.copy(), self._counts.copy()

    def _reserve(self, n: int) -> None:
        if n > len(self._ids):
            more = 64 + len(self._ids)
            self._ids, self._bias = np.pad(self._ids, (0, more)), np.pad(self._bias, (0, more))
            self._seen, self._counts = np.pad(self._seen, (0, more)), np.pad(self._counts, (0, more))


def adjust(row_V: Float32, params: SamplingParams, tokens: AdjustedTokens) -> None:
    """Change a row in place."""
    if not len(tokens):
        return
    ids_A = tokens.ids_A
    logits = row_V[ids_A] + tokens.bias_A
    penalty = np.maximum(np.float32(params.repetition_penalty), np.float32(TINY))
    scaled = np.where(logits > 0, np.minimum(logits, np.float32(HUGE) * penalty) / penalty, logits * penalty)
    logits = np.where(tokens.seen_A, scaled, logits)
    subtracted = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * tokens.count_A
    row_V[ids_A] = np.where(tokens.count_A > 0, logits - subtracted, logits)
