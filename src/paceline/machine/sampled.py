"""Named ways to draw, for benchmarks."""

from __future__ import annotations

from enum import StrEnum

from paceline.core.generation import SamplingParams


class Sampled(StrEnum):
    """How the tokens of a bench are drawn."""

    GREEDY = "greedy"
    DEFAULT = "default"
    """As the API draws what says nothing of it: at temperature 1."""
    QWEN3 = "qwen3"
    """As Qwen3's makers recommend: temperature 0.7, top-p 0.8, top-k 20."""

    @property
    def params(self) -> SamplingParams:
        match self:
            case Sampled.GREEDY:
                return SamplingParams(temperature=0.0)
            case Sampled.DEFAULT:
                return SamplingParams(seed=0)
            case Sampled.QWEN3:
                return SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=0)
