"""Ranks of one tensor group that compute in other instructions than its first give the bytes of one machine, on one host and on several; and where one is lost,
one that has others again takes its place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.loops import on_a_loop
from tests.fakes.seeded_models import TINY, write_gguf
from tests.unit.ways.tensor.test_group import BOUND_S, group_of
from tests.unit.ways.tensor.test_hosts import Hosts, group, hosted, nodes, rank_of

from paceline.backends import cpu
from paceline.backends.cpu import Lowering
from paceline.backends.table import Kernels
from paceline.core.generation import GenerationRequest, SamplingParams, TokenLogprob
from paceline.core.ids import BlockId, RequestId
from paceline.machine.build import BuiltEngine
from paceline.ways.tensor.hosted import HostedRank
from paceline.ways.tensor.rank import RankOrder
from paceline.ways.tensor.ranks import RankProcesses

OTHERS: list[Lowering] = sorted(each for each in cpu.lowerings_here() if each is not cpu.lowering_in_use())
"""On x86 AVX2 before AVX-512 with VNNI."""
OWN = cpu.lowering_in_use()
OTHERS_BY_RANK = (OTHERS * 2)[:2]
pytestmark = [
    pytest.mark.skipif(not OTHERS, reason="this processor has one set of instructions that kernels are made of"),
    pytest.mark.timeout(600),  # the first run on a machine compiles kernels
]
__all__ = ["hosted"]

SPEC = replace(TINY, hidden=384, n_heads=6, n_kv_heads=3)
"""Three ranks may have alike much of it."""
CROWD, TOKENS = 16, 16
SPEEDS = [(1.0, 1.0), (2.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0, 2.0)]
Answer = tuple[list[int], list[TokenLogprob]]
Answers = tuple[list[Answer], list[bytes], list[Answer]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("sets") / "thirds.gguf", SPEC, "Q4_K_M")


def answers(built: BuiltEngine, name: str, which: Sequence[int], strike: Callable[[], object] | None = None) -> list[Answer]:
    """To prompts of 20 to 200 tokens, side by side; every other greedy, and the others drawn from seeds.

    Args:
        strike: called once some tokens have come.
    """
    found: dict[str, Answer] = {}
    for i in which:
        ids = tuple(np.random.default_rng(i).integers(5, SPEC.vocab, 20 + 60 * (i % 4)).tolist())
        sampling = SamplingParams(temperature=0.9 * (i % 2), seed=i, logprobs=2)
        found[f"{name}-{i}"] = [], []
        built.engine.add(GenerationRequest(RequestId(f"{name}-{i}"), ids, TOKENS, sampling, ignore_eos=True))
    end = time.monotonic() + BOUND_S
    while any(len(tokens) < TOKENS for tokens, _ in found.values()):
        assert time.monotonic() < end, "no more tokens come"
        for chunk in built.engine.step():
            assert chunk.error is None, chunk.error
            tokens, logprobs = found[chunk.request_id]
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
        if strike is not None and min(len(tokens) for tokens, _ in found.values()) > TOKENS // 4:
            strike()
            strike = None
    return list(found.values())


def blocks(built: BuiltEngine) -> list[bytes]:
    """What the first blocks of KV hold."""
    found = [bytearray(built.runner.block_bytes) for _ in range(3)]
    for block, data in enumerate(found):
        built.runner.export_block(BlockId(block), memoryview(data))
    return list(map(bytes, found))


def all_of(built: BuiltEngine, strike: Callable[[], object] | None = None) -> Answers:
    """Two requests one after the other, the KV of the first, and a crowd, in whose middle `strike` is called."""
    first = answers(built, "first", [1])
    kv = blocks(built)
    return [*first, *answers(built, "second", [2])], kv, answers(built, "crowd", range(CROWD), strike)


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    """What one machine says."""
    with group(model, {}, 1.0) as built:
        return all_of(built)


@pytest.fixture(scope="module")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with on_a_loop(partial(nodes, tmp_path_factory.mktemp("hosts"), model)) as made:
        yield made


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...]) -> list[Lowering]:
    """Instructions of the ranks as they are started, here or on the other nodes: each others than the one before; and of one started again, the first rank's,
    whose kernels are compiled by then."""
    found, turns = list[Lowering](), chain(OTHERS_BY_RANK[: len(speeds) - 1], repeat(OWN))
    start, made = RankProcesses._start, HostedRank.__init__

    def with_others(order: RankOrder) -> RankOrder:
        found.append(next(turns))
        return replace(order, settings=replace(order.settings, device=Kernels(f"cpu-{found[-1]}")))

    monkeypatch.setattr(
        RankProcesses,
        "_start",
        lambda self, order, patience_s: start(self, order if order.rank in self.away else with_others(order), patience_s),
    )
    monkeypatch.setattr(HostedRank, "__init__", lambda self, order, lend=None: made(self, with_others(order), lend))
    return found


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_ranks_in_the_memory_of_one_host(model: Path, alone: Answers, dealt: list[Lowering], speeds: tuple[float, ...]) -> None:
    with group(model, {}, *speeds) as built:
        assert all_of(built, lambda: os.kill(group_of(built).processes[-1], signal.SIGKILL)) == alone
        assert group_of(built).losses == 1
        assert dealt == [*OTHERS_BY_RANK[: len(speeds) - 1], OWN]


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_ranks_of_other_nodes(
    model: Path,
    alone: Answers,
    dealt: list[Lowering],
    hosts: Hosts,
    hosted: list[HostedRank],
    speeds: tuple[float, ...],
) -> None:
    with group(model, hosts.places(*"bc"[: len(speeds) - 1]), *speeds) as built:
        assert all_of(built, lambda: os.kill(hosted[0].process.pid, signal.SIGKILL)) == alone
        assert group_of(built).losses == 1
        assert rank_of(built).gone is None
        assert dealt == [*OTHERS_BY_RANK[: len(speeds) - 1], OWN]
