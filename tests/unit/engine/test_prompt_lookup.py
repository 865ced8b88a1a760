"""What follows the longest earlier repetition is proposed, and nothing where nothing repeats."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.prompt_lookup import MAX_NGRAM, MOST, REMEMBERED, NGramIndex


@pytest.mark.parametrize(
    ("committed", "length", "proposed"),
    [
        ([], 4, ()),
        ([1], 4, ()),
        ([1, 2, 3], 4, ()),
        ([1, 2, 3, 1, 2], 2, (3, 1)),
        ([7, 8, 9, 5, 7, 8, 6, 7, 8], 1, (6,)),  # of equally long repetitions, the latest
        ([7, 8, 9, 4, 8, 6, 7, 8], 1, (9,)),  # the longest before the latest
        ([1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),  # a period goes on
        ([5, 5], 3, (5, 5, 5)),
        ([1, 2, 3, 1, 2], 0, ()),
    ],
)
def test_examples(committed: list[int], length: int, proposed: tuple[int, ...]) -> None:
    assert NGramIndex(committed).propose(length) == proposed


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20))
def test_a_proposal_follows_the_longest_repetition(committed: list[int], length: int) -> None:
    proposed = NGramIndex(committed).propose(length)
    n = len(committed)
    longest = 0
    for end in range(n - 1):
        matched = 0
        while matched <= end and matched < MAX_NGRAM and committed[end - matched] == committed[n - 1 - matched]:
            matched += 1
        longest = max(longest, matched)
    if not longest:
        assert proposed == ()
        return
    assert len(proposed) == length
    suffix = committed[n - longest :]
    places = [i for i in range(n - longest) if committed[i : i + longest] == suffix]
    assert any(committed[i + longest] == proposed[0] for i in places)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 14)), max_size=20))
def test_an_index_that_grew_and_was_cut_knows_what_one_made_at_once_knows(changes: list[tuple[list[int], int]]) -> None:
    index = NGramIndex()
    for ids, cut in changes:
        index.extend(ids)
        index.cut(max(0, len(index.ids) - cut))
        fresh = NGramIndex()
        for token in index.ids:
            fresh.append(token)
        assert (index.matched, index.propose(9)) == (fresh.matched, fresh.propose(9))


def test_a_text_may_be_cut_by_more_than_is_remembered() -> None:
    text = [token % 7 for token in range(3 * REMEMBERED)]
    index = NGramIndex()
    for token in text:
        index.append(token)
    index.cut(10)
    assert index.propose(5) == NGramIndex(text[:10]).propose(5)


def test_tokens_told_many_at_a_time_are_taken_back_without_a_look_at_the_rest() -> None:
    index = NGramIndex(range(5 * REMEMBERED))
    tables = index._tables
    for told in range(2, 60, 7):
        index.extend(range(told))
        index.cut(len(index.ids) - told + 1)
        assert index._tables is tables
    index.cut(4 * REMEMBERED)
    assert list(index.ids) == list(range(4 * REMEMBERED))


def test_an_index_is_bounded_and_knows_what_was_said_lately() -> None:
    """In every way that a text may grow, and when it is cut where the older half was dropped."""
    text = list(range(MOST // 4)) * 6
    tracemalloc.start()
    try:
        index = NGramIndex(text)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 40 * MOST
    for token in range(MOST):
        assert index.propose(2) == (token % (MOST // 4), (token + 1) % (MOST // 4))  # from one round earlier
        index.append(token % (MOST // 4))
    told = len(index.ids)
    index.extend([7, 3, 5])
    index.cut(told)
    assert index.propose(2) == (0, 1)
    index.cut(MOST)
    assert index.propose(2) == (0, 1)
    index.cut(5)
    assert index.propose(2) == ()


@given(st.data())
def test_tables_that_grow_forget_nothing_that_was_not_taken_back(data: st.DataObject) -> None:
    """Many suffixes, so that tables grow between a token and its being taken back."""
    index, text = NGramIndex(), list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        more = data.draw(st.lists(st.integers(0, 40), max_size=60))
        index.extend(more)
        text += more
        kept = max(0, len(text) - data.draw(st.integers(0, 40)))
        index.cut(kept)
        del text[kept:]
    assert list(index.ids) == text
    assert index.propose(8) == NGramIndex(text).propose(8)
