"""The engine as the server sees it: `core.inference.Inference` over an engine that runs elsewhere.

Everything here happens on one event loop; the engine's reports come in through one `call_soon_threadsafe` a step, for all requests
together. A stream that is closed or cancelled aborts its request at once; the caller that opened one closes it. When the engine dies, every stream ends with an
error; another engine takes its place over the same weights, within a bound on how often, and beyond it every later call ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from weakref import WeakValueDictionary

from paceline.core.backoff import Recent
from paceline.core.clock import Clock
from paceline.core.errors import (
    ENGINE_GONE,
    SERVER_STOPPING,
    EngineGone,
    InvalidRequest,
    NodeStopping,
    PacelineError,
    UnknownModel,
    WayNotAllowed,
)
from paceline.core.generation import LOCAL_FALLBACK, FinishReason, GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream, Progress, ServedModel
from paceline.core.stats import EngineStats
from paceline.engine.config import EngineConfig, check_room
from paceline.engine.grammar import Grammars
from paceline.fleet.plan import ALONE
from paceline.machine.engine_thread import Abort, Add, Command, Died, EngineThread, News, Rebuilt, StepEngine, StepReport
from paceline.machine.turns import Turns

logger = logging.getLogger(__name__)

COMES_BACK = "Another takes its place: ask again"
STAYS_DOWN = "It stays down for some minutes, and is then tried again: restart paceline if this lasts"
REBUILDS, WITHIN_S = 3, 600.0
"""How often an engine is built anew in so many seconds. Raising it: one that fails at every request goes on failing them for longer."""
OF_CLIENTS = 2
"""Grammars of this node's own clients that are compiled at once: one that takes seconds holds up no other. Raising it: more cores are taken."""
MOST_FORMS = 8
"""Forms of one client that wait to be compiled. Raising it: its later ones wait longer; lowering it: bursts of new forms are refused."""
CLOSE_TIMEOUT_S = 1.0
"""How long a step in progress may hold up a stop. Raising it delays Ctrl-C; lowering it abandons more steps."""


class EngineHost:
    """One engine, one model, many streams."""

    def __init__(
        self,
        engine: StepEngine,
        release: Callable[[], None],
        model: ServedModel,
        config: EngineConfig,
        clock: Clock,
        rebuild: Callable[[], StepEngine] | None = None,
        grammars: Grammars | None = None,
        ways: Callable[[], frozenset[str]] = lambda: frozenset({ALONE}),
        lacks: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Start the engine.

        Args:
            engine: owned from here on.
            release: frees what the engine ran on; called last, by `close` or by the engine's end.
            config: the engine's bounds. Held here too: a full queue is said at once, whatever the step in progress takes.
            rebuild: makes another engine over the same weights, in the engine's thread, once one failed; None: there is none.
            grammars: the engine's; compiled in a thread of their own before a request reaches it.
            ways: of spreading work, in which the engine serves now.
            lacks: see `Progress.lacks`; from any thread.
        """
        self._model = model
        self._config = config
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[RequestId, _Stream] = {}
        self._live_sequences = 0
        self._left_s = clock.monotonic()
        """When a request ended last."""
        self._sent = 0
        self._taken = 0
        self._has_work = False
        self._stats = engine.stats()
        self._follow_context()
        self._progressed_s = self._heard_s = clock.monotonic()
        self._advanced = engine.advanced
        self._died: str | None = None
        self._closed = self._draining = False
        self._rebuild = rebuild
        self._grammars, self._ways, self._lacks = grammars, ways, lacks
        self._compiler = ThreadPoolExecutor(OF_CLIENTS + 1, "grammars")
        """Of its own: a flood of grammars, seconds each, would hold all threads that others' work waits for."""
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By the node that asks."""
        self._clients = Turns(OF_CLIENTS, MOST_FORMS)
        self._rebuilt = Recent(REBUILDS, WITHIN_S)
        self._on_change: list[Callable[[], None]] = []
        self._thread = EngineThread(engine, release, self._tell, self._another)

    # ------------------------------------------------------------------------------------------------------ for the server

    def models(self) -> Sequence[ServedModel]:
        """What the engine serves, with the context that its KV memory allows now."""
        return (self._model,)

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """Start a request; see `Inference.generate`. Nothing happens before the first item is asked for.

        Args:
            request: with an id that no request had before: the engine may still speak of one that was left.
        """
        return _Stream(self, model, request)

    def stats(self) -> EngineStats:
        return self._stats

    def progress(self) -> Progress:
        busy = self._died is None and self._is_busy()
        advanced = self._thread.advanced
        if advanced != self._advanced:  # a part of a step counts too
            self._advanced, self._progressed_s = advanced, self._clock.monotonic()
        since_s = self._clock.monotonic() - self._progressed_s if busy else 0.0
        sign_s = min(since_s, self._clock.monotonic() - self._heard_s)
        return Progress(busy, since_s, sign_s, self._died, self._lacks(), self._stats.steps_expected_s if busy else 0.0)

    # -------------------------------------------------------------------------------------------------------- for its owner

    @property
    def is_up(self) -> bool:
        """Whether the engine takes requests."""
        return self._died is None and not self._draining

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def idle_s(self) -> float:
        """Since the last request ended, or the start; 0 while there is one."""
        return 0.0 if self._live else self._clock.monotonic() - self._left_s

    def wake(self) -> None:
        """See `EngineThread.wake`."""
        self._thread.wake()

    def drain(self) -> None:
        """Take no more requests; those that are live go on. On the event loop."""
        self._draining = True
        self._changed()

    def listen(self, changed: Callable[[], None]) -> None:
        """Have `changed` called on this event loop whenever the engine goes down or drains, and when another is up."""
        self._bind_loop()
        self._on_change.append(changed)

    def close(self) -> bool:
        """End every stream with an error and stop the engine. Idempotent. False if a step outlasted the wait."""
        if self._closed:
            return True
        self._closed = True
        self._fail_all("The server is stopping", SERVER_STOPPING)
        self._compiler.shutdown(wait=False)
        return self._thread.close(CLOSE_TIMEOUT_S)

    def expects(self, model: str) -> bool:
        """See `Inference.expects`: what is loaded is served."""
        del model
        return False

    # ----------------------------------------------------------------------------------------------------------- for streams

    def admit(self, stream: _Stream, model: str, request: GenerationRequest) -> None:
        """Give a request its place, or refuse it. What the engine refuses, a report says.

        Raises:
            UnknownModel, Overloaded: it can't be served.
            WayNotAllowed: it can't be served in a way that it allows.
            InvalidRequest: its id is in use.
            EngineGone: it failed, and there is no other yet, or for good.
            NodeStopping: it drains.
            PacelineError: this was closed.
        """
        if model != self._model.name:
            raise UnknownModel(f"The model {model!r} is not served here", f"Served here: {self._model.name}.")
        if self._closed:
            raise PacelineError("The engine was closed")
        if self._draining:
            raise NodeStopping("This machine is being stopped", "Try again in a moment.")
        if request.leg is not None:
            raise InvalidRequest("kv_transfer_params: this machine shares no KV of the model with others", field="kv_transfer_params")
        if self._died is not None:
            raise EngineGone(f"The engine of {model} failed: {self._died}", "Restart paceline if this lasts.")
        if request.request_id in self._live:
            raise InvalidRequest(f"The request id {request.request_id} is in use", "Give each request its own.")
        self._check_ways(request)
        check_room(self._live_sequences, len(request.indices), self._config, self._held_by(request.caller) if request.caller else None)
        self._bind_loop()
        self._live[request.request_id] = stream
        self._live_sequences += len(request.indices)

    async def begin(self, stream: _Stream) -> None:
        """Hand a request that has its place to the engine, behind what takes time and neither the engine nor the event loop should wait for.

        Raises:
            InvalidRequest: the form it asks for is none.
            Overloaded: too many forms of its client wait.
        """
        request = stream.request
        if request.grammar is not None and self._grammars is not None and not self._grammars.knows(request.grammar):
            async with self._turn(request):
                if stream.is_running:
                    await asyncio.get_running_loop().run_in_executor(self._compiler, self._grammars.prepare, request.grammar)
        if stream.is_running:  # the engine may have failed, or the host been closed, meanwhile
            self._send(Add(request))

    def leave(self, request: GenerationRequest, *, ended: bool) -> None:
        """A stream is over: by its end, or by its reader's will."""
        if self._live.pop(request.request_id, None) is None:
            return
        self._live_sequences -= len(request.indices)
        self._left_s = self._clock.monotonic()
        if not ended and self._died is None and not self._closed:
            self._send(Abort(request.request_id))

    # ------------------------------------------------------------------------------------------------------------- inside

    def _turn(self, request: GenerationRequest) -> AbstractAsyncContextManager[None]:
        """Return the turn to compile a grammar. A node's are compiled one after the other, and a thread is left by this node's clients."""
        if request.caller:
            return self._turns.setdefault(request.caller, asyncio.Semaphore(1))
        return self._clients.turn(request.client)

    def _check_ways(self, request: GenerationRequest) -> None:
        ways = self._ways()
        if request.ways is not None and not request.ways & ways:
            allowed, served = " or ".join(sorted(request.ways)), " or ".join(sorted(ways))
            raise WayNotAllowed(
                f"ways: {self._model.name} is served {served} now, and the request allows {allowed}", "Allow more.", field="ways"
            )

    def _held_by(self, caller: str) -> int:
        """Sequences of another node."""
        return sum(len(stream.request.indices) for stream in self._live.values() if stream.request.caller == caller)

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._live:
                raise RuntimeError("an EngineHost serves one event loop at a time")
            self._loop = loop

    def _is_busy(self) -> bool:
        return self._has_work or self._taken < self._sent

    def _send(self, command: Command) -> None:
        if not self._is_busy():
            self._progressed_s = self._clock.monotonic()
        self._sent += 1
        self._thread.send(command)

    def _another(self) -> StepEngine | None:
        """Called in the engine's thread: an engine in place of one that failed, if that did not happen too often."""
        now = self._clock.monotonic()
        if self._rebuild is None or self._closed or self._rebuilt.is_full(now):
            return None
        self._rebuilt.add(now)
        return self._rebuild()

    def _tell(self, news: News) -> None:
        """Called in the engine's thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            self._receive(news)  # no request streams: there is no loop to disturb
            return
        try:
            loop.call_soon_threadsafe(self._receive, news)
        except RuntimeError:
            self._receive(news)  # closed between the two lines: as above

    def _receive(self, news: News) -> None:
        match news:
            case Died(reason, is_long):
                self._died = reason
                self._fail_all(f"The engine failed: {reason}. {STAYS_DOWN if is_long else COMES_BACK}", ENGINE_GONE)
                self._changed()
            case Rebuilt():
                logger.warning("the engine was rebuilt")
                self._died, self._progressed_s = None, self._clock.monotonic()
                self._changed()
            case StepReport():
                self._read(news)

    def _changed(self) -> None:
        for changed in self._on_change:
            changed()

    def _read(self, news: StepReport) -> None:
        if news.stats.steps != self._stats.steps:
            self._progressed_s = self._clock.monotonic()
        self._heard_s = self._clock.monotonic()
        self._taken = news.taken
        self._has_work = news.has_work
        self._stats = news.stats
        self._follow_context()
        live = self._live
        woken: list[_Stream] = []
        for chunk in news.chunks:
            stream = live.get(chunk.request_id)
            if stream is None:
                continue
            if chunk.notices and not stream.request.allows(ALONE) and any(notice.kind == LOCAL_FALLBACK for notice in chunk.notices):
                self._give_up(stream)
            elif stream.push(chunk):
                woken.append(stream)
        for stream in woken:
            stream.wake()
        for request_id, error in news.refused:
            stream = live.get(request_id)
            if stream is not None:
                stream.refuse(error)

    def _give_up(self, stream: _Stream) -> None:
        """End a request that this machine is not to run alone, where the others of its pipeline are gone."""
        stream.fail("This machine goes on alone, and the request's ways don't allow that", "shard_unavailable")
        self._send(Abort(stream.request.request_id))

    def _follow_context(self) -> None:
        """Follow the KV memory, which changes where other machines lease it, and the numerics, which change where other machines take over."""
        context = self._stats.max_context
        if context is not None and context != self._model.max_context:
            self._model = replace(self._model, max_context=context)
        if self._stats.numerics_id is not None:
            self._model = self._model.of_numerics(self._stats.numerics_id)

    def _fail_all(self, reason: str, code: str) -> None:
        for request_id, stream in list(self._live.items()):
            stream.fail(reason, code)
            if code == ENGINE_GONE:  # it may not have reached the engine that failed
                self._send(Abort(request_id))


class _Stream:
    """What one request gained and its reader has not yet taken."""

    def __init__(self, host: EngineHost, model: str, request: GenerationRequest) -> None:
        self._host = host
        self._model = model
        self.request = request
        self._items: list[GenerationChunk] = []
        self._running = set(request.indices)
        self._error: PacelineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._admitted = False
        self._over = False

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        if not self._admitted and not self._over:
            self._host.admit(self, self._model, self.request)
            self._admitted = True
            try:
                await self._host.begin(self)
            except BaseException:
                self._finish(ended=True)
                raise
        while not self._items:
            if self._error is not None:
                self._finish(ended=True)
                error, self._error = self._error, None
                raise error
            if self._over or not self._running:
                self._finish(ended=True)
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._finish(ended=False)
                raise
        items, self._items = self._items, []
        return items

    async def aclose(self) -> None:
        """Abort what has not ended. Idempotent."""
        self._items.clear()
        self._finish(ended=not self._running)

    # ---------------------------------------------------------------------------------------------------------- for the host

    @property
    def is_running(self) -> bool:
        """Some of it has not ended."""
        return bool(self._running) and not self._over

    def push(self, chunk: GenerationChunk) -> bool:
        """Keep a chunk. True for the first since the reader last took some. What comes after the end is nothing to it."""
        if chunk.index not in self._running:
            return False
        if chunk.finish_reason is not None:
            self._running.discard(chunk.index)
        self._items.append(chunk)
        return len(self._items) == 1

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def refuse(self, error: PacelineError) -> None:
        """End with an error raised to the reader."""
        self._error = error
        self.wake()

    def fail(self, reason: str, code: str) -> None:
        """End what still runs with an error chunk."""
        for index in sorted(self._running):
            self.push(GenerationChunk(self.request.request_id, index, (), "", finish_reason=FinishReason.ERROR, error=reason, code=code))
        self.wake()

    def _finish(self, *, ended: bool) -> None:
        if not self._over:
            self._over = True
            if self._admitted:
                self._host.leave(self.request, ended=ended)
