"""The bundled model's first layers as a model of its own: its tokenizer and template, a third of its work for each token, and no sense in what it says.

For tests in which machines fail, and not numbers.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

from paceline.store.catalog import BUNDLED, open_model
from paceline.store.gguf_header import read_header
from paceline.store.home import Home

MODEL = "shallow"
LAYERS = 3
_ALIGNMENT = 32


@cache
def shallow_model() -> Path:
    """Its file, in the home that all tests share."""
    return write_shallow(Home.from_environment().root)


def write_shallow(folder: Path, layers: int = LAYERS, name: str = MODEL, template_end: str = "") -> Path:
    """Write them as a GGUF file, which gives the model its name.

    Args:
        template_end: follows the bundled model's chat template.
    """
    whole = open_model(BUNDLED)
    data, header, template = whole.path.read_bytes(), read_header(whole.path), whole.tokenizer.chat_template or ""
    kept = [each for each in header.tensors.values() if not each.name.startswith("blk.") or int(each.name.split(".")[1]) < layers]
    first = next(iter(header.tensors))
    counts, keys = data[8:24], data[24 : data.index(_string(first))]  # what lies before the table of tensors
    for before, after in (
        (
            _string("llama.block_count") + struct.pack("<II", 4, whole.weights.spec.n_layers),
            _string("llama.block_count") + struct.pack("<II", 4, layers),
        ),
        (_string(template), _string(template + template_end)),
    ):
        assert keys.count(before) == 1
        keys = keys.replace(before, after)
    table, body = b"", b""
    for each in kept:
        shape = struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *reversed(each.shape))
        table += _string(each.name) + shape + struct.pack("<IQ", each.type.code, len(body))
        body += data[each.offset : each.offset + each.nbytes]
        body += bytes(-len(body) % _ALIGNMENT)
    head = data[:8] + struct.pack("<Q", len(kept)) + counts[8:] + keys + table
    path = folder / f"{name}.gguf"
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + body)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
