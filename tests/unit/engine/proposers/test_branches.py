"""Branches are pieces of the text behind the same token, other than what is expected there; and an index of places takes back what it was told."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.drafts import Branch
from paceline.engine.proposers.ngram import EACH, LENGTH, OFFSETS, Occurrences, branches

TEXT = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def branches_of(text: Sequence[int], block: Sequence[int]) -> tuple[Branch, ...]:
    places = Occurrences()
    places.extend(text)
    return branches(text, places, block)


def test_what_followed_elsewhere_may_follow_here() -> None:
    # Behind 1 came 2, 3 and 4; the block expects 4.
    text = [9, 1, 2, 5, 5, 8, 1, 3, 6, 6, 7, 1, 4, 0, 8, 1]
    assert branches_of(text, (4,)) == (Branch(0, (3, 6, 6, 7, 1, 4, 0, 8, 1)), Branch(0, (2, 5, 5, 8, 1, 3, 6, 6, 7, 1, 4, 0, 8, 1)))


@given(TEXT, st.lists(st.integers(0, 4), max_size=2 * OFFSETS))
def test_every_branch_is_a_piece_of_the_text_that_stands_behind_its_token(text: list[int], block: list[int]) -> None:
    found = branches_of(text, block)
    said = [*text, *block]
    for branch in found:
        before = said[len(text) + branch.offset - 1]
        piece = [before, *branch.token_ids]
        assert any(text[at : at + len(piece)] == piece for at in range(len(text)))
        assert branch.token_ids[0] != block[branch.offset]
        assert 2 <= len(branch.token_ids) <= 1 + LENGTH
    for offset in range(len(block)):
        others = [branch.token_ids[0] for branch in found if branch.offset == offset]
        assert len(set(others)) == len(others) <= (EACH if offset < OFFSETS else 0)


@given(TEXT, st.data())
def test_what_is_taken_back_was_never_there(text: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(text)))
    more = data.draw(st.lists(st.integers(0, 4), max_size=20))
    cut, fresh = Occurrences(), Occurrences()
    cut.extend(text)
    cut.cut(text, length)
    cut.extend(more)
    fresh.extend([*text[:length], *more])
    assert [list(cut.of(token)) for token in range(5)] == [list(fresh.of(token)) for token in range(5)]
