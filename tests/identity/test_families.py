"""Promise 1 in every family: how rows are cut, batched, shared among threads and stages changes no byte, on tiny random models as transformers saves them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.conformance.suites.layer_runner import Outcome, Rows, plan_of, run
from tests.golden import reference as hf
from tests.identity.test_matrix import needs_kernels

from paceline.backends import cpu
from paceline.backends.options import LoadOptions
from paceline.core.model import LayerRange, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.executor import Path as KernelPath
from paceline.engine.local import LayerRunner
from paceline.store.digests import DigestCache
from paceline.store.hf_folder import SafetensorsWeights
from paceline.store.home import Home

pytestmark = [needs_kernels, pytest.mark.sampled(5, by="source"), pytest.mark.timeout(600)]

LENGTH = 560
"""Tokens: more than a segment of keys."""
CUTS = ((560,), (1, 2, 3, 17, 64, 200, 273), (511, 2, 47))


@pytest.fixture(scope="module", params=[*hf.FAMILIES, "a hidden size of 112", "experts and biases of a hidden size of 48"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    folder = hf.save_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    found = SafetensorsWeights(folder, DigestCache(Home(folder)))
    if (reason := cpu.refuses(found.spec)) is not None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def ids(source: WeightSource) -> list[int]:
    return np.random.default_rng(3).integers(0, source.spec.vocab, LENGTH).tolist()


def load(source: WeightSource, threads: int, layers: LayerRange | None = None) -> LayerRunner[Any]:
    return cpu.load(source, LoadOptions(layers or source.spec.all_layers, WeightsFormat.INT8, 128, threads=threads))


@pytest.fixture(scope="module", params=[1, 3], ids=["1 thread", "3 threads"])
def runner(request: pytest.FixtureRequest, source: WeightSource) -> Iterator[LayerRunner[Any]]:
    loaded = load(source, request.param)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def alone(source: WeightSource, ids: list[int]) -> Outcome:
    """Token by token, on one thread."""
    loaded = load(source, 1)
    table = list(range(36))
    found = Outcome.joined([run(loaded, Rows([token], place, table, KernelPath.GENERATED))[0] for place, token in enumerate(ids)])
    loaded.close()
    return found


def same(found: Outcome, expected: Outcome) -> None:
    np.testing.assert_array_equal(found.x_TD, expected.x_TD)
    np.testing.assert_array_equal(found.logits_TV, expected.logits_TV)


@pytest.mark.parametrize("cut", CUTS)
def test_chunks_and_neighbours_change_nothing(runner: LayerRunner[Any], ids: list[int], alone: Outcome, cut: tuple[int, ...]) -> None:
    table, other, at = list(range(40, 76)), list(range(80, 90)), 0
    parts = list[Outcome]()
    for turn, count in enumerate(cut):
        rows = Rows(ids[at : at + count], at, table)
        neighbour = Rows(ids[3 * turn : 3 * turn + 3], 3 * turn, other, KernelPath.GENERATED)
        parts.append(run(runner, neighbour, rows)[1])
        at += count
    same(Outcome.joined(parts), alone)


def test_a_computed_beginning_changes_nothing(runner: LayerRunner[Any], ids: list[int], alone: Outcome) -> None:
    shared, first, second = list(range(20)), list(range(40, 56)), list(range(60, 76))
    run(runner, Rows(ids[:400], 0, shared + first))
    # Another sequence with the same beginning, whose blocks are computed already.
    same(run(runner, Rows(ids[320:], 320, shared + second))[0], alone.tail(320))


def test_stages_change_nothing(source: WeightSource, ids: list[int], alone: Outcome) -> None:
    layers = source.spec.n_layers
    stages = [load(source, 2, LayerRange(*ends)) for ends in ((0, 1), (1, layers))]
    plan = plan_of([Rows(ids, 0, list(range(36)))])
    x_TD = stages[0].embed(np.array(ids, np.int32))
    for stage in stages:
        x_TD = stage.run_layers(x_TD, plan)
    np.testing.assert_array_equal(x_TD, alone.x_TD)
    assert {stage.numerics_id for stage in stages} == {stages[0].numerics_id}
    for stage in stages:
        stage.close()
