"""A tiny Llama over a hand-made SentencePiece vocabulary that puts a space before each text, as those of Llama 2, Mistral 7B and Phi-3 do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SPACE = "\u2581"
WORDS = ("the", "He", "llo", "th", "ere", "yes", "no", "red", "green", "color", "return", "def", "x", "in", "er")
SPECIAL = ("<unk>", "<s>", "</s>", "[SUFFIX]", "[PREFIX]")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CONTEXT = 1024


@cache
def vocabulary() -> dict[str, Any]:
    """Return the vocabulary as a GGUF file's fields behind `tokenizer.ggml.`: special tokens, bytes, words with and without a space, letters."""
    starts = [word[:n] for word in WORDS for n in range(1, len(word) + 1)]
    plain = [
        *(word for word in starts if len(word) > 1),
        *(SPACE + word for word in starts),
        SPACE * 2,
        SPACE,
        *map(chr, range(0x21, 0x7F)),
    ]
    plain = list(dict.fromkeys(plain))
    first = len(SPECIAL) + 256
    return {
        "model": "llama",
        "tokens": [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *plain],
        "token_type": [2, *[3] * (len(SPECIAL) - 1), *[6] * 256, *[1] * len(plain)],
        "scores": [0.0] * first + [-float(place) for place in range(len(plain))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": True,
    }


class Header:
    """A GGUF header that holds a vocabulary alone."""

    def __init__(self, **fields: Any) -> None:
        self.path, self.fields = Path("spaced.gguf"), vocabulary() | fields

    def text(self, key: str) -> Any:
        return self.fields.get(key.removeprefix("tokenizer.ggml."))

    strings = numbers = integer = flag = text


def write_spaced(path: Path, template: str = TEMPLATE) -> Path:
    """Write a model of one layer with seeded weights over that vocabulary."""
    import gguf

    fields = vocabulary()
    hidden, ffn, n_tokens = 576, 1536, len(fields["tokens"])  # as the bundled model's, so that its kernels serve
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_rope_dimension_count(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(fields["model"])
    writer.add_token_list(fields["tokens"])
    writer.add_token_scores(fields["scores"])
    writer.add_token_types(fields["token_type"])
    writer.add_bos_token_id(fields["bos_token_id"])
    writer.add_eos_token_id(fields["eos_token_id"])
    writer.add_unk_token_id(fields["unknown_token_id"])
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(template)
    draw = np.random.default_rng(0)
    third = hidden // 3
    shapes = {"attn_q": (hidden, hidden), "attn_k": (third, hidden), "attn_v": (third, hidden), "attn_output": (hidden, hidden)}
    shapes |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
    writer.add_tensor("token_embd.weight", (draw.standard_normal((n_tokens, hidden)) * 0.05).astype(np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", (draw.standard_normal(shape) * 0.05).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
