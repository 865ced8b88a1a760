from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.fleet.cards import chain

from paceline.core.ids import NodeId
from paceline.fleet.messages import CHAIN_LENGTH, LINK_BYTES, StampChain, holds, salt

NODE = NodeId("a")
LINKS = chain("a", 1)
SALT = salt(NODE, 1)
beats = st.integers(1, CHAIN_LENGTH)


@given(beats, beats)
def test_a_stamp_is_checked_against_any_earlier_one_and_no_later_one(one: int, other: int) -> None:
    held = holds(SALT, known=LINKS.proof(one), known_beat=one, proof=LINKS.proof(other), beat=other)
    assert held is (other > one)
    assert holds(SALT, known=LINKS.anchor, known_beat=0, proof=LINKS.proof(one), beat=one)


@given(beats, beats)
def test_a_stamp_under_another_number_does_not_hold(one: int, other: int) -> None:
    assert holds(SALT, known=LINKS.anchor, known_beat=0, proof=LINKS.proof(one), beat=other) is (one == other)


@given(beats, st.binary(max_size=40))
def test_bytes_that_nobody_made_do_not_hold(beat: int, proof: bytes) -> None:
    assert not holds(SALT, known=LINKS.anchor, known_beat=0, proof=proof, beat=beat)


def test_a_chain_of_another_card_with_the_same_secret_says_nothing() -> None:
    for other in (chain("b", 1), chain("a", 2)):
        assert not holds(SALT, known=LINKS.anchor, known_beat=0, proof=other.proof(1), beat=1)


@pytest.mark.parametrize("beat", [-1, 0, CHAIN_LENGTH + 1, 10**9])
def test_there_are_so_many_stamps(beat: int) -> None:
    with pytest.raises(ValueError, match="of a chain"):
        LINKS.proof(beat)
    assert not holds(SALT, known=LINKS.anchor, known_beat=0, proof=b"\0" * LINK_BYTES, beat=beat)


def test_a_secret_has_its_length() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        StampChain(NODE, 1, b"short")
