"""A `TextEncoder` without a model, for tests of the server: a token is a byte, and a vector counts them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.fakes.scripted_inference import SIZE, ByteTokenizer

from paceline.core.encoding import Encoded, EncodeRequest, EncoderModel, Task
from paceline.machine.embedder import Ids, Vectors
from paceline.machine.encoders import LocalEncoders


class ScriptedEncoder:
    """Says how often each of the first bytes occurs."""

    name, created, max_tokens, dimensions = "counts", 1_700_000_000, 64, 8

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()

    def vectors(self, texts: Sequence[Ids]) -> Vectors:
        return np.stack([np.bincount(ids, minlength=SIZE)[: self.dimensions].astype(np.float32) for ids in texts])


class ScriptedEncoders:
    """Implements `core.encoding.Encoders`: `counts`, and `judge`, which says how often a text has the query's first letter."""

    def __init__(self) -> None:
        self._local = LocalEncoders(ScriptedEncoder())
        self.asked: list[EncodeRequest] = []

    def encoders(self) -> Sequence[EncoderModel]:
        return (*self._local.encoders(), EncoderModel("judge", 1_700_000_000, frozenset({Task.RERANK}), 64))

    def expects(self, name: str) -> bool:
        return self._local.expects(name)

    async def encode(self, name: str, request: EncodeRequest) -> Encoded:
        self.asked.append(request)
        if request.query is None:
            return await self._local.encode(name, request)
        scores = [float(text.count(request.query[0])) for text in request.inputs if isinstance(text, str)]
        return Encoded(np.array(scores, np.float64), sum(map(len, request.inputs)))

    def close(self) -> None:
        self._local.close()
