"""Tokenizers of models that other nodes run: fetched once, kept on disk by their hash."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import FleetError, PacelineError
from paceline.core.ids import NodeId
from paceline.server.inference import ServedModel, fingerprint_of
from paceline.store.home import Home, write_cache
from paceline.store.tokenizer import MAX_PACKED_BYTES, ModelTokenizer, unpack_tokenizer
from paceline.transport.generate_client import describe_model
from paceline.transport.generate_service import LoadedModel

import grpc.aio  # isort: skip

FETCH_S = 30.0
"""For one tokenizer, which may be tens of megabytes. Raising it: a node that answers slowly holds up its model's appearance for longer."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model of another node, ready to be shown and tokenized for."""

    loaded: LoadedModel
    tokenizer: ModelTokenizer

    def served(self, numerics_id: str) -> ServedModel:
        """As the API shows it, run by a node with these kernels."""
        model = self.loaded
        fingerprint = fingerprint_of(model.digest, model.weights, numerics_id)
        return ServedModel(model.name, model.created, model.max_context, self.tokenizer, fingerprint)


class TokenizerStore:
    """Under PACELINE_HOME/cache/tokenizers."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._built: dict[str, ModelTokenizer] = {}

    async def describe(self, channel: grpc.aio.Channel, node_id: NodeId, name: str) -> Described:
        """Ask a node what it has loaded under a name, and for its tokenizer if it is not here.

        Raises:
            PacelineError: it can't be had.
        """
        known = frozenset(self._built) | await asyncio.to_thread(self._on_disk)
        said = await describe_model(channel, node_id, name, known=known, most_bytes=MAX_PACKED_BYTES, timeout_s=FETCH_S)
        key = said.tokenizer_sha256
        if key not in self._built:
            self._built[key] = await asyncio.to_thread(self._build, key, said.tokenizer, node_id)
        return Described(said.model, self._built[key])

    def _on_disk(self) -> frozenset[str]:
        return frozenset(path.stem for path in self._home.tokenizers.glob("*.packed"))

    def _path(self, key: str) -> Path:
        return self._home.tokenizers / f"{key}.packed"

    def _build(self, key: str, packed: bytes | None, node_id: NodeId) -> ModelTokenizer:
        path = self._path(key)
        if packed is None:
            packed = path.read_bytes()
            if hashlib.sha256(packed).hexdigest() != key:
                path.unlink(missing_ok=True)
                raise FleetError(f"{path} is damaged and was removed", "It is fetched again")
        else:
            write_cache(path, packed)
        try:
            return unpack_tokenizer(packed, Path(f"the tokenizer of {node_id}"))
        except PacelineError:
            path.unlink(missing_ok=True)
            raise
