"""KV on disk beside an engine: the same tokens, less of them computed."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import VOCAB, EngineBench
from tests.fakes.null_backend import NullRunner

from paceline.core.clock import SystemClock
from paceline.core.errors import ExecutorLost
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import BlockId, RequestId
from paceline.machine import kv_tier
from paceline.machine.kv_tier import REST_S, DiskTier, KvDiskLimits
from paceline.store.kv_folder import KvFolder


class Started:
    """A process that serves, for as long as the block runs. Several may share a folder."""

    def __init__(self, folder: Path, budget: int = 1 << 30, **bench: object) -> None:
        self._folder, self._budget, self._bench = folder, budget, bench
        self._came = threading.Event()
        self.tier: DiskTier

    def __enter__(self) -> EngineBench:
        def kv(runner: NullRunner) -> DiskTier:
            self.tier = DiskTier(runner, "model", self._folder, KvDiskLimits(self._budget), SystemClock(), self._came.set)
            return self.tier

        return EngineBench(kv=kv, wait=self._wait, **self._bench)  # type: ignore[arg-type]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.tier.close()

    def _wait(self, seconds: float) -> None:
        del seconds
        assert self._came.wait(60)
        self._came.clear()


def request(name: str, prompt: list[int], answer: int = 6, caller: str = "", salt: str = "") -> GenerationRequest:
    return GenerationRequest(RequestId(name), tuple(prompt), answer, SamplingParams(seed=1), caller=caller, cache_salt=salt)


@pytest.fixture
def prompts() -> list[list[int]]:
    draw = random.Random(5)
    beginning = [draw.randrange(1, VOCAB) for _ in range(20)]
    return [[*beginning, *(draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 20)))] for _ in range(30)]


def test_a_prompt_that_was_computed_before_the_restart_is_read(tmp_path: Path, prompts: list[list[int]]) -> None:
    with Started(tmp_path) as bench:
        before = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
        assert before.cached_tokens == 0
    started = Started(tmp_path)
    with started as bench:
        after = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
        assert (after.token_ids, after.cached_tokens) == (before.token_ids, (len(prompts[0]) - 1) // 4 * 4)
        assert bench.runner.rows_run == len(prompts[0]) - after.cached_tokens + len(after.token_ids) - 1
        assert started.tier.counts["read"] == after.cached_tokens // 4
        again = bench.run(request("b", prompts[0]))[RequestId("b"), 0]
        assert (again.token_ids, again.cached_tokens) == (before.token_ids, after.cached_tokens)
        assert started.tier.counts["read"] == after.cached_tokens // 4, "memory comes first"


def test_a_block_that_is_gone_or_damaged_ends_what_is_read(tmp_path: Path, prompts: list[list[int]]) -> None:
    with Started(tmp_path) as bench:
        before = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
    for damage in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")):
        with Started(tmp_path) as bench:
            victim = sorted(path for path in tmp_path.rglob("*") if path.is_file())[2]
            damage(victim)
            after = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
            assert after.token_ids == before.token_ids
            assert after.cached_tokens < (len(prompts[0]) - 1) // 4 * 4
            # What was computed anew is kept anew.
        with Started(tmp_path) as bench:
            assert bench.run(request("a", prompts[0]))[RequestId("a"), 0].cached_tokens == (len(prompts[0]) - 1) // 4 * 4


def files_of(folder: Path) -> int:
    return len([path for path in folder.rglob("*") if path.is_file()])


def test_a_prompt_that_has_no_room_is_kept_from_its_beginning(tmp_path: Path) -> None:
    """What others wrote makes way for it, and what was kept of it for nothing that stands behind."""
    draw = random.Random(6)
    before, prompt = ([draw.randrange(1, VOCAB) for _ in range(81)] for _ in range(2))
    shape = {"n_blocks": 60, "max_context": 128}
    with Started(tmp_path, **shape) as bench:
        bench.run(request("before", before[:41]))
    budget = 13 * next(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    started = Started(tmp_path, budget, **shape)
    with started as bench:
        answer = bench.run(request("a", prompt))[RequestId("a"), 0]
    assert started.tier.counts["written"] + started.tier.counts["failed"] == 20
    for _ in range(2):
        with Started(tmp_path, budget, **shape) as bench:
            again = bench.run(request("a", prompt))[RequestId("a"), 0]
            assert (again.token_ids, again.cached_tokens) == (answer.token_ids, 4 * 13)
        assert files_of(tmp_path) == 13


def test_what_has_no_room_is_not_copied_out_turn_after_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[BlockId] = []
    export = NullRunner.export_block
    monkeypatch.setattr(NullRunner, "export_block", lambda runner, block, *more: (copied.append(block), export(runner, block, *more))[1])
    shape = {"n_blocks": 60, "max_context": 128}
    draw = random.Random(6)
    with Started(tmp_path, **shape) as bench:
        bench.run(request("before", [draw.randrange(1, VOCAB) for _ in range(9)]))
    budget = 5 * next(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    prompt = [draw.randrange(1, VOCAB) for _ in range(81)]
    with Started(tmp_path, budget, **shape) as bench:
        bench.run(request("a", prompt))
    with Started(tmp_path, budget, **shape) as bench:
        for name in ("b", "c"):
            copied.clear()
            bench.run(request(name, prompt))
    assert files_of(tmp_path) == 5
    assert len(copied) <= 1, "the one that may have found room meanwhile"


def test_blocks_that_were_kept_by_another_process_meanwhile_are_let_go_at_once(tmp_path: Path, prompts: list[list[int]]) -> None:
    prompt, answer = prompts[0][:20], 1  # the last step fills a block
    with Started(tmp_path) as bench:
        before = bench.run(request("a", prompt, answer))[RequestId("a"), 0]
    started = Started(tmp_path)
    with started as bench:
        started.tier.run_of = lambda keys, request=None, n_writing=0: 0  # type: ignore[method-assign]  they came after it looked
        after = bench.run(request("a", prompt, answer))[RequestId("a"), 0]
        assert (after.token_ids, after.cached_tokens) == (before.token_ids, 0)
        assert started.tier.counts["written"] == 0


def test_a_disk_that_hangs_is_not_waited_for_and_fills_nothing_later(tmp_path: Path, prompts: list[list[int]]) -> None:
    with Started(tmp_path) as bench:
        before = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
    tiers: list[DiskTier] = []

    def kv(runner: NullRunner) -> DiskTier:
        tiers.append(DiskTier(runner, "model", tmp_path, KvDiskLimits(1 << 30), clock, lambda: None))
        return tiers[-1]

    clock = FakeClock()
    bench = EngineBench(kv=kv, clock=clock)  # each wait is seconds to it
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    written = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
        os.mkfifo(path)  # to open it waits for one that writes
    filled: list[int] = []
    bench.runner.import_block = lambda block, data, part=None: filled.append(block)  # type: ignore[method-assign]
    after = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
    assert (after.token_ids, after.cached_tokens) == (before.token_ids, 0)
    name = [bytes.fromhex(files[0].name)]
    assert not tiers[0].run_of(name), "it is not asked again for a while"
    clock.advance(REST_S + 1)
    assert tiers[0].run_of(name)
    closing = threading.Thread(target=tiers[0].close)
    closing.start()
    waiting = dict(zip(files, written, strict=True))
    while closing.is_alive():  # a thread may only begin to read now
        for path in list(waiting):
            with suppress(OSError):  # nobody reads it, or not yet
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, waiting.pop(path))
                os.close(pipe)
        closing.join(0.01)
    assert not filled


def test_a_pool_that_is_lost_is_neither_kept_nor_filled(tmp_path: Path, prompts: list[list[int]]) -> None:
    def lost(*of: object) -> None:
        raise ExecutorLost("as where a rank of a tensor group is gone", ())

    started = Started(tmp_path)
    with started as bench:
        bench.runner.export_block = lost  # type: ignore[method-assign]
        before = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
    assert started.tier.counts["written"] == 0
    with Started(tmp_path) as bench:
        bench.run(request("a", prompts[0]))
    started = Started(tmp_path)
    with started as bench:
        bench.runner.import_block = lost  # type: ignore[method-assign]
        after = bench.run(request("a", prompts[0]))[RequestId("a"), 0]
        assert (after.token_ids, after.cached_tokens) == (before.token_ids, 0)
    assert started.tier.counts["read"] > 0


def test_a_write_that_hangs_holds_up_no_end_and_reads_no_block_later(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tier, "STALL_S", 0.2)
    hangs, goes_on, over = threading.Event(), threading.Event(), threading.Event()

    def write(self: KvFolder, key: bytes, block: memoryview, parent: bytes | None = None) -> bool:
        del self, key, block, parent
        hangs.set()
        goes_on.wait(60)
        over.set()
        return False

    monkeypatch.setattr(KvFolder, "write", write)
    started = Started(tmp_path)
    with started as bench:
        bench.add(request("a", prompts[0]))
        while (answer := bench.answers.get((RequestId("a"), 0))) is None or answer.finish is None:
            bench.step()
        assert hangs.wait(60)
        read: list[int] = []
    bench.runner.export_block = lambda block, into: read.append(block)  # type: ignore[method-assign]
    goes_on.set()
    assert over.wait(60)
    for thread in started.tier._writer._threads:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        thread.join(60)
    assert not read
    assert not started.tier.kept()


def test_what_other_nodes_asked_is_not_kept(tmp_path: Path, prompts: list[list[int]]) -> None:
    with Started(tmp_path) as bench:
        bench.run(request("a", prompts[0], caller="guest"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_others_asked_is_kept_once_it_is_asked_here(tmp_path: Path, prompts: list[list[int]]) -> None:
    with Started(tmp_path) as bench:
        bench.run(replace(request("a", prompts[0], caller="member"), shares_kv=True))
        before = bench.run(request("b", prompts[1]))[RequestId("b"), 0]
        assert before.cached_tokens == 20
    with Started(tmp_path) as bench:
        after = bench.run(request("b", prompts[1]))[RequestId("b"), 0]
        assert (after.token_ids, after.cached_tokens) == (before.token_ids, (len(prompts[1]) - 1) // 4 * 4)


def test_what_one_salt_kept_no_other_finds(tmp_path: Path, prompts: list[list[int]]) -> None:
    with Started(tmp_path) as bench:
        bench.run(request("a", prompts[0], salt="mine"))
    with Started(tmp_path) as bench:
        assert bench.run(request("a", prompts[0], salt="yours"))[RequestId("a"), 0].cached_tokens == 0
        assert bench.run(request("b", prompts[0], salt="mine"))[RequestId("b"), 0].cached_tokens > 0


@pytest.mark.parametrize("seed", range(12))
def test_any_traffic_over_restarts_gives_the_tokens_it_gives_without(tmp_path: Path, prompts: list[list[int]], seed: int) -> None:
    """Aborts, a pool that is too small for all, a budget that is too small too, one path and two."""
    draw = random.Random(seed)
    shape = {"n_blocks": draw.choice((16, 24, 60)), "one_path": draw.random() < 0.5, "max_running": draw.choice((1, 4, 8))}
    budget = draw.choice((3000, 1 << 30))
    alone = {
        index: EngineBench(one_path=shape["one_path"] is True).run(request("x", prompt))[RequestId("x"), 0]
        for index, prompt in enumerate(prompts)
    }
    for _ in range(3):
        started = Started(tmp_path, budget, **shape)
        with started as bench:
            asked: dict[RequestId, int] = {}
            aborted: set[RequestId] = set()
            for number in range(40):
                index = draw.randrange(len(prompts))
                name = RequestId(f"{number}")
                asked[name] = index
                bench.add(request(name, prompts[index]))
                for _ in range(draw.randrange(6)):
                    if bench.engine.has_work:
                        bench.step()
                if draw.random() < 0.3:
                    gone = draw.choice(list(asked))
                    bench.engine.abort(gone)
                    aborted.add(gone)
            bench.run()
            for name, index in asked.items():
                answer, right = bench.answers[name, 0], alone[index]
                if name in aborted:
                    assert answer.token_ids == right.token_ids[: len(answer.token_ids)]
                else:
                    assert (answer.token_ids, answer.error) == (right.token_ids, None)
            assert not started.tier.counts["damaged"]
