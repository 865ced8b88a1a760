"""A tensor group is a `LayerRunner`: the suite, for two ranks that are real processes, even and not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.suites.layer_runner import AT_ONCE, CountedSource, LayerRunnerSuite, RunnerCase
from tests.fakes.seeded_models import TINY, write_gguf

from paceline.backends import cpu, table
from paceline.backends.options import DeviceKind, LoadOptions, LoadProgress
from paceline.core.model import WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import open_weights
from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.ways.tensor.group import TensorGroup

pytestmark = [pytest.mark.sampled(1, by="case"), pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")]


@dataclass(frozen=True, slots=True)
class FileCase(RunnerCase):
    """Of weights that all ranks can open."""

    path: Path = Path()

    def source(self) -> CountedSource:
        return CountedSource(open_weights(self.path, DigestCache(Home.from_environment())))


def load(
    path: Path, speeds: tuple[float, ...], source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None
) -> LayerRunner[Any]:
    kernels = table.choose(source.spec, options.weights, device=DeviceKind.CPU)
    settings = NodeSettings(str(path), options.weights, device=kernels, tensor=speeds)
    return TensorGroup(source, settings, replace(options, kernel_cache=Home.from_environment().kernels), AT_ONCE, progress)


@pytest.fixture(scope="module", params=[(1.0, 1.0), (3.0, 1.0)], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunnerCase:
    path = write_gguf(tmp_path_factory.mktemp("groups") / "tiny.gguf", TINY, "Q4_K_M")
    return FileCase("group", partial(load, path, request.param), TINY, WeightsFormat.STORED, path=path)


@pytest.fixture(scope="module")
def runner(case: RunnerCase) -> Iterator[LayerRunner[Any]]:
    loaded = case.runner()
    yield loaded
    loaded.close()
    loaded.close()


class TestGroups(LayerRunnerSuite):
    """The suite, without what loads once more to look at how one process reads a file, or how it refuses: a group's own tests do."""

    test_only_the_tensors_asked_for_are_read_and_once = None  # type: ignore[assignment]
    test_edges_are_read_once = None  # type: ignore[assignment]
    test_progress_is_told_in_bytes = None  # type: ignore[assignment]
    test_a_pool_larger_than_memory_is_refused = None  # type: ignore[assignment]
    test_closing_twice_is_closing = None  # type: ignore[assignment]
    test_threads_change_nothing = None  # type: ignore[assignment]
