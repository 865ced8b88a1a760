"""A tiny projector with seeded weights, which lets llama-server take images for a text model. What the model says of them means nothing.

    python -m tests.fakes.seeing_model FILE HIDDEN

Source: llama.cpp's tools/mtmd/clip.cpp and models/siglip.cpp (projector type gemma3) for the fields and tensors.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np

WIDTH, HEADS, FFN, LAYERS, IMAGE, PATCH, MERGE = 32, 2, 64, 1, 32, 8, 2
N_TOKENS = (IMAGE // PATCH // MERGE) ** 2
"""Tokens of an image of any size."""


def write_projector(path: Path, hidden: int, seed: int = 0) -> Path:
    """Write the GGUF file, of 100 KiB.

    Args:
        hidden: hidden size of the text model.
    """
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(path.stem)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_bool("clip.use_gelu", True)
    for name, value in {
        "image_size": IMAGE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "block_count": LAYERS,
        "projection_dim": hidden,
        "attention.head_count": HEADS,
        "projector.scale_factor": MERGE,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        weights = rng.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(name, weights.astype(np.float32))

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    add("v.patch_embd.bias", WIDTH)
    add("v.position_embd.weight", (IMAGE // PATCH) ** 2, WIDTH)
    for layer in range(LAYERS):
        at = f"v.blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"{at}.{name}.weight", WIDTH, WIDTH)
            add(f"{at}.{name}.bias", WIDTH)
        for name in ("ln1", "ln2"):
            add(f"{at}.{name}.weight", WIDTH)
            add(f"{at}.{name}.bias", WIDTH)
        for name, rows, width in (("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN)):
            add(f"{at}.{name}.weight", rows, width)
            add(f"{at}.{name}.bias", rows)
    add("v.post_ln.weight", WIDTH)
    add("v.post_ln.bias", WIDTH)
    add("mm.soft_emb_norm.weight", WIDTH)
    add("mm.input_projection.weight", WIDTH, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def png(red: int, green: int, blue: int, side: int = 8) -> bytes:
    """Return an image of one colour."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")


if __name__ == "__main__":
    write_projector(Path(sys.argv[1]), int(sys.argv[2]))
