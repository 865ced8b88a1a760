"""A tiny model of a family that own kernels lack, with seeded weights: LFM2, in which layers of short convolutions and of attention alternate.

    python -m tests.fakes.hybrid_model FILE

Source: llama.cpp's src/models/lfm2.cpp for the tensors, the gguf package for their names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tests.fakes.seeded_models import add_words
from tests.fakes.seeded_vocabulary import vocabulary

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, TAPS = 64, 4, 2, 128, 512, 3
IS_ATTENTION = (False, True, False, True)


def write_hybrid(path: Path, seed: int = 0) -> Path:
    """Write the GGUF file, of half a megabyte."""
    import gguf

    rng = np.random.default_rng(seed)
    words = vocabulary(VOCAB)
    head = HIDDEN // HEADS
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_name(path.stem)
    writer.add_block_count(len(IS_ATTENTION))
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV_HEADS * each for each in IS_ATTENTION])  # layers without heads are convolutions
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_shortconv_l_cache(TAPS)
    writer.add_vocab_size(VOCAB)
    add_words(writer, words)

    def add(name: str, *shape: int) -> None:
        weights = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / np.sqrt(shape[-1])
        if name == "token_embd.weight":
            weights[: words.n_control] = 0.0  # control tokens are not drawn
        writer.add_tensor(name, weights.astype(np.float32))

    add("token_embd.weight", VOCAB, HIDDEN)
    add("token_embd_norm.weight", HIDDEN)
    for layer, is_attention in enumerate(IS_ATTENTION):
        at = f"blk.{layer}"
        add(f"{at}.attn_norm.weight", HIDDEN)
        add(f"{at}.ffn_norm.weight", HIDDEN)
        if is_attention:
            add(f"{at}.attn_q_norm.weight", head)
            add(f"{at}.attn_k_norm.weight", head)
            for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                add(f"{at}.attn_{name}.weight", rows * head, HIDDEN)
            add(f"{at}.attn_output.weight", HIDDEN, HIDDEN)
        else:
            add(f"{at}.shortconv.conv.weight", HIDDEN, TAPS)
            add(f"{at}.shortconv.in_proj.weight", 3 * HIDDEN, HIDDEN)
            add(f"{at}.shortconv.out_proj.weight", HIDDEN, HIDDEN)
        add(f"{at}.ffn_gate.weight", FFN, HIDDEN)
        add(f"{at}.ffn_up.weight", FFN, HIDDEN)
        add(f"{at}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    write_hybrid(Path(sys.argv[1]))
