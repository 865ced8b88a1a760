"""Sizes and shape of an encoder, which turns a text into one vector. Decoders, which write text, are `core.model`'s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from paceline.core.weights import Shape, StoredTensor


class Pooling(StrEnum):
    """How the vectors of a text's tokens become one."""

    MEAN = "mean"
    CLS = "cls"
    """The first token's."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes of a BERT: every token sees every other, positions are learned, norms stand behind their blocks."""

    n_layers: int
    hidden: int
    n_heads: int
    ffn: int
    vocab: int
    max_tokens: int
    """Of a text, with what the tokenizer adds around it: as many positions as were learned."""
    n_types: int
    """Rows of the table of segments, of which a text alone uses the first."""
    norm_eps: float
    pooling: Pooling = Pooling.MEAN
    normalise: bool = True
    """Vectors are of length 1."""


WORDS, POSITIONS, TYPES = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
FIRST_NORM = "embeddings.LayerNorm"


def encoder_shapes(spec: EncoderSpec) -> Iterator[tuple[str, Shape]]:
    """Every tensor an encoder of this spec has, by Hugging Face's name, and its shape, [N, K] for a matrix."""
    hidden, ffn = spec.hidden, spec.ffn
    yield WORDS, (spec.vocab, hidden)
    yield POSITIONS, (spec.max_tokens, hidden)
    yield TYPES, (spec.n_types, hidden)
    norms = [FIRST_NORM]
    for layer in (f"encoder.layer.{i}" for i in range(spec.n_layers)):
        attention = [f"attention.self.{name}" for name in ("query", "key", "value")]
        matrices = [(name, hidden, hidden) for name in (*attention, "attention.output.dense")]
        for name, n, k in (*matrices, ("intermediate.dense", ffn, hidden), ("output.dense", hidden, ffn)):
            yield f"{layer}.{name}.weight", (n, k)
            yield f"{layer}.{name}.bias", (n,)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)


class EncoderSource(Protocol):
    """The tensors of one encoder on disk, under the names of `encoder_shapes`."""

    @property
    def spec(self) -> EncoderSpec: ...

    def read(self, name: str) -> StoredTensor:
        """Read one tensor.

        Raises:
            ModelFileError: its bytes are short or damaged.
        """
        ...
