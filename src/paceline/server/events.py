"""What happened to an answer and is no part of it, as named SSE events, for clients that ask with `stream_options.include_events`.

Law: a client that does not ask sees nothing of it: no byte, no status sent early. One that asks hears of each happening once, however many
prompts its call has, and every event is one that OpenAI's clients can read past: it has `choices: []`, as the event with the usage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import orjson

from paceline.core.generation import GenerationChunk, Notice
from paceline.core.ids import RequestId
from paceline.server.call import Call

OBJECT = "paceline.event"


class Events:
    """Of one call."""

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
