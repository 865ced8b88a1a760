"""A GGUF model as a source of tensors under Hugging Face's names.

Q4_0, Q4_1 and Q8_0 come as they lie (Q4_0's offset is -8 * scale, exact in float16); F32, F16 and BF16 as dense tensors; every other
type is dequantised to float32. llama.cpp permutes the q and k rows of its `llama` architecture for interleaved rope: the rows
are put back, which moves whole quantised rows and changes no value. Each read opens the file, reads one range and closes it.

Shapes: N outputs (rows), K inputs (columns), G = K / 32 groups, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec
from paceline.core.weights import GROUP, DenseTensor, GroupedTensor, StoredTensor
from paceline.store.digests import DigestCache, digest_of_files
from paceline.store.faults import damaged, unreadable, unsupported
from paceline.store.gguf_header import GgufHeader, TensorInfo, read_header
from paceline.store.gguf_spec import spec_from_gguf
from paceline.store.layout import check_tensors

Bytes = npt.NDArray[np.uint8]

_GLOBAL: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FREQS: Final = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a tensor lies: a whole GGUF tensor or one expert's slice of a stacked one."""

    path: Path
    info: TensorInfo
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    permuted_heads: int | None
    """Heads whose rows llama.cpp interleaved; None where rows lie in order."""


class GgufWeights:
    """A `WeightSource` over one GGUF file, or over all files of a split one."""

    def __init__(self, headers: Iterable[GgufHeader], digests: DigestCache) -> None:
        """Check the model's tensors against its metadata.

        Raises:
            ModelFileError: tensors are missing or of the wrong shape, or the metadata is absurd.
            UnsupportedModel: a family, a feature or tensors Paceline does not run.
        """
        self._headers = tuple(headers)
        self._digests = digests
        self._digest: str | None = None
        self.header: Final = self._headers[0]
        merged = _merge(self._headers)
        self._spec: Final = spec_from_gguf(merged, _rope_factors(self._headers))
        self._pieces: Final[Mapping[str, _Piece]] = dict(_pieces(self._headers, self._spec))
        check_tensors(self.header.path, self._spec, {name: piece.shape for name, piece in self._pieces.items()})

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def digest(self) -> str:
        """SHA-256 of the file, or of the files' digests; read only if a file changed since the last time."""
        if self._digest is None:
            self._digest = digest_of_files(self._digests, self.files)
        return self._digest

    @property
    def tensor_type(self) -> str:
        """The GGML type most of the bytes are in: how people name the file's quantisation."""
        weight: dict[str, int] = {}
        for piece in self._pieces.values():
            weight[piece.info.type.name] = weight.get(piece.info.type.name, 0) + piece.nbytes
        return max(weight, key=weight.__getitem__)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(header.path for header in self._headers)

    def names(self) -> Iterable[str]:
        return self._pieces.keys()

    def nbytes(self, name: str) -> int:
        return self._piece(name).nbytes

    def read(self, name: str) -> StoredTensor:
        piece = self._piece(name)
        raw = _read_range(piece)
        if piece.permuted_heads is not None:
            raw = _unpermuted(raw, piece.shape[0], piece.permuted_heads)
        return _decode(piece, raw)

    def _piece(self, name: str) -> _Piece:
        piece = self._pieces.get(name)
        if piece is None:
            raise damaged(self.header.path, f"tensor {name} is missing")
        return piece


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


def _merge(headers: tuple[GgufHeader, ...]) -> GgufHeader:
    first = headers[0]
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    return GgufHeader(first.path, first.file_size, first.metadata, tensors)


def _pieces(headers: tuple[GgufHeader, ...], spec: ModelSpec) -> Iterator[tuple[str, _Piece]]:
    permuted = {"attn_q": spec.n_heads, "attn_k": spec.n_kv_heads} if spec.model_type == "llama" else {}
    for header in headers:
        for info in header.tensors.values():
            stem, _, kind = info.name.rpartition(".")
            if stem in _GLOBAL:
                yield f"{_GLOBAL[stem]}.{kind}", _whole(header.path, info, None)
            elif stem.startswith("blk."):
                layer, _, part = stem.removeprefix("blk.").partition(".")
                if part in _EXPERTS and len(info.shape) == 3:
                    for expert in range(info.shape[0]):
                        yield f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", _expert(header.path, info, expert)
                elif part in _IN_LAYER:
                    yield f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}", _whole(header.path, info, permuted.get(part))
                else:
                    yield info.name, _whole(header.path, info, None)
            elif info.name != _ROPE_FREQS:
                yield info.name, _whole(header.path, info, None)


def _whole(path: Path, info: TensorInfo, permuted_heads: int | None) -> _Piece:
    return _Piece(path, info, info.shape, info.offset, info.nbytes, permuted_heads)


def _expert(path: Path, info: TensorInfo, expert: int) -> _Piece:
    nbytes = info.nbytes // info.shape[0]
    return _Piece(path, info, info.shape[1:], info.offset + expert * nbytes, nbytes, None)


def _rope_factors(headers: tuple[GgufHeader, ...]) -> list[float] | None:
    for header in headers:
        info = header.tensors.get(_ROPE_FREQS)
        if info is not None:
            if info.type.name != "F32" or info.nbytes > 1 << 16:
                raise damaged(header.path, f"tensor {_ROPE_FREQS} is of type {info.type.name} and {info.nbytes} bytes")
            factors: list[float] = _read_range(_whole(header.path, info, None)).view(np.float32).tolist()
            return factors
    return None


def _read_range(piece: _Piece) -> Bytes:
    raw = np.empty(piece.nbytes, np.uint8)
    try:
        with piece.path.open("rb", buffering=0) as file:
            file.seek(piece.offset)
            view, filled = raw.data, 0
            # One read returns at most 2 GiB on Linux.
            while filled < piece.nbytes:
                n = file.readinto(view[filled:])
                if not n:
                    raise damaged(piece.path, f"tensor {piece.info.name} is cut short: the file changed since it was opened")
                filled += n
    except OSError as error:
        raise unreadable(piece.path, error) from error
    return raw


def _unpermuted(raw: Bytes, n_rows: int, n_heads: int) -> Bytes:
    """Rows from llama.cpp's interleaved order (pair, half) back to Hugging Face's (half, pair), head by head."""
    rows_NB = raw.reshape(n_heads, n_rows // n_heads // 2, 2, -1)
    return np.ascontiguousarray(rows_NB.swapaxes(1, 2)).reshape(-1)


def _decode(piece: _Piece, raw: Bytes) -> StoredTensor:
    match piece.info.type.name:
        case "F32":
            return DenseTensor(raw.view(np.float32).reshape(piece.shape), "f32")
        case "F16":
            return DenseTensor(raw.view(np.float16).reshape(piece.shape), "f16")
        case "BF16":
            return DenseTensor(raw.view(np.uint16).reshape(piece.shape), "bf16")
        case "Q4_0" | "Q4_1" | "Q8_0" if len(piece.shape) == 2:
            return _grouped(piece, raw)
        case _:
            return _dequantised(piece, raw)


def _grouped(piece: _Piece, raw: Bytes) -> GroupedTensor:
    n, k = piece.shape
    groups_NGB = raw.reshape(n, k // GROUP, piece.info.type.nbytes)
    scale_NG = np.ascontiguousarray(groups_NGB[:, :, 0:2]).view(np.float16).reshape(n, -1)
    offset_NG: npt.NDArray[np.float16] | None
    match piece.info.type.name:
        case "Q8_0":
            offset_NG, at = None, 2
        case "Q4_1":
            offset_NG, at = np.ascontiguousarray(groups_NGB[:, :, 2:4]).view(np.float16).reshape(n, -1), 4
        case _:
            with np.errstate(over="ignore", invalid="ignore"):
                offset_NG, at = scale_NG * np.float16(-8), 2
    if not np.isfinite(scale_NG).all() or (offset_NG is not None and not np.isfinite(offset_NG).all()):
        raise damaged(piece.path, f"tensor {piece.info.name} has a scale that is not a finite number")
    quants_NGB = groups_NGB[:, :, at:]
    if piece.info.type.name == "Q8_0":
        return GroupedTensor(8, np.ascontiguousarray(quants_NGB).view(np.int8).reshape(n, k), scale_NG, None)
    codes_NGK = np.empty((n, k // GROUP, GROUP), np.uint8)
    np.bitwise_and(quants_NGB, 15, out=codes_NGK[:, :, : GROUP // 2])
    np.right_shift(quants_NGB, 4, out=codes_NGK[:, :, GROUP // 2 :])
    return GroupedTensor(4, codes_NGK.reshape(n, k), scale_NG, offset_NG)


def _dequantised(piece: _Piece, raw: Bytes) -> DenseTensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = piece.info.type
    row_bytes = piece.shape[-1] // kind.block * kind.nbytes
    try:
        with np.errstate(all="ignore"):
            values = dequantize(raw.reshape(-1, row_bytes), GGMLQuantizationType(kind.code))
    except NotImplementedError as error:
        raise unsupported(piece.path, f"tensor {piece.info.name} is of type {kind.name}, which can't be dequantised") from error
    return DenseTensor(np.ascontiguousarray(values, np.float32).reshape(piece.shape), "f32")
