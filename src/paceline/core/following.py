"""The rule that says whether one holder of a model may continue what another holder began. Every place that decides it asks `may_follow`.

Laws:
- Other weights never follow. Holders are compared by digest and weights format, or by name and quantisation if a digest is not known.
- Equal, known numerics ids promise equal bytes, so nothing is announced. An exact request accepts nothing else.
- An empty numerics id promises nothing: its holder may follow and be followed where exactness is off, and each change is announced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.core.model import ModelRef


class Following(StrEnum):
    """Answer of `may_follow`. The values of the announced ones are the `matched_by` of a `numerics_changed` notice."""

    NO = "no"
    SAME = "same"
    """Yes, with the same bytes."""
    BY_DIGEST = "digest"
    """Yes, and it is announced: the weights are the same, and the arithmetic may differ."""
    BY_NAME = "name"
    """Yes, and it is announced: name and quantisation are the same, and nothing shows that the weights are."""

    @property
    def is_allowed(self) -> bool:
        return self is not Following.NO

    @property
    def is_announced(self) -> bool:
        return self in {Following.BY_DIGEST, Following.BY_NAME}


@dataclass(frozen=True, slots=True)
class Holding:
    """A model as one holder has it."""

    model: ModelRef
    numerics_id: str = ""
    """Empty: the holder promises no bytes, as an engine of another maker."""


def may_follow(before: Holding, after: Holding, *, exact: bool) -> Following:
    """Return whether holder `after` may continue what holder `before` computed.

    Args:
        exact: only the same bytes will do.
    """
    matched = _matched_by(before.model, after.model)
    if matched is Following.BY_DIGEST and is_same_arithmetic(before.numerics_id, after.numerics_id):
        return Following.SAME
    return Following.NO if exact else matched


def is_same_arithmetic(one: str, other: str) -> bool:
    """Return whether two numerics ids promise the same bytes, for holders that are known to have the same weights, such as the stages of a pipeline."""
    return one != "" and one == other


def promises_bytes(holding: Holding) -> bool:
    """Return whether a holder may begin an answer to an exact request: it would follow itself."""
    return may_follow(holding, holding, exact=True) is Following.SAME


def _matched_by(one: ModelRef, other: ModelRef) -> Following:
    if one.has_digest and other.has_digest:
        return Following.BY_DIGEST if one == other else Following.NO
    named = bool(one.name and one.weights) and (one.name, one.weights) == (other.name, other.weights)
    return Following.BY_NAME if named else Following.NO
