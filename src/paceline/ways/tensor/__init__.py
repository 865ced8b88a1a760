"""Tensor ranks: every layer's heads, inner activations and outputs shared among processes, with the bytes of one.

Importing this imports no kernel: those must not be imported before it is known where they are kept, and of which instructions they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from paceline.backends import cpu
from paceline.backends.options import LoadProgress
from paceline.core.errors import ConfigError
from paceline.engine.config import EngineConfig
from paceline.machine.setup import Setup
from paceline.machine.sizing import KvPlan
from paceline.store.home import Home

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
    if setup.settings.tensor_on and not places:
        raise ConfigError("--tensor names other machines, and here is no fleet to have them in", "Have `paceline up` serve this model.")
    if setup.kernels.lowering is None:
        raise ConfigError(f"--tensor needs compiled kernels, and {setup.kernels} would run this model", "Leave --tensor out.")
    if setup.opened.spec.qk_norm_whole:  # a rank has some of the heads
        raise ConfigError("--tensor can't run this model: its queries and keys are normed over all heads together", "Leave --tensor out.")
    if setup.opened.spec.moe is not None:
        raise ConfigError("--tensor deals no mixtures of experts yet", "Leave --tensor out, or spread its layers: --pipeline.")
    cpu.prepare(setup.kernels.lowering, Home.from_environment().kernels)
    from paceline.ways.tensor.group import GroupExecutor, TensorGroup

    group = TensorGroup(setup, kv.n_blocks, config, progress, places)
    return group, GroupExecutor(group)
