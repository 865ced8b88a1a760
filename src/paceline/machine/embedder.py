"""Texts to vectors with this machine's own encoder, for its API and for other nodes.

Law: the event loop computes nothing. Texts are tokenized and run in threads, a few at a time, so that short requests come through between the parts
of long ones. After a client leaves, at most the part under way is computed for it. Nothing is cut: a text that is too long is refused by its place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.encoding import Encoded, EncodeRequest
from paceline.core.errors import ContextOverflow, InvalidRequest, Overloaded
from paceline.core.text import Tokenizer
from paceline.fleet.card import ModelShape

Ids = npt.NDArray[np.int32]
Vectors = npt.NDArray[np.float32]

MOST_REQUESTS: Final = 64
"""Requests that run or wait; more get 429. Raising it: longer waits."""
MOST_HELD_BYTES: Final = 512 << 20
"""Bytes that requests hold together, approximately; a request that finds no other may be larger. Raising it: more memory."""
ID_BYTES: Final = 48
"""Bytes that a token id holds after it is read from JSON; a letter holds four at most."""
LETTERS_PER_TOKEN: Final = 64
"""More than texts have. A word that the vocabulary lacks is one token however long it is, and blanks are none: only a text's letters tell, before it is
tokenized, how long that holds up all others. Raising it: longer."""
PART_TOKENS: Final = 1024
"""Run together before other requests have a turn; a longer text is a part of its own. Raising it: others wait longer, and so does a stop."""
PART_TEXTS: Final = 64
"""Tokenized before other requests have a turn."""
WORKERS: Final = min(2, os.cpu_count() or 1)
"""Texts that an encoder runs side by side. Raising it: embeddings come sooner where cores are free, and answers of chats come later."""


class TextEncoder(Protocol):
    """A model that makes vectors. Methods block, may be called from several threads, and give a text the same bytes in any company."""

    @property
    def name(self) -> str: ...

    @property
    def created(self) -> int:
        """Unix seconds."""
        ...

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of one text, including the tokens that the model puts around it."""
        ...

    @property
    def dimensions(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def vectors(self, texts: Sequence[Ids]) -> Vectors:
        """Return a row for each text. Each has a token, and at most `max_tokens`."""
        ...


class Embedder:
    """Embeddings service over one encoder. Lives on one event loop.

    Args:
        workers: threads that run texts, each one text at a time.
    """

    def __init__(self, encoder: TextEncoder, workers: int = WORKERS) -> None:
        self.encoder: Final = encoder
        self._workers = workers
        self._running = ThreadPoolExecutor(workers, thread_name_prefix="paceline-embed")
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="paceline-embed-intake")
        self._requests = self._held = 0

    def close(self) -> None:
        """End the threads, after what they are at."""
        for pool in (self._running, self._tokenizing):
            pool.shutdown(wait=True, cancel_futures=True)

    async def embed(self, request: EncodeRequest) -> Encoded:
        """Return vectors of texts, or of token ids, which are taken as they are.

        Raises:
            InvalidRequest, ContextOverflow: a text is empty, too long, or has a token outside the vocabulary.
            Overloaded: too many requests run or wait.
        """
        size = sum(4 * len(given) if isinstance(given, str) else ID_BYTES * len(given) for given in request.inputs)
        if self._requests >= MOST_REQUESTS or (self._requests and self._held + size > MOST_HELD_BYTES):
            raise Overloaded("Too many texts are being embedded: other requests run or wait", "Try again later.", retry_after_s=1)
        self._requests += 1
        self._held += size
        try:
            texts = await self._tokenized(request)
            return Encoded(await self._run(texts), sum(len(ids) for ids in texts))
        finally:
            self._requests -= 1
            self._held -= size

    async def _tokenized(self, request: EncodeRequest) -> list[Ids]:
        loop = asyncio.get_running_loop()
        inputs, names = request.inputs, request.names

        def part(first: int) -> list[Ids]:
            several = slice(first, first + PART_TEXTS)
            return [tokenize_input(self.encoder, given, name) for given, name in zip(inputs[several], names[several], strict=True)]

        texts: list[Ids] = []
        for first in range(0, len(inputs), PART_TEXTS):
            texts += await loop.run_in_executor(self._tokenizing, part, first)
        return texts

    async def _run(self, texts: Sequence[Ids]) -> Vectors:
        """Run texts in parts. Each worker has at most one part running or queued, so requests take turns."""
        loop = asyncio.get_running_loop()
        vectors = np.empty((len(texts), self.encoder.dimensions), np.float32)
        left = parts_of_work(texts)

        async def work() -> None:
            for part in left:
                vectors[part] = await loop.run_in_executor(self._running, self.encoder.vectors, texts[part])

        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(work())
        return vectors


def tokenize_input(encoder: TextEncoder, given: str | Sequence[int], field: str) -> Ids:
    """Ids of one input.

    Raises:
        InvalidRequest, ContextOverflow: as `Embedder.embed`.
    """
    if not given:
        raise InvalidRequest(f"{field}: empty", "Leave it out, or send some text.", field=field)
    if isinstance(given, str):
        if len(given) > LETTERS_PER_TOKEN * encoder.max_tokens:
            raise _too_long(encoder, f"{len(given)} letters", field)
        try:
            ids: Sequence[int] = encoder.tokenizer.encode(given)
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: {error.message}", error.hint, field=field) from error
    else:
        ids = given
        if max(ids) >= encoder.tokenizer.size:
            raise InvalidRequest(f"{field}: token {max(ids)} is not one of the model's {encoder.tokenizer.size}", field=field)
    if len(ids) > encoder.max_tokens:
        raise _too_long(encoder, f"{len(ids)} tokens", field)
    return np.array(ids, np.int32)


def _too_long(encoder: TextEncoder, length: str, field: str) -> ContextOverflow:
    told = f"{field}: {length}, and {encoder.name} takes {encoder.max_tokens} tokens of a text"
    return ContextOverflow(told, "Send it in parts: what is behind the limit would have no share in the vector.", field=field)


def parts_of_work(texts: Sequence[Ids]) -> Iterator[slice]:
    """Texts that are run one after the other by one worker: some tokens together."""
    first = tokens = 0
    for place, ids in enumerate(texts):
        if tokens and tokens + len(ids) > PART_TOKENS:
            yield slice(first, place)
            first, tokens = place, 0
        tokens += len(ids)
    yield slice(first, len(texts))


def encoder_shape(max_tokens: int, dimensions: int = 0, n_layers: int = 0) -> ModelShape:
    """Return what a card says of an encoder's sizes. It is in no plan.

    Args:
        dimensions, n_layers: 0: not known.
    """
    return ModelShape(n_layers, dimensions, 0, 0, 0, max_tokens)
