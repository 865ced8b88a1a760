"""Tasks of many threads: each is done once, whoever claims it, and no cache line is written by all. Where memory has nodes, weights lie and threads run at theirs."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from tests.conformance.suites.layer_runner import Rows, RunnerCase, blocks, run, same, tokens

from paceline.backends import cpu
from paceline.backends.cpu import sync
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.sync import groups_of, node_of
from paceline.backends.numerics import SeededWeights
from paceline.core.model import ModelSpec, RopeSpec, WeightsFormat
from paceline.store.home import Home

pytestmark = pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")

SPEC = ModelSpec(
    model_type="llama", n_layers=3, hidden=96, n_heads=6, n_kv_heads=2, head_dim=32, ffn=160, vocab=307, max_context=512,
    rms_eps=1e-5, rope=RopeSpec(10_000.0), tied_head=True,
)  # fmt: skip

claim, finish, post, share_of, wait_for = (
    njit(each.py_func) for each in (sync.claim, sync.finish, sync.post, sync.share_of, sync.wait_for)
)
"""With a way in from Python."""


class Claims:
    """A control array, and which line each thread's atomic additions were to."""

    def __init__(self, threads: int, n_nodes: int) -> None:
        self.groups = groups_of(threads, n_nodes)
        self.own = [rank * self.groups // threads for rank in range(threads)]
        self.words = np.zeros(sync.GROUPS_AT + 2 * sync.WORD * (self.groups + 1), np.int64)
        self.at = self.words.ctypes.data
        self.writers = Counter[int]()

    def claim(self, rank: int) -> int:
        before = self.words.copy()
        task, _ = claim(self.at, self.own[rank], self.groups)
        if task >= 0:
            finish(self.at, self.own[rank])
        self.writers.update((np.flatnonzero(self.words != before) // sync.WORD).tolist())
        return task


@given(threads=st.integers(1, 64), n_nodes=st.integers(1, 4), count=st.integers(1, 200), order=st.randoms(use_true_random=False))
def test_each_task_is_claimed_once_in_whatever_order_threads_come(threads: int, n_nodes: int, count: int, order: object) -> None:
    claims = Claims(threads, n_nodes)
    for phase in (1, 2):
        post(claims.at, 3, 7, count, claims.groups)
        done, awake = list[int](), list(range(threads))
        while awake:
            rank = order.choice(awake)  # type: ignore[attr-defined]
            task = claims.claim(rank)
            if task < 0:
                awake.remove(rank)
            else:
                done.append(task)
        assert sorted(done) == list(range(count))
        wait_for(claims.at, phase * count, claims.groups)


def test_no_line_is_written_for_every_task() -> None:
    """64 threads at the pace of one another: a line has an eighth of what one word and one count for all would have."""
    claims, count = Claims(64, 2), 448
    post(claims.at, 3, 7, count, claims.groups)
    turns = [[claims.claim(rank) for rank in range(64)] for _ in range(count // 64)]
    assert claims.groups == 8
    assert max(claims.writers.values()) == count // 8
    shares = [share_of(count, group, 8) for group in range(8)]
    assert all(shares[claims.own[rank]][0] <= task < shares[claims.own[rank]][1] for tasks in turns for rank, task in enumerate(tasks))


def test_a_task_alone_is_of_the_conductors_group() -> None:
    claims = Claims(64, 2)
    post(claims.at, 3, 7, 1, claims.groups)
    assert [claims.claim(63), claims.claim(0)] == [0, -1]
    assert share_of(1, 0, 8) == (0, 1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="macOS binds no threads")
def test_a_machines_nodes_are_those_this_process_may_run_on(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for number, text in enumerate([f"{allowed[0]}", f"{allowed[-1]},4000-4095", "5000", ""]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}/cpulist").write_text(f"{text}\n")
    assert sync.nodes(tmp_path) == [{allowed[0]}, {allowed[-1]}]
    (tmp_path / "node1/cpulist").write_text("4000\n")
    assert sync.nodes(tmp_path) == []
    assert sync.nodes(tmp_path / "none") == []
    assert [node_of(rank, 5, 2) for rank in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="macOS binds no threads")
def test_many_threads_at_two_nodes_give_the_bytes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = RunnerCase(
        "int4", lambda *args: cpu.load(args[0], replace(args[1], kernel_cache=Home.from_environment().kernels)), SPEC, WeightsFormat.INT4
    )
    alone = case.runner(threads=1)
    allowed = os.sched_getaffinity(0)
    nodes = [frozenset({min(allowed)}), frozenset({max(allowed)})]
    monkeypatch.setattr(sync, "nodes", lambda: nodes)
    packed = Counter[frozenset[int]]()
    bind = sync.bind
    monkeypatch.setattr(sync, "bind", lambda node: (packed.update([node]), bind(node)))
    many = case.runner(threads=19)
    try:
        team = {thread.name: os.sched_getaffinity(thread.native_id or 0) for thread in threading.enumerate()}
        bound = [team[f"paceline-kernel-{rank}"] for rank in range(1, 19)]
        assert bound == [nodes[node_of(rank, 19, 2)] for rank in range(1, 19)]
        assert os.sched_getaffinity(0) == allowed
        assert min(packed[node] for node in nodes) > 8  # threads that pack are bound too
        ids = tokens(80, SPEC.vocab)
        for first, count in ((0, 70), (70, 9), (79, 1)):
            rows = [Rows(ids[first : first + count], first, blocks(each, 80)) for each in (alone, many)]
            assert same(alone, run(alone, rows[0])[0], run(many, rows[1])[0])
    finally:
        alone.close()
        many.close()


def test_weights_are_packed_by_the_node_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, keys and values, which are one product: node 0 reads the first half of all their outputs."""
    from paceline.backends.cpu import weights

    spec = replace(SPEC, hidden=4096, n_heads=64, n_kv_heads=32, head_dim=32, ffn=4096, n_layers=1)
    taken = list[tuple[str, int, int]]()
    monkeypatch.setattr(sync, "nodes", lambda: [frozenset({0}), frozenset({1})])
    monkeypatch.setattr(
        weights, "_pack_all", lambda source, todo, *_: taken.extend((slab.name, slab.rows.start, slab.node) for slab in todo)
    )
    weights.pack_model(SeededWeights(spec), spec.all_layers, lambda _: Form.Q4_1, edges=False, threads=2)
    of = {name.split(".")[-2]: {(start, node) for other, start, node in taken if other == name} for name, _, _ in taken}
    assert {node for _, node in of["q_proj"]} == {0}
    assert {node for _, node in of["k_proj"] | of["v_proj"]} == {1}
    assert all(node == (start >= 2048) for name in ("o_proj", "gate_proj", "up_proj", "down_proj") for start, node in of[name])
