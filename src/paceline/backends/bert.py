"""Runs an encoder on the processor, in float32, with NumPy.

Law: a text's vector depends only on the text's tokens. Each text is computed alone, by products with shapes that follow from its length;
a batch runs its texts one after the other. With padding, or with rows of several texts in one product, other texts would change the order of sums.

Shapes: T tokens, D hidden, H heads, d of a head, F of the feed-forward block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.weights import FIRST_NORM, POSITIONS, TYPES, WORDS, BlockTensor, EncoderSource, EncoderSpec, Pooling

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

_SCORES: Final = 1 << 18
"""Most attention scores held at once (one head may have more), so that they stay in a core's cache. Raising it: fewer, larger products that leave it."""
_GELU: Final = 1 << 16
"""Most numbers that the activation handles at once, for the same reason."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight_D: Float32
    bias_D: Float32
    eps: float

    def __call__(self, x_TD: Float32) -> Float32:
        """Normalise rows in place."""
        x_TD -= x_TD.mean(axis=1, keepdims=True)
        variance_T = np.einsum("td,td->t", x_TD, x_TD) / np.float32(x_TD.shape[1])
        x_TD /= np.sqrt(variance_T + np.float32(self.eps))[:, None]
        x_TD *= self.weight_D
        x_TD += self.bias_D
        return x_TD


@dataclass(frozen=True, slots=True)
class _Linear:
    weight_KN: Float32
    bias_N: Float32

    def __call__(self, x_TK: Float32) -> Float32:
        y_TN = x_TK @ self.weight_KN
        y_TN += self.bias_N
        return y_TN


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Linear
    attended: _Linear
    attended_norm: _Norm
    up: _Linear
    down: _Linear
    norm: _Norm


class Bert:
    """An encoder in memory. Safe to call from several threads; products release the interpreter's lock."""

    def __init__(self, source: EncoderSource) -> None:
        """Read all weights. Blocks.

        Raises:
            ModelFileError: tensors can't be read, or hold numbers that are not finite.
        """
        spec = self.spec = source.spec

        def tensor(name: str) -> Float32:
            return _float32(source, name)

        def norm(name: str) -> _Norm:
            return _Norm(tensor(f"{name}.weight"), tensor(f"{name}.bias"), spec.norm_eps)

        def linear(*names: str) -> _Linear:
            weight = np.concatenate([tensor(f"{name}.weight") for name in names])
            return _Linear(np.ascontiguousarray(weight.T), np.concatenate([tensor(f"{name}.bias") for name in names]))

        def layer(at: str) -> _Layer:
            return _Layer(
                linear(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
                linear(f"{at}.attention.output.dense"),
                norm(f"{at}.attention.output.LayerNorm"),
                linear(f"{at}.intermediate.dense"),
                linear(f"{at}.output.dense"),
                norm(f"{at}.output.LayerNorm"),
            )

        self._words_VD = tensor(WORDS)
        self._positions_TD = tensor(POSITIONS) + tensor(TYPES)[0]
        self._first = norm(FIRST_NORM)
        self._layers = [layer(f"encoder.layer.{i}") for i in range(spec.n_layers)]

    def vectors(self, texts: Sequence[Ids]) -> Float32:
        """Return the vectors of texts, [texts, D]. Each text has 1 to `max_tokens` token ids of the vocabulary."""
        return np.stack([self._vector(ids) for ids in texts])

    def _vector(self, ids_T: Ids) -> Float32:
        x_TD = self._words_VD[ids_T]
        x_TD += self._positions_TD[: len(ids_T)]
        self._first(x_TD)
        for layer in self._layers:
            attended_TD = layer.attended(_attention(layer.qkv(x_TD), self.spec))
            attended_TD += x_TD
            x_TD = layer.attended_norm(attended_TD)
            out_TD = layer.down(gelu(layer.up(x_TD)))
            out_TD += x_TD
            x_TD = layer.norm(out_TD)
        pooled_D = x_TD.mean(axis=0) if self.spec.pooling is Pooling.MEAN else x_TD[0]
        return pooled_D / max(np.float32(1e-12), np.sqrt(pooled_D @ pooled_D)) if self.spec.normalise else pooled_D


def _attention(qkv_T3D: Float32, spec: EncoderSpec) -> Float32:
    n_tokens, d = len(qkv_T3D), spec.hidden // spec.n_heads
    q_HTd, k_HTd, v_HTd = qkv_T3D.reshape(n_tokens, 3, spec.n_heads, d).transpose(1, 2, 0, 3)
    q_HTd *= np.float32(1 / np.sqrt(d))
    out_THd = np.empty((n_tokens, spec.n_heads, d), np.float32)
    together = max(1, _SCORES // (n_tokens * n_tokens))
    for first in range(0, spec.n_heads, together):
        heads = slice(first, first + together)
        scores_HTT = q_HTd[heads] @ k_HTd[heads].transpose(0, 2, 1)
        scores_HTT -= scores_HTT.max(axis=2, keepdims=True)
        np.exp(scores_HTT, out=scores_HTT)
        scores_HTT /= scores_HTT.sum(axis=2, keepdims=True)
        out_THd[:, heads] = (scores_HTT @ v_HTd[heads]).transpose(1, 0, 2)
    return out_THd.reshape(n_tokens, spec.hidden)


_TOP: Final = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
               -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_BOTTOM: Final = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02)
"""Coefficients of erf(x) / x as a quotient of polynomials of x squared: those of XLA and Eigen for float32. NumPy lacks the error function."""


def gelu(x_TF: Float32) -> Float32:
    """Multiply each x by the share of a normal distribution below x, in place. The error is about 1e-7."""
    rows = max(1, _GELU // x_TF.shape[1])
    for first in range(0, len(x_TF), rows):
        part = x_TF[first : first + rows]
        z: Float32 = np.clip(part * np.float32(np.sqrt(0.5)), np.float32(-4), np.float32(4))
        square: Float32 = z * z
        z *= _polynomial(square, _TOP)
        z /= _polynomial(square, _BOTTOM)
        z += np.float32(1)
        z *= np.float32(0.5)
        part *= z
    return x_TF


def _polynomial(x: Float32, coefficients: Sequence[float]) -> Float32:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += np.float32(coefficient)
    return value


def _float32(source: EncoderSource, name: str) -> Float32:
    stored = source.read(name)
    if isinstance(stored, BlockTensor):
        from paceline.backends.ggml.dequantise import dequantise

        rows = np.empty(stored.shape, np.float32)
        dequantise(stored.type, stored.rows_NB, rows)
        return rows
    if stored.dtype == "bf16":
        return (stored.data.astype(np.uint32) << 16).view(np.float32)
    return stored.data.astype(np.float32, copy=False)
