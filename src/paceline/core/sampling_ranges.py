"""Which sampling parameters are taken: one table for the API, for requests from other nodes and for the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest
from paceline.core.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `least` to `most`."""

    least: float
    most: float
    above: bool = False
    """`least` itself is not in it."""

    def holds(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most and math.isfinite(value)

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{self.least:g} to {self.most:g}"


TEMPERATURE = Range(0, 2)
TOP_K = Range(0, (1 << 31) - 1)
TOP_P = Range(0, 1)
MIN_P = Range(0, 1)
REPETITION_PENALTY = Range(0, 10, above=True)
PRESENCE_PENALTY = FREQUENCY_PENALTY = Range(-2, 2)
BIAS = Range(-100, 100)
LOGPROBS = Range(0, 20)
MAX_BIASES = 1024


def check_sampling(params: SamplingParams) -> None:
    """Check what does not depend on the model.

    Raises:
        InvalidRequest: a value is out of its range; `field` names it.
    """
    values: Iterable[tuple[str, float, Range]] = (
        ("temperature", params.temperature, TEMPERATURE),
        ("top_k", params.top_k, TOP_K),
        ("top_p", params.top_p, TOP_P),
        ("min_p", params.min_p, MIN_P),
        ("repetition_penalty", params.repetition_penalty, REPETITION_PENALTY),
        ("presence_penalty", params.presence_penalty, PRESENCE_PENALTY),
        ("frequency_penalty", params.frequency_penalty, FREQUENCY_PENALTY),
        ("logprobs", params.logprobs or 0, LOGPROBS),
        *(("logit_bias", bias, BIAS) for bias in params.logit_bias.values()),
    )
    for field, value, range_ in values:
        if not range_.holds(value):
            raise InvalidRequest(f"{field} is {value}", f"Send {range_}.", field=field)
    if len(params.logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias names {len(params.logit_bias)} tokens", f"Send at most {MAX_BIASES}.", field="logit_bias")
