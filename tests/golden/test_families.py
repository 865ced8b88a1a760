"""A tiny random model of every family: our logits and greedy tokens against transformers.

The reference computes in float32 on weights rounded as the format rounds them. How far a bf16 implementation may stray from it is
shown by transformers itself in bf16: a row of ours may err 1.5 times as much as its rows do, in the median (a wrong formula errs a
hundred times as much). In a mixture of experts a rounding can turn a router's near tie, on both sides; hence medians.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.golden import reference as hf

from paceline.backends import cpu, mlx, table
from paceline.backends import torch as portable
from paceline.core.errors import UnsupportedModel
from paceline.core.model import WeightsFormat
from paceline.core.weights import WeightSource
from paceline.store.catalog import OpenedModel
from paceline.store.digests import DigestCache
from paceline.store.hf_folder import SafetensorsWeights
from paceline.store.home import Home

LOADS = {"torch": portable.load, "cpu": cpu.load, "mlx": mlx.load}
STRAY, STRAY_INT8 = 1.5, 2.5
"""Error at most, in transformers' own in bf16. The second: of our kernels for int4, which take activations as int8."""
NEAR_TIE = 0.1
"""Standard deviations of the logits: some five times a token's usual error."""


@dataclass(frozen=True, slots=True)
class Golden:
    source: WeightSource
    weights: WeightsFormat
    exact: Any
    """transformers in float32."""
    ids: list[int]
    logits: hf.Logits
    stray: float
    """Median error of a row in transformers' own bf16."""


@pytest.fixture(scope="module", params=list(hf.FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[WeightsFormat.BF16, WeightsFormat.INT8, WeightsFormat.INT4])
def golden(request: pytest.FixtureRequest, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    weights: WeightsFormat = request.param
    source = SafetensorsWeights(saved, DigestCache(Home(saved)))
    exact = hf.reference(weights, saved, tmp_path_factory.mktemp("rounded"))
    ids = np.random.default_rng(0).integers(0, source.spec.vocab, 150).tolist()
    logits = hf.logits_of(exact, ids)
    stray = float(np.median(row_errors(hf.logits_of(hf.in_bf16(exact), ids), logits)))
    return Golden(source, weights, exact, ids, logits, stray)


@pytest.fixture(scope="module", params=list(LOADS))
def runner(request: pytest.FixtureRequest, golden: Golden, kernel_cache: Path) -> Iterator[Any]:
    spec = golden.source.spec
    if request.param == "cpu" and (not cpu.runs_here() or cpu.refuses(spec) is not None):
        pytest.skip("no compiled kernels for this processor or family")
    if request.param == "mlx" and (golden.weights is not WeightsFormat.BF16 or spec.moe is not None or table.mlx_refuses(spec) is not None):
        pytest.skip("MLX quantises otherwise than the reference, and has not every family")
    if request.param == "torch" and golden.weights is not WeightsFormat.BF16:
        pytest.skip("torch holds bf16")
    if request.param == "torch" and (reason := table.torch_refuses(spec)) is not None:
        with pytest.raises(UnsupportedModel, match=re.escape(reason)):
            portable.load(golden.source, hf.options(spec, golden.weights, kernel_cache))
        pytest.skip(reason)
    loaded = LOADS[request.param](golden.source, hf.options(golden.source.spec, golden.weights, kernel_cache))
    yield loaded
    loaded.close()


def row_errors(found: hf.Logits, exact: hf.Logits) -> hf.Logits:
    """Root mean square error of each row, in standard deviations of the logits."""
    return np.sqrt(np.square(found - exact).mean(1)) / exact.std()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", hf.MORE)
def test_what_differs_in_little_is_that_of_transformers(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    if not cpu.runs_here():
        pytest.skip("no compiled kernels for this processor")
    source = SafetensorsWeights(hf.save_tiny(family, tmp_path), DigestCache(Home(tmp_path)))
    assert cpu.refuses(source.spec) is None
    ids = np.random.default_rng(0).integers(0, source.spec.vocab, 100).tolist()
    (tmp_path / "rounded").mkdir()
    exact = hf.reference(WeightsFormat.BF16, tmp_path, tmp_path / "rounded")
    logits = hf.logits_of(exact, ids)
    stray = float(np.median(row_errors(hf.logits_of(hf.in_bf16(exact), ids), logits)))
    loaded = cpu.load(source, hf.options(source.spec, WeightsFormat.BF16, kernel_cache))
    found = hf.ours(loaded, ids)
    loaded.close()
    assert float(np.median(row_errors(found, logits))) < STRAY * stray


def test_longer_contexts_turn_by_the_longer_rope(tmp_path: Path, kernel_cache: Path) -> None:
    """transformers takes it for all positions once a text is longer than the first context."""
    if not cpu.runs_here():
        pytest.skip("no compiled kernels for this processor")
    saved = hf.save_tiny("phi3 long", tmp_path)
    source = SafetensorsWeights(saved, DigestCache(Home(saved)))
    opened = OpenedModel("phi3", source.spec, source, cast("Any", None), saved).of_context(1024)
    assert (source.spec.max_context, opened.spec.max_context) == (640, 1024)
    (tmp_path / "rounded").mkdir()
    exact = hf.reference(WeightsFormat.BF16, saved, tmp_path / "rounded")
    ids = np.random.default_rng(0).integers(0, source.spec.vocab, 700).tolist()
    logits = hf.logits_of(exact, ids)
    stray = float(np.median(row_errors(hf.logits_of(hf.in_bf16(exact), ids), logits)))
    for weights, is_theirs in ((opened.weights, True), (source, False)):
        loaded = cpu.load(weights, hf.options(source.spec, WeightsFormat.BF16, kernel_cache))
        found = hf.ours(loaded, ids[:640])
        loaded.close()
        assert (float(np.median(row_errors(found, logits[:640]))) < STRAY * stray) == is_theirs


@pytest.mark.sampled(5, by="saved")
def test_logits_are_those_of_transformers(runner: Any, golden: Golden) -> None:
    found = hf.ours(runner, golden.ids)
    stray = STRAY_INT8 if golden.weights is WeightsFormat.INT4 else STRAY
    assert float(np.median(row_errors(found, golden.logits))) < stray * golden.stray
    assert float((found.argmax(1) == golden.logits.argmax(1)).mean()) > 0.8


@pytest.mark.sampled(5, by="saved")
def test_greedy_tokens_are_those_of_transformers(runner: Any, golden: Golden) -> None:
    """Up to the reference's first near tie, from where rounding decides."""
    if golden.weights is not WeightsFormat.BF16:
        pytest.skip("greedy answers are compared where weights are bf16")
    compared = 0
    for seed in range(12):
        prompt = np.random.default_rng(seed).integers(2, golden.source.spec.vocab, 20).tolist()
        answer, leads = hf.greedy_of(golden.exact, prompt, 8)
        clear = next((place for place, lead in enumerate(leads) if lead < NEAR_TIE * golden.logits.std()), len(leads))
        assert hf.our_greedy(runner, prompt, 8)[:clear] == answer[:clear]
        compared += clear
    assert compared >= 8
