"""A tokenizer as bytes that another machine makes the same tokenizer of: a text is tokenized where it arrives, whoever runs the model.

What another machine sent is checked as a downloaded file is: the template runs in the sandbox, and what can't be read is damaged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import ModelFileError
from paceline.store.chat_template import ChatTemplate
from paceline.store.faults import damaged
from paceline.store.tokenizer import ModelTokenizer

MAX_PACKED_BYTES: Final = 64 << 20
"""More than any tokenizer takes; what is longer is not read."""


def pack_tokenizer(tokenizer: ModelTokenizer) -> bytes:
    """Everything that decides what a tokenizer does. Equal ones pack alike. Takes some 10 ms a megabyte: not for an event loop."""
    template = tokenizer.template
    parts = {
        "encoder": tokenizer.to_json(),
        "eos_ids": sorted(tokenizer.eos_ids),
        "template": None if template is None else template.source,
        "special_tokens": {} if template is None else dict(template.special_tokens),
    }
    return json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()


def unpack_tokenizer(data: bytes, origin: Path) -> ModelTokenizer:
    """The tokenizer that `pack_tokenizer` packed.

    Args:
        data: what was packed.
        origin: for errors: where the bytes lie, or whom they came from.

    Raises:
        ModelFileError: the bytes are damaged.
        UnsupportedModel: a kind of tokenizer Paceline does not know.
    """
    from tokenizers import Tokenizer

    try:
        parts: dict[str, Any] = json.loads(data)
        encoder = Tokenizer.from_str(parts["encoder"])
        ends = frozenset(int(token) for token in parts["eos_ids"])
        source = parts["template"]
        special = {str(name): str(token) for name, token in parts["special_tokens"].items()}
        template = None if source is None else ChatTemplate(origin, str(source), special)
    except ModelFileError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise damaged(origin, f"it is not a packed tokenizer ({error})") from error
    encoder.no_truncation()
    encoder.no_padding()
    return ModelTokenizer(origin, encoder, ends, template)
