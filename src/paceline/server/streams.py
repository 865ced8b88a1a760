"""A call's requests as one stream of chunks: the prompts of a call run side by side, and end together.

However the stream is left (to its end, by an error, by cancellation), every request in it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from paceline.core.generation import GenerationChunk
from paceline.server.call import Call
from paceline.server.inference import ChunkStream, Inference


def open_call(inference: Inference, call: Call) -> ChunkStream:
    """The call's chunks; those of one prompt come straight from the inference.

    Raises:
        RequestError: as `Inference.generate` does, before the first item.
    """
    if len(call.requests) == 1:
        return inference.generate(call.model.name, call.requests[0])
    return _side_by_side([inference.generate(call.model.name, request) for request in call.requests])


async def _side_by_side(streams: list[ChunkStream]) -> AsyncGenerator[Sequence[GenerationChunk], None]:
    items: asyncio.Queue[Sequence[GenerationChunk] | BaseException | None] = asyncio.Queue()

    async def drain(stream: ChunkStream) -> None:
        try:
            async for item in stream:
                items.put_nowait(item)
            items.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
            items.put_nowait(error)
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            match await items.get():
                case None:
                    open_streams -= 1
                case BaseException() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:  # a task cancelled before its first step never reached its own `finally`
            await stream.aclose()
