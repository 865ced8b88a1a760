"""A request's stream, wherever it runs: the first node of its route that takes it answers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from paceline.core.errors import ContextOverflow, ExecutorUnavailable, FleetError, Overloaded, PacelineError, UnknownModel
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.server.inference import ChunkStream

MOVES_ON = (FleetError, ExecutorUnavailable, UnknownModel, Overloaded, ContextOverflow)
"""Refusals that the next node may not share: gone, no longer loaded, busy, with less memory."""


class Forwarded:
    """A `ChunkStream` over several that were not opened yet.

    Args:
        tries: opens the stream of each node, the best first; may raise `FleetError`.
        on_retry: told why a request moves on.
    """

    def __init__(
        self, request: GenerationRequest, tries: Sequence[Callable[[], ChunkStream]], on_retry: Callable[[PacelineError], None]
    ) -> None:
        self._request, self._tries, self._on_retry = request, list(tries), on_retry
        self._stream: ChunkStream | None = None
        self._begun = False
        self._over = False
        self._running = set(range(request.n))
        self._refusal: PacelineError | None = None

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        """What was gained since the last item.

        Raises:
            UnknownModel, ContextOverflow, Overloaded, InvalidRequest: no node takes the request; as the best of them said.
            FleetError: none could be reached.
        """
        while not self._over:
            try:
                item = await self._next()
            except StopAsyncIteration:
                if self._running:
                    return self._broken("The node ended the answer before its end")
                await self.aclose()
                raise
            except MOVES_ON as error:
                if self._begun:
                    return self._broken(error.message)
                await self._move_on(error)
            except asyncio.CancelledError:
                await self.aclose()
                raise
            else:
                self._begun = self._begun or not all(chunk.notices for chunk in item)
                self._running -= {chunk.index for chunk in item if chunk.finish_reason is not None}
                return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End it, wherever it runs. Idempotent."""
        self._over = True
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()

    async def _next(self) -> Sequence[GenerationChunk]:
        if self._stream is None:
            if not self._tries:
                self._over = True
                raise self._refusal or UnknownModel("No node of the fleet has this model loaded any more", "Look at /v1/models.")
            self._stream = self._tries.pop(0)()
        item = await anext(self._stream)
        if not self._begun and (ended := next((chunk for chunk in item if chunk.code is not None), None)) is not None:
            raise ExecutorUnavailable(ended.error or "The machines it takes are not there", code=ended.code or "")
        return item

    async def _move_on(self, error: PacelineError) -> None:
        if self._over:
            raise error
        # What the best node says is what the client should hear, unless it said nothing.
        if self._refusal is None or isinstance(self._refusal, FleetError):
            self._refusal = error
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()
        if self._tries:
            self._on_retry(error)

    def _broken(self, why: str) -> Sequence[GenerationChunk]:
        """The end of an answer that can't go on."""
        self._over = True
        return [
            GenerationChunk(self._request.request_id, index, (), "", finish_reason=FinishReason.ERROR, error=why)
            for index in sorted(self._running)
        ]
