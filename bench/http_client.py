"""Streaming clients of one endpoint, in a process of their own: connects all, sends all at once, notes when bytes came, parses afterwards.

Reads a job as JSON from stdin (`port`, `bodies`), writes time stamps as JSON to stdout. Parsing waits until every stream has ended, so that
the clients take as little processor time as clients can.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, cast

BOUND_S = 300.0
END = b"data: [DONE]\n\n"


class Stream(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base

    def send(self, body: bytes, path: bytes = b"/v1/completions") -> None:
        assert self._transport is not None
        head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (path, len(body)) + body)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


def parsed(stream: Stream) -> dict[str, Any]:
    """When events came, and how many tokens the endpoint says it made."""
    raw = b"".join(data for _, data in stream.pieces)
    if not raw.startswith(b"HTTP/1.1 200 ") or END not in raw:
        raise RuntimeError(f"the endpoint answered {raw[:400]!r} ... {raw[-200:]!r}")
    events_s = [at for at, data in stream.pieces for _ in range(data.count(b'"text"'))]
    usage = raw.rpartition(b'"completion_tokens":')[2]
    digits = usage[: next(at for at, byte in enumerate(usage) if not chr(byte).isdigit())]
    return {"events_s": events_s, "ended_s": stream.pieces[-1][0], "tokens": int(digits)}


async def main() -> None:
    job = json.loads(sys.stdin.readline())
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    for _ in job["bodies"]:
        _, stream = await loop.create_connection(Stream, "127.0.0.1", job["port"])
        streams.append(stream)
    bodies = [json.dumps(body).encode() for body in job["bodies"]]
    started_s = time.perf_counter()
    for stream, body in zip(streams, bodies, strict=True):
        stream.send(body)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(stream.ended for stream in streams))
    print(json.dumps({"started_s": started_s, "streams": [parsed(stream) for stream in streams]}))


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
