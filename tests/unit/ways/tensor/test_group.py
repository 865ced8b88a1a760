"""A tensor group of real processes answers as one process does, whatever becomes of its ranks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.seeded_models import TINY, write_gguf

from paceline.backends import cpu
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.options import LoadOptions
from paceline.core.clock import SystemClock
from paceline.core.errors import SERVER_STOPPING, ConfigError, ExecutorLost, ExecutorUnavailable, NodeStopping, OutOfMemory
from paceline.core.generation import GenerationRequest, Notice, SamplingParams
from paceline.core.ids import BlockId, RequestId
from paceline.core.weights import WeightSource
from paceline.machine.build import BuiltEngine, build_engine
from paceline.machine.host import EngineHost
from paceline.machine.memory_budget import HostedModel
from paceline.machine.models import Models
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home
from paceline.ways.tensor.group import TensorGroup
from paceline.ways.tensor.loading import load_group
from paceline.ways.tensor.process import RankProcess
from paceline.ways.tensor.rank import WAKE, RankOrder
from paceline.ways.tensor.ranks import MOST_STARTS, RankProcesses

pytestmark = [pytest.mark.sampled(8, by="test"), pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")]

BOUND_S = 120.0
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tensor") / "tiny.gguf", TINY, "Q4_K_M")


@contextmanager
def engine(model: Path, *speeds: float) -> Iterator[BuiltEngine]:
    settings = NodeSettings(str(model), context=1024, kv_tokens=4096, threads=2, draft="off", tensor=speeds)
    built = build_engine(settings, spread=load_group)
    try:
        yield built
    finally:
        built.close()


def answers(
    built: BuiltEngine, name: str, n: int = 3, *, strike: Callable[[], object] | None = None, notices: list[Notice] | None = None
) -> list[list[int]]:
    """Tokens of some prompts, sampled, side by side.

    Args:
        strike: called once some tokens have come.
        notices: takes what the first one's client is told.
    """
    for i in range(n):
        ids = tuple(np.random.default_rng(i).integers(5, TINY.vocab, 60 + 40 * i).tolist())
        sampling = SamplingParams(temperature=0.8, seed=i)
        built.engine.add(GenerationRequest(RequestId(f"{name}-{i}"), ids, TOKENS, sampling, ignore_eos=True))
    found: dict[str, list[int]] = {f"{name}-{i}": [] for i in range(n)}
    end = time.monotonic() + BOUND_S
    while any(len(tokens) < TOKENS for tokens in found.values()):
        assert time.monotonic() < end, "no more tokens come"
        for chunk in built.engine.step():
            assert chunk.error is None, chunk.error
            if chunk.request_id in found:  # others were aborted
                found[chunk.request_id] += chunk.token_ids
            if notices is not None and chunk.request_id == f"{name}-0":
                notices += chunk.notices
        if strike is not None and min(map(len, found.values())) > 4:
            strike()
            strike = None
    return list(found.values())


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    with engine(model, 1.0) as built:
        return answers(built, "alone")


def group_of(built: BuiltEngine) -> TensorGroup:
    assert isinstance(built.runner, TensorGroup)
    return built.runner


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0), (1.0, 1.0, 1.0)], ids=str)
def test_ranks_answer_as_one_process(model: Path, alone: list[list[int]], speeds: tuple[float, ...]) -> None:
    with engine(model, *speeds) as built:
        assert answers(built, "ranks") == alone
        built.engine.check_invariants()  # no block of what has ended is held


def test_kv_goes_out_and_in_as_one_process_has_it(model: Path) -> None:
    """A block of a group is the block of one process, so that disks and peers take either."""
    with engine(model, 1.0) as one, engine(model, 2.0, 1.0) as built:
        group = group_of(built)
        for each, name in ((one, "one"), (built, "two")):
            answers(each, name, 1)
        assert group.block_bytes == one.runner.block_bytes
        mine, its = (bytearray(group.block_bytes) for _ in range(2))
        part = bytearray(group.block_bytes // 2)
        for block in range(3):
            one.runner.export_block(BlockId(block), memoryview(mine))
            group.export_block(BlockId(block), memoryview(its))
            assert its == mine
        group.import_block(BlockId(100), memoryview(mine))
        group.export_block(BlockId(100), memoryview(its))
        assert its == mine
        group.export_block(BlockId(100), memoryview(part), type(group.layers)(1, 2))
        assert part == mine[len(mine) // 2 :]


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_lost_costs_no_answer(model: Path, alone: list[list[int]], strike: signal.Signals) -> None:
    with engine(model, 1.0, 1.0) as built:
        _, lost = group_of(built).processes
        assert answers(built, "struck", strike=lambda: os.kill(lost, strike)) == alone
        assert group_of(built).processes[1] != lost
        assert answers(built, "after") == alone


def test_two_that_are_stopped_at_once_are_both_replaced(model: Path, alone: list[list[int]]) -> None:
    with engine(model, 1.0, 1.0, 1.0) as built:
        _, *lost = group_of(built).processes
        assert answers(built, "struck", strike=lambda: [os.kill(rank, signal.SIGSTOP) for rank in lost]) == alone
        assert not set(lost) & set(group_of(built).processes)


def test_a_rank_that_is_stopped_while_idle_holds_nobody_up_for_ever(
    model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.ways.tensor.ranks.ASKED_S", 0.5)
    with engine(model, 1.0, 1.0) as built:
        group = group_of(built)
        os.kill(group.processes[1], signal.SIGSTOP)
        _await_state(group.processes[1], "T")
        with pytest.raises(ExecutorLost, match="rank 1 of the tensor group is gone"):
            group.export_block(BlockId(0), memoryview(bytearray(group.block_bytes)))
        assert answers(built, "after") == alone


def test_a_rank_that_is_stopped_while_it_loads_again_is_replaced(
    model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.ways.tensor.ranks.SILENT_AGAIN_S", 0.5)
    started = list[int]()
    start = RankProcesses._start

    def stopped(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        process = start(self, order, 60.0 if started else patience_s)
        if not started:
            os.kill(process.popen.pid, signal.SIGSTOP)
        started.append(process.popen.pid)
        return process

    with engine(model, 1.0, 1.0) as built:
        monkeypatch.setattr(RankProcesses, "_start", stopped)
        assert answers(built, "struck", strike=lambda: os.kill(group_of(built).processes[1], signal.SIGKILL)) == alone
        assert len(started) == 2


def test_ranks_outlast_a_stop_that_reaches_all_processes(model: Path, alone: list[list[int]]) -> None:
    with engine(model, 1.0, 1.0) as built:
        rank = group_of(built).processes[1]
        assert answers(built, "stops", strike=lambda: os.kill(rank, signal.SIGTERM)) == alone
        assert group_of(built).processes[1] == rank


def test_what_is_aborted_in_the_middle_leaves_the_group_whole(model: Path, alone: list[list[int]]) -> None:
    with engine(model, 1.0, 1.0) as built:
        for turn in range(20):
            request = RequestId(f"gone-{turn}")
            ids = tuple(np.random.default_rng(turn).integers(5, TINY.vocab, 800).tolist())
            built.engine.add(GenerationRequest(request, ids, 4, SamplingParams(seed=1)))
            built.engine.submit()
            recalled = threading.Thread(target=_recall, args=(built, request, built.executor.advanced + turn % 3))
            recalled.start()
            built.engine.collect()
            recalled.join()
            built.engine.abort(request)
        assert answers(built, "after") == alone


def _await_state(process: int, states: str) -> None:
    """Until a process is stopped (T), or gone (Z, X)."""
    end = time.monotonic() + BOUND_S
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().split()[2]
        except OSError:
            state = "X"
        if state in states:
            return
        assert time.monotonic() < end, f"process {process} is {state}"
        time.sleep(0.01)


def _recall(built: BuiltEngine, request: RequestId, layers: int) -> None:
    """Once so many layers were run, or a moment later."""
    end = time.monotonic() + 0.5
    while built.executor.advanced < layers and time.monotonic() < end:
        pass
    built.engine.recall(frozenset({request}), None)


def test_ranks_end_with_the_leader(model: Path) -> None:
    """However it ends: nothing is left that computes."""
    program = (
        "import os, sys\n"
        "from paceline.machine.build import build_engine\n"
        "from paceline.machine.settings import NodeSettings\n"
        "from paceline.ways.tensor.loading import load_group\n"
        "built = build_engine(NodeSettings(sys.argv[1], context=256, kv_tokens=512, threads=2, tensor=(1.0, 1.0)), spread=load_group)\n"
        "print(built.runner.processes[1], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=BOUND_S, check=False)
    _await_state(int(done.stdout), "ZX")


def test_a_rank_that_is_lost_while_idle_is_loaded_again_and_health_says_so_meanwhile(
    model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ask where health is bad: what mends it waits for no request."""
    settings = NodeSettings(str(model), context=1024, kv_tokens=4096, threads=2, draft="off", tensor=(1.0, 1.0))
    started, start = list[int](), RankProcesses._start

    def held(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        process = start(self, order, patience_s)
        os.kill(process.popen.pid, signal.SIGSTOP)
        started.append(process.popen.pid)
        return process

    with engine(model, 1.0, 1.0) as built:
        assert answers(built, "before") == alone  # what is remembered of it is void after the loss
        host = EngineHost(built.engine, lambda: None, built.model, built.config, SystemClock(), lacks=lambda: built.executor.lacks)
        models = Models[HostedModel](lambda *_: pytest.fail("nothing is loaded"), settings, Home.from_environment(), SystemClock())
        models.add(HostedModel(host, built.model, (), "", None))
        try:
            assert models.progress().lacks is None
            monkeypatch.setattr(RankProcesses, "_start", held)
            os.kill(group_of(built).processes[1], signal.SIGKILL)
            _until(lambda: bool(started))
            assert models.progress().lacks == "rank 1 ended, with -9"
            os.kill(started[0], signal.SIGCONT)
            _until(lambda: models.progress().lacks is None)
        finally:
            host.close()
        assert answers(built, "after") == alone
        assert group_of(built).processes[1:] == (*started,)


def test_a_group_that_waits_for_a_rank_to_end_a_batch_is_not_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes all live, and are loaded."""
    with engine(model, 1.0, 1.0) as built:
        group = group_of(built)
        with monkeypatch.context() as patient:
            patient.setattr("paceline.ways.tensor.ranks.STALL_S", BOUND_S)
            os.kill(group.processes[1], signal.SIGSTOP)
            group._memory.give_head(np.zeros((1, TINY.hidden), np.uint16), group._runner.exchange_number)
            group._ranks._lose("a batch that was given up did not end")
            assert group.lacks == "a batch that was given up did not end"
        _until(lambda: group.lacks is None)


def test_the_first_wakes_of_a_rank_that_sleeps_are_lost(model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks by itself, before it is taken for one that computes nothing."""
    monkeypatch.setattr("paceline.ways.tensor.ranks.STALL_S", BOUND_S)
    lost, send = list[bytes](), RankProcess.send

    def loses(self: RankProcess, message: bytes) -> None:
        if message == WAKE and len(lost) < 3:
            lost.append(message)
        else:
            send(self, message)

    monkeypatch.setattr(RankProcess, "send", loses)
    with engine(model, 1.0, 1.0) as built:
        group = group_of(built)
        _until(lambda: group._memory.sleeps(1))
        rank = group.processes[1]
        assert answers(built, "unwoken", 1) == alone[:1]
        assert lost
        assert group.processes[1] == rank


@pytest.mark.parametrize("broken", ["start", "load", "others"])
def test_a_group_that_can_t_be_made_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    processes = list[int]()
    start = RankProcesses._start

    def seen(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        if broken == "start" and order.rank == 2:
            monkeypatch.setattr("paceline.ways.tensor.process.Pipe", no_more)
        process = start(self, order, patience_s)
        processes.append(process.popen.pid)
        return process

    def fails(*_: object, **__: object) -> None:
        raise OutOfMemory("there is none left")

    def no_more() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(RankProcesses, "_start", seen)
    if broken == "load":
        monkeypatch.setattr(cpu, "load", fails)
    if broken == "others":
        monkeypatch.setattr(RankProcesses, "await_loads", fails)
    files, threads = _open_memory(), _kernel_threads()
    with pytest.raises(ConfigError if broken == "start" else OutOfMemory), engine(model, 1.0, 1.0, 1.0):
        pass
    assert processes
    for process in processes:
        _await_state(process, "ZX")
    gc.collect()  # the error had hold of the mapped memory
    assert (_open_memory(), _kernel_threads()) == (files, threads)


def test_why_a_rank_can_t_be_loaded_is_said_with_what_to_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankProcesses._start

    def misled(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        return start(self, replace(order, settings=replace(order.settings, model=f"{model.parent}/tinny.gguf")), patience_s)

    monkeypatch.setattr(RankProcesses, "_start", misled)
    with pytest.raises(ConfigError, match=r"Rank 1 of the tensor group can't be loaded: .*tinny.gguf") as caught, engine(model, 1.0, 1.0):
        pass
    assert caught.value.hint == "Check that it exists and that you may read it"


def test_why_a_rank_can_t_be_loaded_again_outlasts_who_heard_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody asked: the watcher did."""
    start, started = RankProcesses._start, list[int]()

    def misled(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        started.append(order.rank)
        return start(self, replace(order, settings=replace(order.settings, model=f"{model.parent}/tinny.gguf")), patience_s)

    monkeypatch.setattr("paceline.ways.tensor.ranks.AGAIN_S", 0.01)
    with engine(model, 1.0, 1.0) as built:
        group = group_of(built)
        monkeypatch.setattr(RankProcesses, "_start", misled)
        os.kill(group.processes[1], signal.SIGKILL)
        _until(lambda: "tinny.gguf" in (group.lacks or ""))
        _until(lambda: "not whole: " in _refused(group))
        assert "tinny.gguf" in _refused(group)
        assert len(started) == MOST_STARTS


def test_a_block_of_another_size_is_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model, 1.0, 1.0) as built:
        runner = group_of(built)
        monkeypatch.setattr(runner._ranks, "ask", lambda *_: b"two")
        with pytest.raises(ExecutorLost, match="gave 3 bytes of a block, not"):
            runner.export_block(BlockId(0), memoryview(bytearray(runner.block_bytes)))


def test_a_start_that_fails_counts_and_the_next_waits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[None]()

    def no_more() -> None:
        tried.append(None)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("paceline.ways.tensor.ranks.AGAIN_S", 10 * BOUND_S)
    with engine(model, 1.0, 1.0) as built:
        group = group_of(built)
        monkeypatch.setattr("paceline.ways.tensor.process.Pipe", no_more)
        os.kill(group.processes[1], signal.SIGKILL)
        _until(lambda: bool(tried))
        _until(lambda: group.lacks == "A tensor rank can't be started: Resource temporarily unavailable")
        assert not any(group.make_whole() for _ in range(5))
        assert len(tried) == 1
        monkeypatch.setattr("paceline.ways.tensor.ranks.AGAIN_S", 0.0)
        _until(lambda: "not whole: " in _refused(group))
        assert "Resource temporarily unavailable" in _refused(group)
        assert len(tried) == MOST_STARTS


def test_ranks_that_a_stopping_node_does_not_have_are_said_as_its_stop_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        raise NodeStopping(f"Rank {order.rank} can't be had: this node is stopping")

    codes = list[str]()
    with engine(model, 1.0, 1.0) as built:
        group = group_of(built)
        monkeypatch.setattr(RankProcesses, "_start", stopping)
        monkeypatch.setattr("paceline.ways.tensor.ranks.AGAIN_S", 0.0)
        monkeypatch.setattr("paceline.ways.tensor.ranks.MOST_STARTS", 1000)
        os.kill(group.processes[1], signal.SIGKILL)

        def refused() -> bool:
            try:
                group.make_whole()
            except ExecutorUnavailable as error:
                codes.append(error.code)
            return "this node is stopping" in (group.lacks or "")

        _until(refused)
        _until(lambda: refused() and bool(codes))
    assert set(codes) == {SERVER_STOPPING}


def test_a_group_that_is_whole_by_the_time_it_may_be_mended_is_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mended = list[bool]()
    with engine(model, 1.0, 1.0) as built:
        ranks = group_of(built)._ranks
        lock, let_go = ranks._replacing, threading.Event()

        class Late:
            """Somebody else held it, until all were there again."""

            def acquire(self, *, blocking: bool) -> bool:
                ranks.lost = None
                return lock.acquire(blocking=blocking)

            def release(self) -> None:
                lock.release()
                let_go.set()

        monkeypatch.setattr(RankProcesses, "_replaced", lambda ranks: mended.append(ranks.lost is not None))
        ranks.lost = "rank 1 ended"
        ranks._replacing = Late()  # type: ignore[assignment]
        assert let_go.wait(BOUND_S)
        ranks._replacing = lock
        assert all(mended), "what it would end is in the middle of a batch"


def test_threads_are_dealt_by_speed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dealt = list[int]()
    start, load = RankProcesses._start, cpu.load

    def started(self: RankProcesses, order: RankOrder, patience_s: float) -> object:
        dealt.append(order.threads)
        return start(self, order, patience_s)

    def loaded(source: WeightSource, options: LoadOptions, *more: Any, **named: Any) -> CpuRunner:
        dealt.append(options.threads)
        return load(source, options, *more, **named)

    monkeypatch.setattr(RankProcesses, "_start", started)
    monkeypatch.setattr(cpu, "load", loaded)
    built = build_engine(NodeSettings(str(model), context=256, kv_tokens=512, threads=5, tensor=(3.0, 1.0, 0.1)), spread=load_group)
    built.close()
    *others, own = dealt
    assert (own, others) == (4, [1, 1])


def _open_memory() -> int:
    """Groups' memories that this process has open."""
    return sum("paceline-tensor" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def _kernel_threads() -> int:
    return sum(thread.name.startswith("paceline-kernel-") for thread in threading.enumerate())


def _refused(group: TensorGroup) -> str:
    """What requests are told."""
    try:
        assert not group.make_whole()
    except ExecutorUnavailable as error:
        return error.message
    return ""


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < end, "it never holds"
        time.sleep(0.01)


def test_what_can_t_share_layers_loads_none_alone_instead(model: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor"):
        build_engine(NodeSettings(str(model), context=256, kv_tokens=512, tensor=(1.0, 1.0)))


def test_building_a_node_imports_no_kernel() -> None:
    """What a load takes of memory is planned by whether kernels are here, and they are kept only where that is decided before they are imported."""
    program = "import sys, paceline.node.build; print([name for name in sys.modules if name in ('numba', 'paceline.backends.cpu.team')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stdout == "[]\n"
