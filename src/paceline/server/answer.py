"""Runs a call and writes its answer straight to ASGI: no framework between a token and the socket.

Law: one task pumps, one waits for the client to go away, and neither costs the other anything per token. Whichever ends
first (or the server's stop) ends the other, and the generation is closed before the answer is over. A status is sent only
when the first tokens are there, so that a refusal at admission is a real 4xx; or after a silence that lasts, in which a comment
keeps the connection alive for all that is on the way. The prompts of a call run side by side, as one stream of chunks; however it is left,
every request in it is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.background import end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import FORM_NOT_FOLLOWED, PacelineError
from paceline.core.generation import (
    AnswerProgress,
    FinishReason,
    GenerationChunk,
    ModelLoading,
    Notice,
    PromptReading,
    TokenLogprob,
    progress_of,
)
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream, Inference
from paceline.server.call import Call
from paceline.server.faults import STOPPING, Fault, Refusal, api_of, fault_of_error, no_machines, server_fault
from paceline.server.fields import notes
from paceline.server.formats.format import CallArguments, Content, Part
from paceline.server.metrics import Meter
from paceline.server.shape import Reader, Usage

OBJECT = "paceline.event"


class Events:
    """Sends notices about a call as named SSE events, to clients that set `stream_options.include_events`. They are not part of its answers.

    Law: a client that does not ask for events sees no trace of them: no byte, no status sent early. A client that asks gets each notice once, however many
    prompts its call has. OpenAI's clients can skip every event: it has `choices: []`, as the event with the usage has.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sent: Counter[bytes] = Counter()
        self._heard: Counter[tuple[RequestId, bytes]] = Counter()
        self._reading: dict[RequestId, AnswerProgress] = {}
        """Progress of the call's prompts that take long to read, or wait until an engine has loaded the model."""

    @property
    def reading(self) -> AnswerProgress | None:
        """The load that a prompt waits for, else the sum of the progress of all prompts that take long to read; None if there are none."""
        each = [one for one in self._reading.values() if isinstance(one, PromptReading)]
        loading = next((one for one in self._reading.values() if isinstance(one, ModelLoading)), None)
        return loading or (PromptReading(sum(one.tokens_read for one in each), sum(one.tokens for one in each)) if each else None)

    def take(self, chunks: Sequence[GenerationChunk]) -> tuple[bytes, Sequence[GenerationChunk]]:
        """Take the notices out of an item. Returns them as events, and the item without them."""
        if self._reading:
            for chunk in chunks:
                if not chunk.notices:
                    self._reading.pop(chunk.request_id, None)
        if not any(chunk.notices for chunk in chunks):
            return b"", chunks
        told = b""
        for chunk in chunks:
            for notice in chunk.notices:
                if (reading := progress_of(notice)) is not None:
                    self._reading[chunk.request_id] = reading
        if self._call.include_events:
            told = b"".join([self._once(chunk.request_id, notice) for chunk in chunks for notice in chunk.notices])
        return told, [chunk for chunk in chunks if not chunk.notices]

    def _once(self, request_id: RequestId, notice: Notice) -> bytes:
        """Return a notice as an event; empty if another of the call's prompts sent the same one before."""
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
    """Start a call. Returns its chunks; those of one prompt come straight from the inference.

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
        await end_tasks(*tasks)
        for stream in streams:  # a task cancelled before its first step never reached its own `finally`
            await stream.aclose()


STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Tally:
    """Counts a call's tokens and times them."""

    def __init__(self, call: Call, meter: Meter, clock: Clock, arrived_s: float) -> None:
        self._meter = meter
        self._clock = clock
        self._arrived_s = arrived_s
        self._prompt = sum(len(request.prompt_ids) for request in call.requests)
        self._completion = 0
        self._cached = 0
        self._first_s = 0.0
        self._last_s: list[float | None] = [None] * (call.n * len(call.requests))
        self.base = {request.request_id: place * call.n for place, request in enumerate(call.requests)}
        """First choice of each prompt."""
        self.open = len(self._last_s)
        """Choices that have not ended."""

    def count(self, chunks: Sequence[GenerationChunk]) -> None:
        """Take note of one item of the stream.

        Raises:
            Refusal: a sequence ended by an error.
        """
        now_s = self._clock.monotonic()
        for chunk in chunks:
            choice = self.base[chunk.request_id] + chunk.index
            tokens = len(chunk.token_ids) or chunk.n_tokens
            self._prompt += chunk.prompt_tokens
            if tokens:
                last_s = self._last_s[choice]
                if last_s is None:
                    self._meter.ttft.observe(now_s - self._arrived_s)
                    self._first_s = self._first_s or now_s - self._arrived_s
                    if tokens > 1:
                        self._meter.inter_token.observe(0.0, tokens - 1)
                    if not chunk.index:
                        self._cached += chunk.cached_tokens
                else:
                    self._meter.inter_token.observe((now_s - last_s) / tokens, tokens)
                self._last_s[choice] = now_s
                self._completion += tokens
            match chunk.finish_reason:
                case None:
                    pass
                case FinishReason.ERROR | FinishReason.ABORT:
                    raise Refusal(_ending(chunk))
                case _:
                    self.open -= 1

    def usage(self, readers: Sequence[Reader]) -> Usage:
        reasoning = sum(reader.reasoning_tokens for reader in readers)
        whole_s = self._clock.monotonic() - self._arrived_s
        return Usage(self._prompt, self._completion, self._cached, self._first_s, whole_s, reasoning)


class Answer(Response):
    """The response to a call. FastAPI hands it the ASGI channel and stays out of the way."""

    media_type = None

    def __init__(
        self,
        call: Call,
        inference: Inference,
        meter: Meter,
        clock: Clock,
        arrived_s: float,
        stopping: asyncio.Future[None],
        comment_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self._call = call
        self._inference = inference
        self._meter = meter
        self._shape = call.shape(call)
        self._tally = Tally(call, meter, clock, arrived_s)
        self._stopping = stopping
        self._comment_s, self._clock, self._sleep = comment_s, clock, sleep
        self._headers = [(name.encode(), value.encode()) for name, value in notes(call.ignored, call.fitted).items()]
        self._started = False
        self._ended = False
        """The last of it was sent."""
        self._sent_s = clock.monotonic()
        """When something was last sent."""
        self._events = Events(call)
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run to the first of: answered, client gone, server stopping."""
        pump = asyncio.create_task(self._commented(send) if self._call.stream else self._whole(send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((pump, gone, self._stopping), return_when=asyncio.FIRST_COMPLETED)
            finished = pump.done()
        finally:
            await end_tasks(gone, pump)
        if finished:
            await self._end(pump, scope, receive, send)
        elif self._ended:  # what was beside it was being put away
            pass
        elif gone.done() and not gone.cancelled():
            self._meter.disconnects += 1
        else:
            await self._fail(STOPPING, scope, receive, send)

    async def _end(self, pump: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> None:
        match pump.exception():
            case None:
                pass
            case Refusal() as refusal:
                await self._fail(refusal.fault, scope, receive, send)
            case PacelineError() as error:
                await self._fail(fault_of_error(error), scope, receive, send)
            case error:
                if self._started and not self._ended:
                    await self._fail(server_fault("The server failed while it answered"), scope, receive, send)
                raise error

    async def _fail(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        """Report a failure: as a status if none is sent yet, else as the stream's last event, without [DONE] because the answer is not complete."""
        if self._started:
            await send({"type": "http.response.body", "body": self._shape.fault_event(fault), "more_body": False})
        else:
            await fault.response(api_of(scope["path"]))(scope, receive, send)

    async def _commented(self, send: Send) -> None:
        """Send the stream, and comments while it is silent."""
        commenting = asyncio.create_task(self._comment(send))
        try:
            await self._stream(send)
        finally:
            await end_tasks(commenting)

    async def _comment(self, send: Send) -> None:
        while True:
            if (left_s := self._sent_s + self._comment_s - self._clock.monotonic()) > 0:
                await self._sleep(left_s)
            else:
                await self._put(self._shape.silence(self._events.reading), send)

    async def _put(self, body: bytes, send: Send) -> None:
        """Send a part of the stream, behind what comes first."""
        self._sent_s = self._clock.monotonic()
        async with self._sending:
            if not self._started:
                self._started = True
                headers = [(b"content-type", self._shape.media_type), *STREAM_HEADERS, *self._headers]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                body = self._shape.first_events() + body
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _stream(self, send: Send) -> None:
        shape, tally = self._shape, self._tally
        event, base, events, readers = shape.event, tally.base, self._events, self._shape.watching(self._call.readers())
        async with aclosing(open_call(self._inference, self._call)) as chunks:
            async for whole in chunks:
                body, item = events.take(whole)
                failed = counted(tally, item)
                partial = ""
                for chunk in merge_chunks(item):
                    choice = base[chunk.request_id] + chunk.index
                    parts = readers[choice].read(chunk)
                    partial += text_of(parts)
                    body += event(choice, parts, logprobs_of(chunk), None if failed else chunk.finish_reason)
                if failed is not None:
                    if not self._started:
                        raise failed.with_text(partial)
                    if body:
                        await self._put(body, send)
                    raise failed
                if body or (item and not self._started):
                    await self._put(body, send)
        self._check_complete()
        await self._put_last(shape.ending(tally.usage(readers)), send)

    async def _whole(self, send: Send) -> None:
        tally, events, readers = self._tally, self._events, self._shape.watching(self._call.readers())
        choices = [self._shape.collected() for _ in range(tally.open)]
        partial = [""] * tally.open
        async with aclosing(open_call(self._inference, self._call)) as chunks:
            async for whole in chunks:
                _, item = events.take(whole)
                failed = counted(tally, item)
                for chunk in item:
                    place = tally.base[chunk.request_id] + chunk.index
                    parts = readers[place].read(chunk)
                    partial[place] += text_of(parts)
                    if failed is not None and chunk.error is not None:
                        raise failed.with_text(partial[place])
                    choices[place].add(parts, logprobs_of(chunk), chunk.finish_reason)
                    choices[place].transfer = chunk.transfer
                if failed is not None:
                    raise failed
        self._check_complete()
        body = self._shape.whole(choices, tally.usage(readers))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self._headers]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._put_last(body, send)

    async def _put_last(self, body: bytes, send: Send) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": False})
        self._ended = True

    def _check_complete(self) -> None:
        """Raise an error if a choice has no end: a generation that just stops is a failure, not a short answer."""
        if self._tally.open:
            raise Refusal(server_fault("The generation ended before its answer did"))


def _ending(chunk: GenerationChunk) -> Fault:
    """Return the error for a sequence that ended for a reason outside itself."""
    message = chunk.error or "The generation was aborted by the server"
    if chunk.code == FORM_NOT_FOLLOWED:
        return Fault(400, message, code=FORM_NOT_FOLLOWED)
    return server_fault(message) if chunk.code is None else no_machines(message, chunk.code)


def counted(tally: Tally, chunks: Sequence[GenerationChunk]) -> Refusal | None:
    """Count one item of the stream. Returns the failure that it ends with, if it does; its texts are still to be written."""
    try:
        tally.count(chunks)
    except Refusal as refusal:
        return refusal
    return None


def text_of(parts: Sequence[Part]) -> str:
    """Return the text of a failed answer that its client is shown: content, and the arguments of calls."""
    return "".join([part.text for part in parts if isinstance(part, Content | CallArguments)])


def merge_chunks(chunks: Sequence[GenerationChunk]) -> Sequence[GenerationChunk]:
    """Chunks of one sequence that queued up while the loop was busy become one event: less to write, less to parse."""
    if len(chunks) < 2:
        return chunks
    by_sequence: dict[tuple[str, int], list[GenerationChunk]] = {}
    for chunk in chunks:
        by_sequence.setdefault((chunk.request_id, chunk.index), []).append(chunk)
    if len(by_sequence) == len(chunks):
        return chunks
    return [several[0] if len(several) == 1 else _one(several) for several in by_sequence.values()]


def _one(several: list[GenerationChunk]) -> GenerationChunk:
    first = several[0]
    return GenerationChunk(
        request_id=first.request_id,
        index=first.index,
        token_ids=tuple(token for chunk in several for token in chunk.token_ids),
        text="".join([chunk.text for chunk in several]),
        logprobs=tuple(logprob for chunk in several for logprob in chunk.logprobs),
        deltas=tuple(delta for chunk in several for delta in chunk.deltas),
        n_tokens=sum(chunk.n_tokens for chunk in several),
        prompt_tokens=sum(chunk.prompt_tokens for chunk in several),
        prompt_logprobs=tuple(logprob for chunk in several for logprob in chunk.prompt_logprobs),
        finish_reason=several[-1].finish_reason,
        cached_tokens=first.cached_tokens,
    )


def logprobs_of(chunk: GenerationChunk) -> Sequence[TokenLogprob]:
    """Return the log probabilities of a chunk, the prompt's first."""
    return (*chunk.prompt_logprobs, *chunk.logprobs) if chunk.prompt_logprobs else chunk.logprobs


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its end."""
    while (await receive())["type"] != "http.disconnect":
        pass
