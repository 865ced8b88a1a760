"""Proposers over a model without weights, whose logits are a hash of what its KV really holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from tests.fakes.engines import VOCAB, answer_alone
from tests.fakes.null_backend import NullRunner

from paceline.core.errors import InvalidRequest
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.text import common_length
from paceline.engine.drafts import BlockProposal, open_session
from paceline.engine.proposers import DraftModelProposer, JacobiProposer, ModelProposer

Make = Callable[..., ModelProposer[object]]
MODELS = pytest.mark.parametrize(
    "make", [partial(DraftModelProposer, vocabulary_size=VOCAB), partial(JacobiProposer, vocabulary_size=VOCAB)], ids=["model", "jacobi"]
)


def runner(n_blocks: int = 32) -> NullRunner:
    return NullRunner(n_blocks=n_blocks, vocab=VOCAB, one_path=True)


def greedy(committed: Sequence[int], length: int) -> tuple[int, ...]:
    """What the model says next, run by an engine."""
    request = GenerationRequest(
        RequestId("r"), tuple(committed), length, SamplingParams(temperature=0, seed=1), ignore_eos=False, stop_ids=frozenset()
    )
    return tuple(answer_alone(request, one_path=True).token_ids)


def texts(seed: int, n: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, VOCAB) for _ in range(source.randrange(1, 40))] for _ in range(n)]


@MODELS
def test_a_model_drafts_what_it_would_say_greedily(make: Make) -> None:
    proposer = make(runner(), eos_ids=frozenset({0}))
    for committed in texts(1, 12):
        block = proposer.propose_block(committed, 7, 99)
        assert block.token_ids == greedy(committed, 7)
        assert 0 < block.forward_passes <= 7
        assert block.peak_activation_bytes > 4 * VOCAB


@MODELS
@pytest.mark.parametrize("n_blocks", [12, 40])
def test_a_session_drafts_the_same_however_it_was_told(make: Make, n_blocks: int) -> None:
    # With few blocks texts take them from one another.
    source, proposer = random.Random(2), make(runner(n_blocks), eos_ids=frozenset({0}), max_rows=5)
    sessions = [(open_session(proposer), list[int]()) for _ in range(4)]
    for _ in range(60):
        session, text = source.choice(sessions)
        first = source.randrange(max(0, len(text) - 6), len(text) + 1)
        del text[first:]
        text += new if (new := [source.randrange(1, VOCAB) for _ in range(source.randrange(0, 9))]) or text else [1]
        if len(text) > 30:
            session.close()
            text.clear()
            continue
        said = list(text[first:])
        if source.random() < 0.5:  # as it is when a draft comes true
            said += (more := list(greedy(text, 2)))
            text += more
        if text[-1] == 0:
            text.pop()
            said = text[first:]
        if text:
            assert session.propose(first, said, 4, 4).token_ids == greedy(text, 4)[:5]


def test_a_draft_that_came_true_is_not_run_again() -> None:
    null = runner()
    session = DraftModelProposer(null, vocabulary_size=VOCAB).open()
    block = session.propose(0, [5, 6, 7], 4, 0)
    assert (null.rows_run, block.forward_passes) == (3 + 3, 4)
    again = session.propose(3, block.token_ids, 1, 0)
    assert (null.rows_run, again.forward_passes) == (6 + 1, 1)
    session.propose(3, [block.token_ids[0], 9], 1, 0)
    assert null.rows_run == 7 + 1


def test_jacobi_stops_when_told_and_runs_no_row_that_is_right() -> None:
    null = runner()
    proposer = JacobiProposer(null, vocabulary_size=VOCAB)
    committed = [3, 4, 5]
    right = greedy(committed, 6)
    for steps in (1, 2, 3):
        null.wipe()
        block = JacobiProposer(null, vocabulary_size=VOCAB).propose_block(committed, 6, steps)
        assert block.diffusion_steps == block.forward_passes == steps
        assert len(block.token_ids) == 6
        assert block.token_ids[:steps] == right[:steps]
    session = proposer.open()
    before = null.rows_run
    assert session.propose(0, committed, 6, 6).diffusion_steps <= 6
    assert null.rows_run - before <= len(committed) + 5 + 5 + 4 + 3 + 2 + 1


@MODELS
def test_a_text_that_fills_the_context_gets_no_draft(make: Make) -> None:
    proposer = make(runner(), max_context=8)
    assert len(proposer.propose_block([1] * 6, 4, 9).token_ids) == 2
    assert proposer.propose_block([1] * 8, 4, 9).token_ids == ()
    assert proposer.propose_block([1] * 80, 4, 9).token_ids == ()
    assert proposer.propose_block([], 4, 9).token_ids == ()


@MODELS
def test_nothing_is_drafted_behind_an_end(make: Make) -> None:
    committed = [3, 4, 5]
    right = greedy(committed, 6)
    proposer = make(runner(), eos_ids=frozenset({right[2]}))
    assert proposer.propose_block(committed, 6, 9).token_ids == right[: right.index(right[2]) + 1]


@MODELS
def test_closing_gives_every_block_back(make: Make) -> None:
    proposer = make(runner())
    sessions = [proposer.open() for _ in range(3)]
    for session, text in zip(sessions, texts(4, 3), strict=True):
        session.propose(0, text, 3, 3)
        session.close()
        session.close()
    assert sorted(proposer.kv._free) == list(range(32))


def test_any_proposer_has_sessions() -> None:
    class Echo:
        def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
            return BlockProposal(tuple(committed[:block_size]), num_steps)

    session = open_session(Echo())
    assert session.propose(0, [1, 2, 3], 2, 5) == BlockProposal((1, 2), 5)
    assert session.propose(1, [9], 5, 0) == BlockProposal((1, 9))
    with pytest.raises(ValueError, match="position 7"):
        session.propose(7, [9], 5, 0)


@pytest.mark.parametrize("seed", range(5))
def test_common_length_is_where_texts_part(seed: int) -> None:
    source = random.Random(seed)
    one = [source.randrange(3) for _ in range(source.randrange(200))]
    for other in ([], one[:3], one[:], [*one, 4], [*one[:50], 7, *one[51:]]):
        slow = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        assert common_length(one, other) == slow


@MODELS
@pytest.mark.parametrize("wrong", [VOCAB, (1 << 32) - 1, -1])
def test_tokens_that_do_not_exist_are_never_run(make: Make, wrong: int) -> None:
    # Kernels look them up in memory, and others say them.
    null = runner()
    session = make(null).open()
    with pytest.raises(InvalidRequest):
        session.propose(0, [1, wrong, 2], 4, 0)
    assert null.rows_run == 0


def test_jacobi_looks_up_what_its_session_was_told_last() -> None:
    session = JacobiProposer(runner(), vocabulary_size=VOCAB).open()
    for first, token_ids in ((0, [1, 2, 3]), (3, [4, 1]), (1, [5, 6]), (3, [1, 5])):
        session.propose(first, token_ids, 2, 1)
    index = session._index  # type: ignore[attr-defined]
    assert list(session.told) == list(index.ids) == [1, 5, 6, 1, 5]
    assert index.propose(2) == (6, 1)
    session.close()
    assert not index.ids
