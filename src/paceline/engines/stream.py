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
        self.settled = False
        """The answer is complete, and only figures may follow. Silence or a lost connection then ends the stream without an error."""
        self.began = False
        """The answer has tokens, and the next are due within `EnginePatience.next_token_s`."""
        self._source, self._explain, self._separator, self._refusal = source, explain, separator, refusal
        self._content, self._verified = response.content, verified
        self._events: deque[dict[str, Any] | bytes] = deque()
        self._part = b""
        self._ended = False
        self._reads = False
        """A reader waits for the next bytes."""
        self._loop = asyncio.get_running_loop()
        self._moved_s = self._part_s = self._loop.time()

    async def begin(self) -> None:
        """Note that the first token has come. Raises what `verify` raised."""
        self.began = True
        if self._verified is not None:
            await self._verified

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> dict[str, Any] | bytes:
        """Return the next event.

        Raises:
            EngineGone: the answer ends before it is settled, or is silent for too long, or is not made of events.
            PacelineError: the engine ends it with an error.
        """
        while not self._events:
            if self._ended and self.settled:
                raise StopAsyncIteration
            if self._ended:
                raise self._source.gone("broke off its answer", "See its own log for the cause.")
            pause_s = self._loop.time() - self._part_s  # of the reader, not of the engine
            self._moved_s, self._part_s, self._reads = self._moved_s + pause_s, self._part_s + pause_s, True
            try:
                chunk = await self._content.readany()
            except (aiohttp.ClientError, OSError):
                chunk = b""
            self._reads = False
            self._feed(chunk)
        event = self._events.popleft()
        if type(event) is dict and (error := event.get("error")) is not None:
            status = error.get("code") if isinstance(error, dict) else event.get("status")
            refused = self._source.refused(status if isinstance(status, int) else 500, event, refusal=self._refusal)
            raise self._lost(refused)
        return event

    def _lost(self, error: PacelineError) -> PacelineError:
        """Return the error that ends the answer. A request is refused before its answer begins; after that the answer is lost, whatever the engine says."""
        return self._source.gone(f"broke off its answer: {error.message}") if self.began and not isinstance(error, EngineGone) else error

    def _feed(self, chunk: bytes) -> None:
        if not chunk:
            self._ended = True
            return
        data = self._part + chunk
        if b"\r" in data:  # the other line end that servers write; JSON has none inside
            data = data.replace(b"\r\n", b"\n")
        *whole, self._part = data.split(self._separator)
        if len(self._part) > MAX_EVENT_BYTES:
            raise self._source.gone(f"sent an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        self._part_s = self._loop.time()
        for event in whole:
            self._take(event)
        if self._part_s - self._moved_s > self._bound_s:
            raise self._source.gone(f"wrote nothing for {self._bound_s:g} s")

    def _take(self, event: bytes) -> None:
        data = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data_of(event, self._separator)
        if data == b"[DONE]":
            self._ended = True
        elif data.startswith(b":") and self._separator != b"\n":
            self._events.append(data)
        elif data:
            try:
                found = orjson.loads(data)
            except orjson.JSONDecodeError:
                found = None
            if not isinstance(found, dict):
                raise self._source.gone("sent something else than the events of its API")
            self._events.append(found)
            self._moved_s = self._part_s

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
        if self.settled:
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
