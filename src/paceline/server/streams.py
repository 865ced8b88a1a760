"""A call's requests as one stream of chunks: the prompts of a call run side by side, and end together.

However the stream is left (to its end, by an error, by cancellation), every request in it is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import orjson

from paceline.core.generation import GenerationChunk, Notice
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream, Inference
from paceline.server.call import Call

OBJECT = "paceline.event"


class Events:
    """What happened to a call's answers and is no part of them, as named SSE events, for clients that ask with `stream_options.include_events`.

    Law: a client that does not ask sees nothing of it: no byte, no status sent early. One that asks hears of each happening once, however many
    prompts its call has, and every event is one that OpenAI's clients can read past: it has `choices: []`, as the event with the usage.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sent: Counter[bytes] = Counter()
        self._heard: Counter[tuple[RequestId, bytes]] = Counter()

    def take(self, chunks: Sequence[GenerationChunk]) -> tuple[bytes, Sequence[GenerationChunk]]:
        """What an item says of happenings, as events, and the item without them."""
        if not any(chunk.notices for chunk in chunks):
            return b"", chunks
        told = b""
        if self._call.include_events:
            told = b"".join([self._once(chunk.request_id, notice) for chunk in chunks for notice in chunk.notices])
        return told, [chunk for chunk in chunks if not chunk.notices]

    def _once(self, request_id: RequestId, notice: Notice) -> bytes:
        """The event, unless another of the call's prompts was told the same."""
        call = self._call
        said = {"object": OBJECT, "event": notice.kind, "detail": dict(notice.detail)}
        base = {"id": call.id, "created": call.created, "model": call.model.name, "choices": []}
        event = b"event: " + notice.kind.encode() + b"\ndata: " + orjson.dumps(base | said) + b"\n\n"
        self._heard[request_id, event] += 1
        if self._heard[request_id, event] <= self._sent[event]:
            return b""
        self._sent[event] += 1
        return event


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
