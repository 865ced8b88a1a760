"""What this node has loaded, as it offers it to the fleet."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from paceline.core.errors import UnknownModel
from paceline.core.generation import GenerationRequest
from paceline.core.inference import ChunkStream, Inference, ServedModel
from paceline.net.member.meter import FleetMeter
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.tokenizer import pack_tokenizer, tokenizer_digest
from paceline.ways.forward.service import LoadedModel

STALL_S = 6.0
"""Without a part of a step, or a look for machines, until what is run for others counts as stalled. Raising it: an engine that hangs is left later."""
STALLED_TIMES = 5.0
"""By what factor a step may take longer than steps like it took."""


class LocalModels:
    """A `generate_service.LoadedModels` over this node's own engine.

    Args:
        inference: the engine; None for a node that serves no model.
        loaded: what exactly it has loaded, by name.
        meter: counts what is run for others.
    """

    def __init__(self, inference: Inference | None, loaded: tuple[LoadedModel, ...], meter: FleetMeter) -> None:
        self.inference = inference
        self._loaded = {model.name: model for model in loaded}
        self._meter = meter
        self.is_up = True
        """The engine takes requests: what it has loaded is offered."""
        self._packed: dict[str, asyncio.Task[tuple[str, bytes]]] = {}

    def attach(self, inference: Inference, loaded: LoadedModel) -> None:
        """Serve a model from now on, on a node that served none."""
        self.inference = inference
        self._loaded = {loaded.name: loaded}

    @property
    def all(self) -> tuple[LoadedModel, ...]:
        """What is offered now."""
        return tuple(self._loaded.values()) if self.is_up else ()

    def find(self, name: str) -> LoadedModel | None:
        """What is loaded under a name."""
        loaded, served = self._loaded.get(name), self.served(name)
        return loaded if loaded is None or served is None else replace(loaded, max_context=served.max_context)

    def served(self, name: str) -> ServedModel | None:
        """The same, as the API shows it."""
        models = () if self.inference is None else self.inference.models()
        return next((model for model in models if model.name == name), None)

    async def packed_tokenizer(self, name: str) -> tuple[str, bytes]:
        """SHA-256 (hex) and bytes of a model's tokenizer. Packed once, in a thread.

        Raises:
            UnknownModel: there is none to give.
        """
        task = self._packed.get(name)
        if task is None:
            task = self._packed[name] = asyncio.create_task(asyncio.to_thread(self._pack, name))
        return await asyncio.shield(task)

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """Run a request of another node.

        Raises:
            UnknownModel: nothing is loaded under that name.
        """
        if self.inference is None:
            raise UnknownModel(f"The model {model[:200]!r} is not loaded here")
        self._meter.served += 1
        return self.inference.generate(model, request)

    def advances(self) -> bool:
        """Whether the engine gets on with what it has to do."""
        if self.inference is None:
            return False
        progress = self.inference.progress()
        return progress.error is None and progress.seconds_since_sign <= max(STALL_S, STALLED_TIMES * progress.step_expected_s)

    def _pack(self, name: str) -> tuple[str, bytes]:
        model = self.served(name)
        if model is None or not isinstance(model.tokenizer, BoundedTokenizer):
            raise UnknownModel(f"The model {name[:200]!r} has no tokenizer that could be sent")
        packed = pack_tokenizer(model.tokenizer.model)
        return tokenizer_digest(packed), packed
