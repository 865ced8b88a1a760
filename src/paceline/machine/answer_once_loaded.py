"""The stream of one answer, from a model that may have to be loaded first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.inference import ChunkStream
from paceline.machine.host import EngineHost


class AnswerOnceLoaded:
    """Implements `core.inference.ChunkStream`.

    Args:
        host_of: loads a model if it is not loaded, and returns its host.
    """

    def __init__(self, host_of: Callable[[str], Awaitable[EngineHost]], name: str, request: GenerationRequest) -> None:
        self._host_of, self._name, self._request = host_of, name, request
        self._stream: ChunkStream | None = None
        self._closed = False

    def __aiter__(self) -> AnswerOnceLoaded:
        return self

    def __anext__(self) -> Awaitable[Sequence[GenerationChunk]]:
        return self._begin() if self._stream is None else self._stream.__anext__()

    async def _begin(self) -> Sequence[GenerationChunk]:
        if self._closed:
            raise StopAsyncIteration
        host = await self._host_of(self._name)
        self._stream = host.generate(self._name, self._request)
        return await self._stream.__anext__()

    async def aclose(self) -> None:
        self._closed = True
        if self._stream is not None:
            await self._stream.aclose()
