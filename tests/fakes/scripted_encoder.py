"""A `TextEncoder` without a model, for tests of the server: a token is a byte, and a vector counts them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.fakes.scripted_inference import SIZE, ByteTokenizer

from paceline.server.embedder import Ids, Vectors


class ScriptedEncoder:
    """Says how often each of the first bytes occurs."""

    name, created, max_tokens, dimensions = "counts", 1_700_000_000, 64, 8

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()

    def vectors(self, texts: Sequence[Ids]) -> Vectors:
        return np.stack([np.bincount(ids, minlength=SIZE)[: self.dimensions].astype(np.float32) for ids in texts])
