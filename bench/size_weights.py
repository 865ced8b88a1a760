"""What the kernels read of a model's weights: bytes a token against the file's, and how far the weights are from what the file was made of.

The error is of random weights with outliers, quantised by llama.cpp itself (its library is loaded for that) into a file, loaded, and read back from where the kernels
have them: over the file's own error, which is 1 where nothing is lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize
from tests.fakes.seeded_models import shape, write_gguf

from paceline.backends.cpu import places
from paceline.backends.cpu.forms import LAYOUT, Form
from paceline.backends.cpu.rows import embed_rows
from paceline.backends.cpu.weights import MATRICES
from paceline.core.model import LayerRange
from paceline.core.weights import HEAD, tensor_shapes
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from size_rows import Row

KINDS = ("Q5_K", "Q6_K", "Q8_0")
LAYER, TENSOR = 0, "blk.0.ffn_down.weight"


def bytes_a_token(model: Path) -> Iterator[Row]:
    """Of the matrices that a decoded token passes, as their forms take them, over what they take in the file. Layers are loaded one after another."""
    setup = set_up(NodeSettings(str(model), context=256, kv_tokens=256))
    source, spec = setup.opened.weights, setup.opened.spec
    shapes = tensor_shapes(spec)
    taken = stored = 0
    for layer in range(spec.n_layers):
        runner: Any = setup.load(LayerRange(layer, layer + 1), 16, 64, edges=layer == 0)
        try:
            for row, forms in enumerate(runner._model.forms.tolist()):  # noqa: SLF001  the arrays that kernels read
                for place, form in enumerate(forms):
                    if form >= 0:
                        name = (
                            (HEAD if not spec.tied_head else "model.embed_tokens.weight")
                            if place == places.HEAD
                            else f"model.layers.{layer + row}.{MATRICES[place]}.weight"
                        )
                        n, k = shapes[name]
                        taken += LAYOUT[Form(form)].packed_bytes(n, k)
                        stored += source.nbytes(name)
        finally:
            runner.close()
    ratio = taken / stored
    yield Row(
        f"bytes of weights read a token, {model.name}",
        f"{taken / 1e9:.3f} GB, in the file {stored / 1e9:.3f} GB: {ratio:.3f}x",
        "1.03x",
        "1.0x",
        ratio <= 1.03,
        "matrices of all layers and the head, as their forms take them; KV aside",
    )


def weight_error(ggml: Path | None, scratch: Path) -> Iterator[Row]:
    """Of files of the types that were once cut to four bits."""
    for kind in KINDS:
        if ggml is None:
            yield Row(
                f"relative weight error of a {kind} file as loaded",
                "not measured: no llama.cpp to quantise with",
                "1.05x",
                "1.0x",
                None,
                "make bench-size builds it",
            )
            continue
        spec = shape("tiny", n_layers=1, hidden=1024, ffn=2048)
        path = write_gguf(scratch / f"error-{kind}.gguf", spec, kind)
        rng = np.random.default_rng(3)
        true = (rng.standard_normal((spec.hidden, spec.ffn)) / 32).astype(np.float32)
        true[rng.random(true.shape) < 0.002] *= 6
        blocks = quantised(ggml, kind, true)
        at = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == TENSOR)
        with path.open("r+b") as file:
            file.seek(at.data_offset)
            file.write(blocks.tobytes())
        file_error = relative(dequantize(blocks, gguf.GGMLQuantizationType[kind]), true)
        ours = relative(as_loaded(path), true)
        yield Row(
            f"relative weight error of a {kind} file as loaded",
            f"{ours:.3%}, the file's own {file_error:.3%}: {ours / file_error:.3f}x",
            "1.05x",
            "1.0x",
            ours <= 1.05 * file_error,
            "normal weights with outliers, quantised by llama.cpp, read back from where the kernels have them as bf16 (whose rounding counts as ours)",
        )


def as_loaded(path: Path) -> npt.NDArray[np.float32]:
    """One matrix as the kernels have it, read by the reader of embeddings, to bf16."""
    setup = set_up(NodeSettings(str(path), context=256, kv_tokens=256))
    runner: Any = setup.load(setup.opened.spec.all_layers, 16, 64)
    try:
        packed = runner._model  # noqa: SLF001  as above
        spec = setup.opened.spec
        out = np.empty((spec.hidden, spec.ffn), np.uint16)
        embed_rows(
            Form(int(packed.forms[LAYER, places.DOWN])),
            int(packed.addresses[LAYER, places.DOWN]),
            np.arange(spec.hidden, dtype=np.int32),
            out,
        )
        return (out.astype(np.uint32) << 16).view(np.float32)
    finally:
        runner.close()


def relative(found: npt.NDArray[np.float32], true: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def quantised(ggml: Path, kind: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """By llama.cpp's own quantiser."""
    library = ctypes.CDLL(str(ggml))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, columns = values.shape
    out = np.empty((rows, columns // block * n_bytes), np.uint8)
    source = np.ascontiguousarray(values)
    pointers = (source.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    sizes = (ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns))
    wrote = library.ggml_quantize_chunk(ctypes.c_int(int(gguf.GGMLQuantizationType[kind])), *pointers, *sizes, None)
    assert wrote == out.nbytes, (wrote, out.nbytes)
    return out


def find_ggml(peers_venv: Path) -> Path | None:
    """llama.cpp's base library, where it was built."""
    return next(iter(sorted(peers_venv.glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.*"))), None)
