"""Puts an encoder together for the server: its weights in memory, its tokenizer in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.backends.bert import Bert
from paceline.core.clock import Clock
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.encoder_files import OpenedEncoder, open_encoder


class LoadedEncoder:
    """A `server.embeddings.TextEncoder`."""

    def __init__(self, opened: OpenedEncoder, created: int) -> None:
        """Load. Blocks.

        Raises:
            ModelFileError: the weights can't be read.
        """
        self._bert = Bert(opened.tensors)
        self.name = opened.name
        self.created = created
        self.tokenizer = BoundedTokenizer(opened.tokenizer)
        self.tokenizer.begin()

    @property
    def max_tokens(self) -> int:
        return self._bert.spec.max_tokens

    @property
    def dimensions(self) -> int:
        return self._bert.spec.hidden

    def vectors(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        return self._bert.vectors(texts)

    @property
    def summary(self) -> str:
        """The encoder in one line."""
        spec = self._bert.spec
        return f"{self.name} for embeddings of {spec.hidden} numbers, texts of up to {spec.max_tokens} tokens, {spec.pooling} pooling"


def load_encoder(ref: str, clock: Clock) -> LoadedEncoder:
    """Find an encoder and load it.

    Raises:
        UserError: it is not here, is none, or can't be read.
    """
    return LoadedEncoder(open_encoder(ref), int(clock.wall()))
