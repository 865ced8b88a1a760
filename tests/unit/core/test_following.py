"""Which holder of a model may continue what another began."""

from __future__ import annotations

import pytest

from paceline.core.following import Following, Holding, may_follow, promises_bytes
from paceline.core.model import ModelRef, digest_of_name

NO, SAME, DIGEST, NAME = Following.NO, Following.SAME, Following.BY_DIGEST, Following.BY_NAME


def holding(digest: str = "d", weights: str = "int4", name: str = "m", numerics_id: str = "n") -> Holding:
    """A holder. The digest `*` is made from name and weights."""
    return Holding(ModelRef(digest_of_name(name, weights) if digest == "*" else digest, weights, name), numerics_id)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (holding(), holding(), SAME),
        (holding(), holding(name="alias"), SAME),
        (holding(), holding(numerics_id="o"), DIGEST),
        (holding(), holding(numerics_id=""), DIGEST),
        (holding(numerics_id=""), holding(), DIGEST),
        (holding(numerics_id=""), holding(numerics_id=""), DIGEST),
        (holding(), holding("e"), NO),
        (holding(), holding(weights="int8"), NO),
        (holding(), holding("e", numerics_id=""), NO),
        (holding("*", numerics_id=""), holding("*", numerics_id=""), NAME),
        (holding("*"), holding("*"), NAME),
        (holding("*", numerics_id=""), holding(), NAME),
        (holding(), holding("", numerics_id=""), NAME),
        (holding("", numerics_id=""), holding("*", numerics_id=""), NAME),
        (holding("*", numerics_id=""), holding("*", name="other", numerics_id=""), NO),
        (holding("*", numerics_id=""), holding("*", weights="Q8_0", numerics_id=""), NO),
        (holding(), holding("*", weights="Q8_0", numerics_id=""), NO),
        (holding("", name="", numerics_id=""), holding("", name="", numerics_id=""), NO),
        (holding("", weights="", numerics_id=""), holding("", weights="", numerics_id=""), NO),
    ],
)
def test_a_holder_follows_by_digest_or_by_name_and_quantisation(before: Holding, after: Holding, expected: Following) -> None:
    assert may_follow(before, after, exact=False) is expected
    assert may_follow(after, before, exact=False) is expected
    assert may_follow(before, after, exact=True) is (SAME if expected is SAME else NO)
    assert expected.is_announced == (expected in {DIGEST, NAME})
    assert expected.is_allowed == (expected is not NO)


@pytest.mark.parametrize(
    ("one", "promises"),
    [(holding(), True), (holding(numerics_id=""), False), (holding("*"), False), (holding("", numerics_id="n"), False)],
)
def test_a_holder_without_numerics_or_digest_promises_no_bytes(one: Holding, promises: bool) -> None:
    assert promises_bytes(one) is promises
