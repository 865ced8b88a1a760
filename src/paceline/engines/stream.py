"""The events of an engine's answer, and what a silence in it means."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import aiohttp
import orjson

from paceline.core.errors import EngineGone, PacelineError
from paceline.engines.patience import EnginePatience

Refusal = Callable[[int, str], PacelineError | None]
"""An adapter's own reading of a refusal: its status and message. None: the common reading is right."""

SLICE: Final = 64
"""Events without progress that are read until other requests have their turn. Raising it: these wait for longer; lowering it: more turns."""
MAX_IDLE_EVENTS: Final = 1 << 16
"""Maximum events in a row without progress. Raising it: an engine that sends empty events without end keeps this machine busy for longer; some engines send
one for each token that they hide.
"""
MAX_EVENT_BYTES: Final = 4 << 20
"""Maximum size of one event of a stream. Raising it: a broken engine can fill more memory; an event with 20 log probabilities for each of 100 tokens takes 200 KiB."""


class Source(Protocol):
    """The engine that an answer comes from."""

    @property
    def patience(self) -> EnginePatience: ...

    def gone(self, what: str, hint: str = "") -> EngineGone: ...

    def refused(self, status: int, body: Any, retry_after: str = "", refusal: Refusal | None = None) -> PacelineError: ...


class Stream:
    """Events of one answer: objects, and comments as bytes."""

    def __init__(
        self,
        source: Source,
        response: aiohttp.ClientResponse,
        explain: Callable[[], Awaitable[None]],
        verified: asyncio.Future[None] | None,
        separator: bytes,
        refusal: Refusal | None,
    ) -> None:
        self.began = False
        """The answer has tokens, and the next are due within `EnginePatience.next_token_s`."""
        self._source, self._explain, self._separator, self._refusal = source, explain, separator, refusal
        self._content, self._verified = response.content, verified
        self._events: deque[bytes] = deque()
        self._part = bytearray()
        self._ends_in_return = False
        """The bytes so far end in a carriage return, which may be half of a line end. It is not in `_part` yet."""
        self._ended = False
        self._settled_s: float | None = None
        """Time since which the answer is complete. None: it is not."""
        self._idle = 0
        """Events since the last progress."""
        self._tokens_read = 0
        self._reads = False
        """A reader waits for the next bytes."""
        self._loop = asyncio.get_running_loop()
        self._moved_s = self._part_s = self._loop.time()

    async def begin(self) -> None:
        """Note that the first token has come. Raises what `verify` raised."""
        self.began = True
        if self._verified is not None:
            await self._verified

    def moved(self) -> None:
        """Note that the last event had a part of the answer."""
        self._idle, self._moved_s = 0, self._part_s

    def has_read(self, tokens: int) -> None:
        """Note how much of the prompt the engine says that it has read. Only more than before is progress."""
        if tokens > self._tokens_read:
            self._tokens_read = tokens
            self.moved()

    def settle(self) -> None:
        """Note that the answer is complete. Only figures may follow, and only for `EnginePatience.figures_s`; their lack is not an error."""
        if self._settled_s is None:
            self._settled_s = self._loop.time()
            self.moved()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> dict[str, Any] | bytes:
        """Return the next event.

        Raises:
            EngineGone: the answer ends before it is settled, makes no progress for too long, or is not made of events.
            PacelineError: the engine ends it with an error.
        """
        while True:
            settled_s = self._settled_s
            if not self._events:
                if settled_s is not None and self._loop.time() - settled_s > self._source.patience.figures_s:
                    raise StopAsyncIteration
                if self._ended and settled_s is not None:
                    raise StopAsyncIteration
                await self._receive()
                continue
            self._idle += 1
            if self._idle > MAX_IDLE_EVENTS:
                raise StopAsyncIteration if settled_s is not None else self._source.gone("sends events without a part of the answer")
            if self._idle % SLICE == 0:
                await asyncio.sleep(0)
            event = self._event(self._events.popleft())
            if isinstance(event, dict) and (error := event.get("error")) is not None:
                status = error.get("code") if isinstance(error, dict) else event.get("status")
                refused = self._source.refused(status if isinstance(status, int) else 500, event, refusal=self._refusal)
                raise self._lost(refused)
            if event is not None:
                return event

    async def _receive(self) -> None:
        """Read further bytes."""
        if self._ended:
            raise self._source.gone("broke off its answer", "See its own log for the cause.")
        if self._settled_s is None and self._part_s - self._moved_s > self._bound_s:
            raise self._source.gone(f"wrote nothing for {self._bound_s:g} s")
        pause_s = self._loop.time() - self._part_s  # of the reader, not of the engine
        self._moved_s, self._part_s, self._reads = self._moved_s + pause_s, self._part_s + pause_s, True
        try:
            chunk = await self._content.readany()
        except (aiohttp.ClientError, OSError):
            chunk = b""
        self._reads = False
        self._feed(chunk)

    def _lost(self, error: PacelineError) -> PacelineError:
        """Return the error that ends the answer. A request is refused before its answer begins; after that the answer is lost, whatever the engine says."""
        return self._source.gone(f"broke off its answer: {error.message}") if self.began and not isinstance(error, EngineGone) else error

    def _feed(self, chunk: bytes) -> None:
        if not chunk:
            self._ended = True
            return
        self._part_s = self._loop.time()
        if self._ends_in_return:
            chunk = b"\r" + chunk
        if b"\r" in chunk:  # the other line end that servers write; JSON has none inside
            chunk = chunk.replace(b"\r\n", b"\n")
        self._ends_in_return = chunk.endswith(b"\r")
        begin = max(0, len(self._part) + 1 - len(self._separator))
        self._part += chunk.removesuffix(b"\r")
        if self._part.find(self._separator, begin) >= 0:  # each byte is looked at once, however small the chunks are
            *whole, part = self._part.split(self._separator)
            self._part = part
            self._events += map(bytes, whole)
        if len(self._part) > MAX_EVENT_BYTES:
            raise self._source.gone(f"sent an event of more than {MAX_EVENT_BYTES >> 20} MiB")

    def _event(self, event: bytes) -> dict[str, Any] | bytes | None:
        """Return an object or a comment. None: there is none in the event."""
        data = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data_of(event, self._separator)
        if data == b"[DONE]":
            self._ended = True
            self._events.clear()
            return None
        if not data or (data.startswith(b":") and self._separator != b"\n"):
            return data or None
        try:
            found = orjson.loads(data)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise self._source.gone("sent something else than the events of its API")
        return found

    @property
    def _bound_s(self) -> float:
        return self._source.patience.next_token_s if self.began else self._source.patience.first_token_s

    async def watch(self) -> None:
        """Look at each silence, and end the answer if it means that the engine is gone."""
        quiet_s = self._source.patience.quiet_s
        while not self._ended:
            silent_s = self._loop.time() - self._part_s if self._reads else 0.0
            if silent_s >= quiet_s:
                try:
                    await self._judge()
                except PacelineError as error:
                    self._content.set_exception(self._lost(error))
                    return
                silent_s = 0.0
            await asyncio.sleep(quiet_s - silent_s)

    async def _judge(self) -> None:
        """Decide what a silence means."""
        if self._settled_s is not None:
            self._content.feed_eof()
            return
        now_s = self._loop.time()
        if self._part and now_s - self._part_s > self._source.patience.half_event_s:
            raise self._source.gone("stopped in the middle of an event")
        if now_s - self._moved_s > self._bound_s:
            raise self._source.gone(f"wrote nothing for {self._bound_s:g} s")
        await self._explain()


def _data_of(event: bytes, separator: bytes) -> bytes:
    """Return the data of an event of several lines, or a comment."""
    if separator == b"\n":
        return event.strip()
    found = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    if found:
        return b"\n".join(found)
    return event.strip() if event.lstrip().startswith(b":") else b""
