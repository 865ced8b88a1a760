"""An engine whose every step is the test's to allow: it answers with the numbers 0, 1, 2, ... and remembers what it was told."""

from __future__ import annotations

import threading
from collections.abc import Collection

from paceline.core.errors import InvalidRequest
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, Notice
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats


class Gate:
    """Lets steps through: all while open, else as many as were let."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._let = 0

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._open = False

    def let(self, steps: int) -> None:
        with self._changed:
            self._let += steps
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._let)
            self._let = max(0, self._let - 1)


class EchoEngine:
    """Steps only when `gate` lets it. One token a live sequence and step."""

    def __init__(self, *, refuse: str | None = None, crash_at: int | None = None, crash: type[BaseException] = RuntimeError) -> None:
        self.gate = Gate()
        self.rested = threading.Event()
        self.aborted: list[RequestId] = []
        self.closed = threading.Event()
        self.max_context = 100
        self.parts = 0
        """Of steps, done."""
        self.idles = 0
        """How often it is to find nothing that it could do."""
        self.idled = threading.Event()
        self.notices: tuple[Notice, ...] = ()
        """For each live request, with its next token."""
        self._refuse = refuse
        self._crash_at, self._crash = crash_at, crash
        self._steps = 0
        self._live: dict[RequestId, tuple[GenerationRequest, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: GenerationRequest) -> None:
        self.rested.clear()
        if self._refuse is not None:
            raise InvalidRequest(self._refuse)
        self._live[request.request_id] = (request, 0)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self._live.pop(request_id, None)

    def recall(self, gone: Collection[RequestId], shortest: int | None, *, stops: bool) -> None:
        pass

    @property
    def advanced(self) -> int:
        return self._steps + self.parts

    def submit(self) -> None:
        pass

    def collect(self) -> list[GenerationChunk]:
        self.gate.pass_through()
        if self.idles:
            self.idles -= 1
            if not self.idles:
                self.idled.set()
            return []
        self._steps += 1
        if self._steps == self._crash_at:
            raise self._crash("the kernels burn")
        chunks = [GenerationChunk(name, 0, (), "", notices=self.notices) for name in self._live if self.notices]
        self.notices = ()
        for request, done in list(self._live.values()):
            finish = FinishReason.LENGTH if done + 1 == request.max_tokens else None
            chunks += [GenerationChunk(request.request_id, index, (done,), f"{done} ", finish_reason=finish) for index in range(request.n)]
            self._live[request.request_id] = (request, done + 1)
            if finish is not None:
                del self._live[request.request_id]
        return chunks

    def stats(self) -> EngineStats:
        return EngineStats(max_context=self.max_context, running=len(self._live), blocks_total=4, steps=self._steps)

    def check_invariants(self) -> None:
        assert not self._live
        self.rested.set()

    def close(self) -> None:
        self.closed.set()
