"""Loads here what others ran: the rest of a model whose first layers are loaded already, if this machine has the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.backends.memory import available_bytes
from paceline.backends.options import LoadOptions
from paceline.backends.table import Kernels
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.engine.local import LayerRunner
from paceline.node import accelerator
from paceline.node.build import load_runner
from paceline.node.shapes import model_shape
from paceline.node.sizing import plan_kv
from paceline.parallel.local_route import LocalRoute
from paceline.store.catalog import OpenedModel


def loads_the_rest(
    own: NodeId, opened: OpenedModel, kernels: Kernels, head: LayerRunner[Any], options: LoadOptions, max_running: int
) -> Callable[[], LocalRoute]:
    """What a `Fallback` loads.

    Args:
        own: this node.
        opened: the model, whole on this machine.
        kernels: as the head's, so that bytes are the same.
        head: embedding, head and first layers.
        options: the head's.
        max_running: sequences side by side.
    """
    spec = opened.spec
    layers = LayerRange(head.layers.stop, spec.n_layers)

    def load() -> LocalRoute:
        """The route.

        Raises:
            OutOfMemory: it does not fit.
        """
        kv = plan_kv(
            spec,
            free_bytes=accelerator.free_cuda_bytes() if kernels is Kernels.CUDA else available_bytes(),
            weights_bytes=len(layers) * model_shape(spec, options.weights).layer_bytes,
            max_running=max_running,
            block_size=options.block_size,
            context=None,
            kv_tokens=None,
            layers=layers,
        )
        runner = load_runner(
            kernels, opened.weights, replace(options, layers=layers, n_blocks=min(kv.n_blocks, head.n_blocks), edges=False)
        )
        return LocalRoute(own, opened.name, runner, max_rows=options.max_rows, max_context=spec.max_context, width=spec.hidden)

    return load
