"""A GGUF model as a source of tensors under Hugging Face's names.

Q4_0, Q4_1 and Q8_0 come as they lie (Q4_0's offset is -8 * scale, exact in float16); F32, F16 and BF16 as dense tensors; every other
type is dequantised to float32. llama.cpp permutes the q and k rows of its `llama` architecture for interleaved rope: the rows
are put back, which moves whole quantised rows and changes no value.

Shapes: N outputs (rows), K inputs (columns), G = K / 32 groups, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec
from paceline.core.weights import GROUP, DenseTensor, GroupedTensor, StoredTensor
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged, unsupported
from paceline.store.gguf_header import GgufHeader, read_header
from paceline.store.gguf_spec import spec_from_gguf
from paceline.store.tensor_files import DENSE, Bytes, StoredAt, TensorFiles

_GLOBAL: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FREQS: Final = "rope_freqs.weight"
_GROUPED: Final = frozenset({"Q4_0", "Q4_1", "Q8_0"})


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

    def _decode(self, name: str, at: StoredAt, raw: Bytes) -> StoredTensor:
        heads = self._permuted_heads.get(name.rpartition(".self_attn.")[2])
        if heads is not None:
            raw = _unpermuted(raw, at.shape[0], heads)
        if at.type.name in DENSE:
            return super()._decode(name, at, raw)
        if at.type.name in _GROUPED and len(at.shape) == 2:
            return _grouped(at, raw)
        return _dequantised(at, raw)


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


def _unpermuted(raw: Bytes, n_rows: int, n_heads: int) -> Bytes:
    """Rows from llama.cpp's interleaved order (pair, half) back to Hugging Face's (half, pair), head by head."""
    rows_NB = raw.reshape(n_heads, n_rows // n_heads // 2, 2, -1)
    return np.ascontiguousarray(rows_NB.swapaxes(1, 2)).reshape(-1)


def _grouped(at: StoredAt, raw: Bytes) -> GroupedTensor:
    n, k = at.shape
    groups_NGB = raw.reshape(n, k // GROUP, at.type.nbytes)
    scale_NG = np.ascontiguousarray(groups_NGB[:, :, 0:2]).view(np.float16).reshape(n, -1)
    offset_NG: npt.NDArray[np.float16] | None
    match at.type.name:
        case "Q8_0":
            offset_NG, first = None, 2
        case "Q4_1":
            offset_NG, first = np.ascontiguousarray(groups_NGB[:, :, 2:4]).view(np.float16).reshape(n, -1), 4
        case _:
            with np.errstate(over="ignore", invalid="ignore"):
                offset_NG, first = scale_NG * np.float16(-8), 2
    if not np.isfinite(scale_NG).all() or (offset_NG is not None and not np.isfinite(offset_NG).all()):
        raise damaged(at.path, f"tensor {at.name} has a scale that is not a finite number")
    quants_NGB = groups_NGB[:, :, first:]
    if at.type.name == "Q8_0":
        return GroupedTensor(8, np.ascontiguousarray(quants_NGB).view(np.int8).reshape(n, k), scale_NG, None)
    codes_NGK = np.empty((n, k // GROUP, GROUP), np.uint8)
    np.bitwise_and(quants_NGB, 15, out=codes_NGK[:, :, : GROUP // 2])
    np.right_shift(quants_NGB, 4, out=codes_NGK[:, :, GROUP // 2 :])
    return GroupedTensor(4, codes_NGK.reshape(n, k), scale_NG, offset_NG)


def _dequantised(at: StoredAt, raw: Bytes) -> DenseTensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = at.type
    row_bytes = at.shape[-1] // kind.block * kind.nbytes
    try:
        with np.errstate(all="ignore"):
            values = dequantize(raw.reshape(-1, row_bytes), GGMLQuantizationType[kind.name])
    except NotImplementedError as error:
        raise unsupported(at.path, f"tensor {at.name} is of type {kind.name}, which can't be dequantised") from error
    return DenseTensor(np.ascontiguousarray(values, np.float32).reshape(at.shape), "f32")
