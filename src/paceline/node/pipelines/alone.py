"""Loads here what others ran: the rest of a model whose first layers are loaded already, if this machine has the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerRange
from paceline.engine.local import LayerRunner
from paceline.node.setup import Setup
from paceline.parallel.local_route import LocalRoute


def loads_the_rest(own: NodeId, setup: Setup, head: LayerRunner[Any], max_rows: int) -> Callable[[], LocalRoute]:
    """What a `Fallback` loads.

    Args:
        setup: the head's, so that bytes are the same; the model is whole on this machine.
        head: embedding, head and first layers.
    """
    spec = setup.opened.spec
    layers = LayerRange(head.layers.stop, spec.n_layers)

    def load() -> LocalRoute:
        """The route.

        Raises:
            OutOfMemory: it does not fit.
        """
        kv = setup.room(layers, edges=False, unasked=True)
        runner = setup.load(layers, min(kv.n_blocks, head.n_blocks * head.block_size // BLOCK_TOKENS), max_rows, edges=False)
        return LocalRoute(own, setup.opened.name, runner, max_rows=max_rows, max_context=spec.max_context, width=spec.hidden)

    return load
