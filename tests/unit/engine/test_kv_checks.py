"""Blocks that peers gave: some are computed again, and where one is wrong, nothing that stands on what its givers gave goes on, or is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from tests.fakes.engines import VOCAB, Answer, EngineBench, answer_alone
from tests.fakes.null_backend import NullRunner, UInt64

from paceline.core.errors import WayNotAllowed
from paceline.core.generation import PROMPT_PROGRESS, FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import BlockId, NodeId, RequestId
from paceline.engine.kv_fetch import GivenBlocks
from paceline.engine.kv_source import KvLoans
from paceline.engine.local import Int32
from paceline.engine.prefix_cache import prompt_keys, root_key
from paceline.machine.kv_spans import n_alike
from paceline.ways.kv.fetching import ComparedBlocks

_DRAW = random.Random(7)
PROMPT = [_DRAW.randrange(1, VOCAB) for _ in range(41)]
SIZE, WHOLE = 4, 10
LIAR, OTHER = NodeId("liar"), NodeId("other")


def request(name: str, prompt: Sequence[int] = PROMPT, tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(RequestId(name), tuple(prompt), tokens, SamplingParams(seed=1), ignore_eos=True)


class Given(ComparedBlocks):
    """Blocks that are there at once."""

    def __init__(self, n_blocks: int, given: GivenBlocks | None) -> None:
        super().__init__(n_blocks)
        self.given = given  # type: ignore[assignment]


class PeerSource:
    """A `KvSource` with the blocks of prompts, and those of a peer that lies about some.

    Args:
        lies: places of blocks that are given with other bytes.
        kept: blocks before those that a peer gives, which were kept here.
    """

    def __init__(self, runner: NullRunner, lies: set[int], kept: int = 0) -> None:
        self.runner, self.lies, self.n_kept = runner, lies, kept
        self.giver = LIAR
        self.known: dict[bytes, bytes] = {}
        self.asked = 0
        self.offered: list[bytes] = []
        self.counts, self.kept_bytes = {}, 0
        self._let_go: list[BlockId] = []
        self.cannot_compare = False

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        del request, n_writing
        return next((place for place, key in enumerate(keys) if key not in self.known), len(keys)) if self.giver else 0

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> Given:
        self.asked += 1
        order = list(self.known)
        for key, block in zip(keys, blocks, strict=True):
            data = bytearray(self.known[key])
            if order.index(key) in self.lies:
                data[0] ^= 2
            self.runner.import_block(block, memoryview(data))
        return Given(len(keys), GivenBlocks(self.giver, self.alike, self.n_kept))

    def alike(self, blocks: Sequence[BlockId]) -> ComparedBlocks:
        return ComparedBlocks(0 if self.cannot_compare else n_alike(self.runner, blocks))

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        self.offered.append(key)
        self._let_go.append(block)
        return True

    def lacks(self, key: bytes) -> bool:
        return False

    def kept(self) -> Sequence[BlockId]:
        kept, self._let_go = self._let_go, []
        return kept

    def reset(self) -> None:
        self._let_go = []


class Checked:
    """An engine beside such a peer. What is found ends the asking, as a node does."""

    def __init__(self, every: int, lies: set[int] = frozenset(), prompt: Sequence[int] = PROMPT, **how: int) -> None:  # type: ignore[assignment]
        kept = how.pop("kept", 0)
        self.loans = KvLoans()
        self.found: list[frozenset[NodeId]] = []
        self.loans.on_checked = self._checked
        self.bench = EngineBench(kv=self._made, loans=self.loans, n_blocks=64, max_context=128, kv_check_every=every, **how)  # type: ignore[arg-type]
        self.source.n_kept = kept
        self.source.lies = set(lies)
        honest = EngineBench(n_blocks=64, max_context=128)
        honest.run(request("honest", prompt))
        keys = prompt_keys(root_key("null", ""), prompt, SIZE)
        for key in keys:
            block = honest.engine._scheduler.pool.cache.find(key)  # pyright: ignore[reportPrivateUsage]
            assert block is not None
            data = bytearray(honest.runner.block_bytes)
            honest.runner.export_block(block, memoryview(data))
            self.source.known[key] = bytes(data)
        self.keys = keys

    def _made(self, runner: NullRunner) -> PeerSource:
        self.source = PeerSource(runner, set())
        return self.source

    def _checked(self, liars: frozenset[NodeId]) -> None:
        self.found.append(liars)
        if liars:
            self.source.giver = NodeId("")

    def answer(self, name: str, *more: int) -> Answer:
        asked = request(name, [*PROMPT, *more])
        return self.bench.run(asked)[asked.request_id, 0]


def truth(*more: int) -> list[int]:
    return answer_alone(request("alone", [*PROMPT, *more])).token_ids


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_right_is_used_and_each_block_that_is_chosen_is_computed_again(depth: int) -> None:
    every = Checked(1, depth=depth)
    answer = every.answer("a")
    assert (answer.token_ids, answer.cached_tokens) == (truth(), SIZE * WHOLE)
    assert every.found == [frozenset()] * WHOLE
    none = Checked(0, depth=depth)
    assert none.answer("a").token_ids == truth()
    assert none.found == []
    assert every.bench.runner.rows_run == none.bench.runner.rows_run + SIZE * WHOLE
    some = Checked(3, depth=depth)
    assert some.answer("a").token_ids == truth()
    assert 1 <= len(some.found) <= WHOLE // 2


@pytest.mark.parametrize("lie", [0, 4, WHOLE - 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_lie_that_is_found_changes_no_byte_and_is_told(lie: int, depth: int) -> None:
    checked = Checked(1, {lie}, depth=depth)
    answer = checked.answer("a")
    assert answer.token_ids == truth()
    assert checked.found == [*([frozenset()] * lie), frozenset({LIAR})]
    lies = [notice for notice in answer.notices if notice.kind != PROMPT_PROGRESS]
    assert [(notice.kind, notice.detail["nodes"]) for notice in lies] == [("kv_distrusted", "liar")]
    assert checked.source.asked == 1
    # What is known from then on was computed here.
    assert checked.answer("b", 1, 2, 3).token_ids == truth(1, 2, 3)


def test_what_stands_on_a_lie_is_forgotten_and_answers_that_stand_on_it_run_again() -> None:
    checked = Checked(0, {2})
    bench, source = checked.bench, checked.source
    wrong = checked.answer("believed").token_ids
    assert wrong != truth()
    bench.add(request("live", [*PROMPT, *wrong[:5], 7], 20), request("apart", [9] * 20, 20))
    for _ in range(6):
        bench.step()
    begun = list(bench.answers[RequestId("live"), 0].token_ids)
    assert begun
    checked.loans.distrust(frozenset({OTHER}))
    bench.step()
    assert not bench.answers[RequestId("live"), 0].notices
    source.giver = NodeId("")
    checked.loans.distrust(frozenset({LIAR}))
    bench.run()
    live = bench.answers[RequestId("live"), 0]
    assert live.finish is FinishReason.LENGTH
    assert [notice.kind for notice in live.notices] == ["kv_distrusted"]
    # From there on it is what follows from the ids that were said.
    said = live.notices[0].detail["n_tokens"]
    assert isinstance(said, int)
    begun = live.token_ids[:said]
    goes_on = replace(request("live", [*PROMPT, *wrong[:5], 7], 20), so_far={0: tuple(begun)})
    assert live.token_ids[said:] == answer_alone(goes_on).token_ids
    assert bench.answers[RequestId("apart"), 0].token_ids == answer_alone(request("apart", [9] * 20, 20)).token_ids
    assert not bench.answers[RequestId("apart"), 0].notices
    assert checked.answer("again").token_ids == truth()


def test_what_stands_on_a_peers_blocks_is_kept_nowhere_else_and_what_was_kept_here_is_not_its() -> None:
    checked = Checked(0, {5}, kept=4)
    checked.answer("a", 1, 2, 3, 4, 5, 6, 7, 8)
    assert not checked.source.offered
    checked.source.giver = NodeId("")
    checked.loans.distrust(frozenset({LIAR}))
    checked.bench.run()
    again = checked.answer("b")
    assert (again.token_ids, again.cached_tokens) == (truth(), 4 * SIZE)
    assert checked.source.offered
    assert not set(checked.keys[:4]) & set(checked.source.offered)


def test_what_cannot_be_compared_is_no_lie() -> None:
    checked = Checked(1)
    checked.source.cannot_compare = True
    assert checked.answer("a").token_ids == truth()
    assert checked.found == []


def test_a_lie_that_leaves_nothing_to_draw_is_found_and_an_answer_without_a_peer_ends() -> None:
    checked = Checked(0)
    logits = checked.bench.runner.logits

    def poisoned(x_TD: UInt64, rows_R: Int32) -> npt.NDArray[np.float32]:
        found = logits(x_TD, rows_R)
        if checked.source.giver:
            found[:] = float("nan")
        return found

    checked.bench.runner.logits = poisoned  # type: ignore[method-assign]
    assert checked.answer("a").token_ids == truth()
    assert checked.found == [frozenset({LIAR})]
    checked.source.giver, checked.source.known = LIAR, {}
    assert checked.answer("b", 4).finish is FinishReason.ERROR


@pytest.mark.parametrize("seed", range(6))
def test_whatever_runs_beside_and_is_lost_bytes_are_those_of_one_machine(seed: int) -> None:
    draw = random.Random(seed)
    lose = range(draw.randrange(6, 20), 200, 23) if draw.random() < 0.5 else ()
    checked = Checked(1, {draw.randrange(WHOLE)} if draw.random() < 0.6 else set(), depth=draw.choice((1, 2, 3)), lose=lose, restores=True)  # type: ignore[arg-type]
    asked = [
        request(str(number), PROMPT[: draw.randrange(9, 42)] + [draw.randrange(1, VOCAB) for _ in range(9)], 8) for number in range(10)
    ]
    for one in asked:
        checked.bench.add(one)
        for _ in range(draw.randrange(4)):
            checked.bench.step()
        if draw.random() < 0.1:
            checked.bench.engine.abort(one.request_id)
    answers = checked.bench.run()
    for one in asked:
        answer = answers[one.request_id, 0]
        if answer.finish is not FinishReason.ABORT:
            assert answer.token_ids == answer_alone(one).token_ids


def test_mixed_numerics_take_no_block_under_an_exact_key_and_keep_and_tell_of_none() -> None:
    """Numerics change before the first, the second and the fourth request; KV of one is of no use to the next, and names are shared by exact ones alone."""
    checked = Checked(0)
    bench, source, own = checked.bench, checked.source, checked.bench.executor.numerics_id
    told = list[bytes]()
    checked.loans.on_used = lambda: told.extend(checked.loans.prefixes.marks)
    bench.executor.numerics_id = ""
    answer = checked.answer("mixed")
    assert (answer.token_ids, answer.cached_tokens) == (truth(), 0)
    assert bench.engine.stats().numerics_id == ""
    again = checked.answer("mixed-again")
    assert again.cached_tokens == SIZE * WHOLE, "a name that nothing else has is of use here"
    assert (source.asked, source.offered, told) == (0, [], [])
    with pytest.raises(WayNotAllowed):
        bench.add(replace(request("exact"), exact=True))
    bench.executor.numerics_id = own
    exact = replace(request("exact"), exact=True)
    answer = bench.run(exact)[exact.request_id, 0]
    assert (answer.token_ids, answer.cached_tokens, source.asked) == (truth(), SIZE * WHOLE, 1)
    for last in (1, 2):
        bench.run(replace(exact, request_id=RequestId(f"new-{last}"), prompt_ids=(*reversed(PROMPT), *[last] * 12)))
    assert source.offered
    assert told
    n_offered = len(source.offered)
    bench.executor.numerics_id = ""
    assert checked.answer("mixed-later").cached_tokens == 0
    assert len(source.offered) == n_offered
