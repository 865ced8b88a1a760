"""Loads a model, or a stage's layers, as tensor ranks.

Importing this imports no kernel, because a process must know its folder of kernels and its instructions before it imports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from paceline.backends import cpu, table
from paceline.backends.cpu.shares import undivided
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.table import Kernels
from paceline.core.errors import ConfigError
from paceline.core.model import ModelSpec
from paceline.core.weights import WeightSource
from paceline.engine.config import EngineConfig
from paceline.machine.devices import fastest_device
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import Setup
from paceline.machine.sizing import KvPlan
from paceline.store.home import Home
from paceline.store.partial import path_of

if TYPE_CHECKING:
    from paceline.ways.tensor.group import GroupExecutor, TensorGroup
    from paceline.ways.tensor.hosting import RankPlace


def load_group(
    setup: Setup,
    kv: KvPlan,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    places: Mapping[int, RankPlace] = MappingProxyType({}),
) -> tuple[TensorGroup, GroupExecutor]:
    """A model shared among the ranks that its settings name, and what drives them.

    Args:
        places: of ranks that run on other machines.

    Raises:
        UserError: a rank can't be loaded.
    """
    settings, opened = setup.settings, setup.opened
    if settings.tensor_on and not places:
        raise ConfigError("--tensor names other machines, and here is no fleet to have them in", "Have `paceline up` serve this model.")
    _check(opened.spec, setup.kernels)
    kernel_cache = Home.from_environment().kernels
    cpu.prepare(setup.kernels.lowering, kernel_cache)
    from paceline.ways.tensor.away import AwayRank
    from paceline.ways.tensor.group import GroupExecutor, TensorGroup

    settings = replace(settings, model=str(opened.location.path), weights=setup.weights, device=setup.kernels)
    layers = opened.spec.all_layers
    options = LoadOptions(layers, setup.weights, kv.n_blocks, threads=setup.threads, max_rows=config.max_rows, kernel_cache=kernel_cache)
    away = {rank: partial(AwayRank, place, setup) for rank, place in places.items()}
    group = TensorGroup(opened.weights, settings, options, config.max_logits_rows, progress, away)
    return group, GroupExecutor(group)


def load_stage(speeds: Sequence[float], source: WeightSource, options: LoadOptions, progress: LoadProgress) -> TensorGroup:
    """A stage's layers, each shared among ranks of this machine. Once it has lost one it runs no more: what holds it loads it anew.

    Args:
        speeds: of the ranks, this process's first.
        options: of all of them together.

    Raises:
        UserError: a rank can't be loaded.
    """
    kernels = table.choose(source.spec, options.weights, device=fastest_device())
    _check(source.spec, kernels)
    cpu.prepare(kernels.lowering, options.kernel_cache)
    from paceline.ways.tensor.group import TensorGroup

    settings = NodeSettings(str(path_of(source)), options.weights, device=kernels, tensor=tuple(speeds))
    return TensorGroup(source, settings, options, 0, progress)


def _check(spec: ModelSpec, kernels: Kernels) -> None:
    """Raises ConfigError where ranks can't share a model's layers."""
    if kernels.lowering is None:
        raise ConfigError(f"--tensor needs compiled kernels, and {kernels} would run this model", "Leave --tensor out.")
    if (reason := undivided(spec)) is not None:
        raise ConfigError(f"--tensor can't run this model: {reason}", "Leave --tensor out, or spread its layers: --pipeline.")
