"""Tokenizers of models that other nodes run: taken from this node's own disk where it has the model, else fetched once and kept by their hash.

Law: a tokenizer is the one that the cards of its route name, or it is refused. What other nodes can make this one hold is bounded: one fetch at
a time a node, so many bytes each and on disk, and in memory those alone that are used. What is damaged, or breaks its reader, is removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from paceline.core.errors import FleetError, PacelineError
from paceline.core.ids import NodeId
from paceline.core.inference import ModelFacts, ServedModel, fingerprint_of
from paceline.store.bounded_tokenizer import BoundedTokenizer, TokenizerProcess
from paceline.store.catalog import find_whole, open_model
from paceline.store.home import Home, write_cache
from paceline.store.tokenizer import MAX_PACKED_BYTES, tokenizer_digest, unpack_tokenizer
from paceline.ways.forward.client import describe_model
from paceline.ways.forward.routes import Weights
from paceline.ways.forward.service import LoadedModel

import grpc.aio  # isort: skip

logger = logging.getLogger(__name__)

FETCH_S = 30.0
"""For one tokenizer, which may be megabytes. Raising it: a node that answers slowly holds up its models' appearance for longer."""
MOST_DISK_BYTES = 256 << 20
"""Of all that are kept for later; those used longest ago go first."""

IDLE_S = 900
"""Without a text for a model of another node, until the process of its tokenizer ends. Raising it: models that are asked for now and then hold some
50 MB each for longer."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model of another node, ready to be shown and tokenized for."""

    loaded: LoadedModel
    tokenizer: BoundedTokenizer

    def served(self, numerics_id: str, size_bytes: int) -> ServedModel:
        """As the API shows it, run by a node with these kernels."""
        model = self.loaded
        fingerprint = fingerprint_of(model.digest, model.weights, numerics_id)
        return ServedModel(model.name, model.created, model.max_context, self.tokenizer, fingerprint, ModelFacts(model.digest, size_bytes))


class TokenizerStore:
    """Under PACELINE_HOME/cache/tokenizers.

    Args:
        most_bytes: of all files there that came from other nodes.
    """

    def __init__(self, home: Home, most_bytes: int = MOST_DISK_BYTES) -> None:
        self._home, self._most_bytes = home, most_bytes
        self._built: WeakValueDictionary[str, BoundedTokenizer] = WeakValueDictionary()
        """By hash: as long as a model is shown with it."""
        self._asking: WeakValueDictionary[NodeId, asyncio.Lock] = WeakValueDictionary()

    async def describe(self, channel: grpc.aio.Channel, node_id: NodeId, name: str, weights: Weights) -> Described:
        """Ask a node what it has loaded under a name, and for its tokenizer if it is not here.

        Args:
            weights: what its card says of the model.

        Raises:
            PacelineError: it can't be had, or is another than the card says.
        """
        asking = self._asking.setdefault(node_id, asyncio.Lock())
        async with asking:
            tokenizer = self._built.get(weights.tokenizer) or await asyncio.to_thread(self._here, weights)
            known = frozenset() if tokenizer is None else frozenset({weights.tokenizer})
            said = await describe_model(channel, node_id, name, known=known, most_bytes=MAX_PACKED_BYTES, timeout_s=FETCH_S)
            model, sha256 = said.model, said.tokenizer_sha256
            if (model.digest, model.weights, sha256) != (weights.digest, weights.format, weights.tokenizer or sha256):
                raise FleetError(f"{node_id} has another {name[:200]} loaded than its card says, or another tokenizer for it")
            if tokenizer is None:
                tokenizer = self._built[sha256] = await asyncio.to_thread(self._take, sha256, said.tokenizer or b"", node_id)
            return Described(model, tokenizer)

    def _here(self, weights: Weights) -> BoundedTokenizer | None:
        """What this node has on disk: the model's own files come before what any other node says of it."""
        try:
            whole = find_whole(weights.digest, self._home)
            own = None if whole is None else open_model(str(whole[0].path), self._home).tokenizer
        except PacelineError as error:
            logger.debug("this node's own files have no tokenizer: %s", error)
            own = None
        if own is not None:
            return BoundedTokenizer(own, IDLE_S)
        path = self._path(weights.tokenizer)
        try:
            packed = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        try:
            if tokenizer_digest(packed) != weights.tokenizer:
                raise FleetError(f"{path} is damaged")
            tokenizer = self._built[weights.tokenizer] = BoundedTokenizer(unpack_tokenizer(packed, path), IDLE_S)
            return tokenizer
        except PacelineError as error:
            logger.warning("a tokenizer that was kept is removed, and fetched again: %s", error)
            path.unlink(missing_ok=True)
            return None

    def _take(self, sha256: str, packed: bytes, node_id: NodeId) -> BoundedTokenizer:
        """Read what came, and keep it once it is understood."""
        TokenizerProcess(packed).end()  # what is read here was read before within bounds
        tokenizer = BoundedTokenizer(unpack_tokenizer(packed, Path(f"the tokenizer of {node_id}")), IDLE_S)
        write_cache(self._path(sha256), packed)
        self._make_room()
        return tokenizer

    def _make_room(self) -> None:
        kept: list[tuple[float, int, Path]] = []
        for path in self._home.tokenizers.glob("*.packed"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process of this home removed it
            kept.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in kept) - self._most_bytes
        for _, size, path in sorted(kept):
            if over <= 0:
                break
            path.unlink(missing_ok=True)
            over -= size

    def _path(self, sha256: str) -> Path:
        return self._home.tokenizers / f"{sha256}.packed"
