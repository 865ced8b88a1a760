"""Texts to vectors, for whichever API asks.

Law: the event loop computes nothing. Texts are tokenized and run in threads, a few at a time, so that short requests come through between the parts
of long ones. After a client leaves, at most the part under way is computed for it. Nothing is cut: a text that is too long is refused by its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import PlainValidator, WithJsonSchema

from paceline.core.errors import ContextOverflow, InvalidRequest, Overloaded
from paceline.core.text import Tokenizer
from paceline.server.metrics import Meter
from paceline.server.requests import check_texts, texts_schema

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


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of a request's texts, in its order."""

    vectors: Vectors
    tokens: tuple[int, ...]
    """Token count of each text, including the tokens that the model puts around it."""


class Embedder:
    """Embeddings service over one encoder. Lives on one event loop.

    Args:
        encoder: None: none is served.
        workers: threads that run texts, each one text at a time.
    """

    def __init__(self, encoder: TextEncoder | None, workers: int, meter: Meter) -> None:
        self.encoder: Final = encoder
        self._workers, self._meter = workers, meter
        self._running = ThreadPoolExecutor(workers, thread_name_prefix="paceline-embed")
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="paceline-embed-intake")
        self._requests = self._held = 0

    def is_meant(self, name: str) -> bool:
        """Return whether a client that asks for this model means the encoder."""
        return self.encoder is not None and self.encoder.name.lower() == name.removesuffix(":latest").lower()

    def close(self) -> None:
        """End the threads, after what they are at."""
        for pool in (self._running, self._tokenizing):
            pool.shutdown(wait=True, cancel_futures=True)

    async def embed(self, encoder: TextEncoder, inputs: Sequence[str | Sequence[int]], field: str = "input") -> Embedded:
        """Return vectors of texts, or of token ids, which are taken as they are.

        Args:
            inputs: at least one.
            field: name of the field in errors.

        Raises:
            InvalidRequest, ContextOverflow: a text is empty, too long, or has a token outside the vocabulary.
            Overloaded: too many requests run or wait.
        """
        size = sum(4 * len(given) if isinstance(given, str) else ID_BYTES * len(given) for given in inputs)
        if self._requests >= MOST_REQUESTS or (self._requests and self._held + size > MOST_HELD_BYTES):
            raise Overloaded("Too many texts are being embedded: other requests run or wait", "Try again later.", retry_after_s=1)
        self._requests += 1
        self._held += size
        try:
            texts = await self._tokenized(encoder, inputs, field)
            return Embedded(await self._run(encoder, texts), tuple(len(ids) for ids in texts))
        finally:
            self._requests -= 1
            self._held -= size

    async def _tokenized(self, encoder: TextEncoder, inputs: Sequence[str | Sequence[int]], field: str) -> list[Ids]:
        loop = asyncio.get_running_loop()
        names = [field] if len(inputs) == 1 else [f"{field}[{place}]" for place in range(len(inputs))]

        def part(first: int) -> list[Ids]:
            several = slice(first, first + PART_TEXTS)
            return [tokenize_input(encoder, given, name) for given, name in zip(inputs[several], names[several], strict=True)]

        texts: list[Ids] = []
        for first in range(0, len(inputs), PART_TEXTS):
            texts += await loop.run_in_executor(self._tokenizing, part, first)
        return texts

    async def _run(self, encoder: TextEncoder, texts: Sequence[Ids]) -> Vectors:
        """Run texts in parts. Each worker has at most one part running or queued, so requests take turns."""
        loop = asyncio.get_running_loop()
        vectors = np.empty((len(texts), encoder.dimensions), np.float32)
        left = parts_of_work(texts)

        async def work() -> None:
            for part in left:
                vectors[part] = await loop.run_in_executor(self._running, encoder.vectors, texts[part])
                self._meter.embedded_tokens += sum(len(ids) for ids in texts[part])

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


MOST_INPUTS: Final = 2048
"""Maximum number of inputs of one request, as OpenAI has it."""
Input = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(partial(check_texts, most=MOST_INPUTS)),
    WithJsonSchema(texts_schema(MOST_INPUTS, shortest=1)),
]
