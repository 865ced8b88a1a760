"""A GGUF model as a source of tensors under Hugging Face's names.

Blocks come as they lie; F32, F16 and BF16 as dense tensors. llama.cpp permutes the q and k rows of its `llama` architecture for
interleaved rope: the rows are put back, which moves whole quantised rows and changes no value.

Shapes: N outputs (rows), B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from paceline.core.model import ModelSpec
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged
from paceline.store.gguf_header import GgufHeader, HeadIncomplete, read_header
from paceline.store.gguf_spec import spec_from_gguf
from paceline.store.gguf_tokenizer import build_encoder
from paceline.store.layout import check_tensors
from paceline.store.tensor_files import Bytes, StoredAt, TensorFiles

_GLOBAL: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FREQS: Final = "rope_freqs.weight"


class GgufWeights(TensorFiles):
    """The tensors of one GGUF file, or of all files of a split one."""

    format = "GGUF"

    def __init__(self, headers: Sequence[GgufHeader], digests: DigestCache) -> None:
        """Check the model's tensors against its metadata.

        Raises:
            ModelFileError: tensors are missing or of the wrong shape, or the metadata is absurd.
            UnsupportedModel: a family, a feature or tensors Paceline does not run.
        """
        self.header: Final = headers[0]
        stored = {name: at for header in headers for name, at in header.tensors.items()}
        spec = spec_from_gguf(replace(self.header, tensors=stored), _rope_factors(stored.get(_ROPE_FREQS)))
        super().__init__(spec, dict(_renamed(stored.values(), spec)), [header.path for header in headers], digests)
        self._rope_freqs = {_ROPE_FREQS: stored[_ROPE_FREQS]} if _ROPE_FREQS in stored else {}
        self._permuted_heads = {"q_proj.weight": spec.n_heads, "k_proj.weight": spec.n_kv_heads} if spec.model_type == "llama" else {}

    @property
    def places(self) -> Mapping[str, StoredAt]:
        return {**super().places, **self._rope_freqs}

    def _raw_rows(self, name: str, at: StoredAt, start: int, stop: int) -> Bytes:
        heads = self._permuted_heads.get(name.rpartition(".self_attn.")[2])
        if heads is None or start == stop:
            return super()._raw_rows(name, at, start, stop)
        # Rows are permuted within a head: whole heads are read.
        a_head = at.shape[0] // heads
        first, last = start // a_head, -(-stop // a_head)
        raw = _unpermuted(at.rows(first * a_head, last * a_head).read(), last - first, a_head)
        row_bytes = at.nbytes // at.shape[0]
        return raw[(start - first * a_head) * row_bytes : (stop - first * a_head) * row_bytes]


def open_gguf(path: Path, digests: DigestCache) -> GgufWeights:
    """Open a GGUF file; of a split model, its first file, whose siblings are opened with it.

    Raises:
        ModelFileError: a file is missing, truncated, damaged or not a GGUF file.
        UnsupportedModel: a family, feature or tensor type Paceline does not run.
    """
    first = read_header(path)
    n_files = first.integer("split.count") or 1
    if n_files == 1:
        return GgufWeights([first], digests)
    tail = f"-00001-of-{n_files:05d}.gguf"
    if first.integer("split.no") != 0 or not path.name.endswith(tail) or n_files > 9999:
        raise damaged(path, "it is one part of a split model; name the first part (`...-00001-of-....gguf`)")
    stem = path.name.removesuffix(tail)
    rest = [path.with_name(f"{stem}-{part:05d}-of-{n_files:05d}.gguf") for part in range(2, n_files + 1)]
    return GgufWeights([first, *(read_header(part) for part in rest)], digests)


def check_beginning(path: Path, size: int) -> bool:
    """Hold a model against what Paceline runs, by the beginning of its file (of a split model, of its first).

    Args:
        path: holds the beginning.
        size: of the whole file.

    Returns:
        Whether enough of it was there to tell.

    Raises:
        ModelFileError: it is no GGUF file, or its head is damaged.
        UnsupportedModel: a family, a feature, tensors or a tokenizer Paceline does not run.
    """
    try:
        header = read_header(path, size)
    except HeadIncomplete:
        return False
    if (header.integer("split.count") or 1) == 1:
        # Whether its rope factors are known ones is seen once they are here.
        spec = spec_from_gguf(header, None)
        check_tensors(path, spec, {name: at.shape for name, at in _renamed(header.tensors.values(), spec)})
    elif "token_embd.weight" in header.tensors:
        spec_from_gguf(header, None)
    build_encoder(header)
    return True


def _renamed(stored: Iterable[StoredAt], spec: ModelSpec) -> Iterator[tuple[str, StoredAt]]:
    """Tensors under Hugging Face's names; those it has no name for keep their own.

    Stacked experts come apart where the spec knows of them: a file may say that a tensor of any size is a stack of any height.
    """
    n_experts = 0 if spec.moe is None else spec.moe.n_experts
    layers = set(map(str, range(spec.n_layers)))
    for at in stored:
        stem, _, kind = at.name.rpartition(".")
        layer, _, part = stem.removeprefix("blk.").partition(".") if stem.startswith("blk.") else ("", "", "")
        if stem in _GLOBAL:
            yield f"{_GLOBAL[stem]}.{kind}", at
        elif part in _EXPERTS and len(at.shape) == 3 and at.shape[0] == n_experts and layer in layers:
            nbytes = at.nbytes // at.shape[0]
            for expert in range(at.shape[0]):
                slice_ = replace(at, shape=at.shape[1:], offset=at.offset + expert * nbytes, nbytes=nbytes)
                yield f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", slice_
        elif part in _IN_LAYER:
            yield f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}", at
        elif at.name != _ROPE_FREQS:
            yield at.name, at


def _rope_factors(at: StoredAt | None) -> list[float] | None:
    if at is None:
        return None
    if at.type.name != "F32" or at.nbytes > 1 << 16:
        raise damaged(at.path, f"tensor {_ROPE_FREQS} is of type {at.type.name} and {at.nbytes} bytes")
    return at.read().view(np.float32).tolist()


def _unpermuted(raw: Bytes, heads: int, a_head: int) -> Bytes:
    """Rows of whole heads from llama.cpp's interleaved order (pair, half) back to Hugging Face's (half, pair)."""
    rows_NB = raw.reshape(heads, a_head // 2, 2, -1)
    return np.ascontiguousarray(rows_NB.swapaxes(1, 2)).reshape(-1)
