"""The bundled model's tokenizer, cut or filled up to any number of tokens, so that a seeded model can be talked to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelNotFound
from paceline.store.catalog import BUNDLED, resolve
from paceline.store.gguf_header import GgufHeader, read_header
from paceline.store.home import Home
from paceline.store.tokenizer_files import build_encoder

_CONTROL = 3


@dataclass(frozen=True, slots=True)
class SeededVocabulary:
    """Byte-level BPE, cut as the bundled model's is."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    """llama.cpp's: 1 ordinary, 3 control."""
    merges: tuple[str, ...]
    cut: str
    bos: int
    eos: int
    template: str

    @property
    def n_control(self) -> int:
        """Control tokens stand first."""
        return self.kinds.count(_CONTROL)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        known: dict[str, Any] = json.loads(build_encoder(_bundled()).to_str())
        known["model"]["vocab"] = {token: i for i, token in enumerate(self.tokens)}
        known["model"]["merges"] = [merge.split(" ") for merge in self.merges]
        (folder / "tokenizer.json").write_text(json.dumps(known, ensure_ascii=False), encoding="utf-8")
        settings = {"chat_template": self.template, "eos_token": self.tokens[self.eos], "bos_token": self.tokens[self.bos]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@cache
def vocabulary(n_tokens: int) -> SeededVocabulary:
    """The bundled model's first tokens, or all of them and words that no text is cut into.

    Args:
        n_tokens: at least 512: control tokens and single bytes stand first.

    Raises:
        ModelNotFound: the bundled model is not installed.
    """
    assert n_tokens >= 512, n_tokens
    header = _bundled()
    tokens, kinds = header.strings("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
    merges, template, cut = (
        header.strings("tokenizer.ggml.merges"),
        header.text("tokenizer.chat_template"),
        header.text("tokenizer.ggml.pre"),
    )
    bos, eos = header.integer("tokenizer.ggml.bos_token_id"), header.integer("tokenizer.ggml.eos_token_id")
    if tokens is None or kinds is None or merges is None or template is None or cut is None or bos is None or eos is None:
        raise ModelNotFound("The bundled model has no tokenizer", "Install it anew")
    kept = [*tokens[:n_tokens], *(f"Ġword{i}" for i in range(len(tokens), n_tokens))]
    there = set(kept)
    possible = (merge for merge in merges if {*merge.split(" "), merge.replace(" ", "")} <= there)
    padded = [*map(int, kinds[:n_tokens]), *(1 for _ in range(len(tokens), n_tokens))]
    return SeededVocabulary(tuple(kept), tuple(padded), tuple(possible), cut, bos, eos, template)


def _bundled() -> GgufHeader:
    return read_header(resolve(BUNDLED, Home.from_environment()).path)
