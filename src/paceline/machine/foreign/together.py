"""This machine's own models and those of foreign engines as one `core.inference.Inference`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.generation import GenerationRequest
from paceline.core.inference import ChunkStream, Inference, Progress, ServedModel
from paceline.core.stats import EngineStats


class Together:
    """Own models first: of two with one name, a foreign engine's is not served.

    Args:
        own: this machine's, which decides about health and about names that no part serves.
    """

    def __init__(self, own: Inference, foreign: Inference) -> None:
        self._own, self._foreign = own, foreign

    def models(self) -> Sequence[ServedModel]:
        own = self._own.models()
        names = {model.name for model in own}
        return (*own, *(model for model in self._foreign.models() if model.name not in names))

    def expects(self, model: str) -> bool:
        return self._own.expects(model) or self._foreign.expects(model)

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        own = {one.name for one in self._own.models()}
        is_foreign = model not in own and not self._own.expects(model) and self._foreign.expects(model)
        return (self._foreign if is_foreign else self._own).generate(model, request)

    def stats(self) -> EngineStats:
        own, foreign = self._own.stats(), self._foreign.stats()
        return replace(own, running=own.running + foreign.running, waiting=own.waiting + foreign.waiting)

    def progress(self) -> Progress:
        return self._own.progress()
