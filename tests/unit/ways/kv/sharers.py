"""Nodes that share KV: real gRPC servers and tensor streams over mTLS on loopback, with engines over the null backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes.engines import Answer, EngineBench
from tests.fakes.fleets import TestFleet
from tests.fakes.null_backend import NullRunner
from tests.unit.net.member.nodes import make_node, until

from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationChunk, GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId, Trust
from paceline.engine.kv_source import KvLoans
from paceline.fleet.card import ModelOffer, Role
from paceline.net.member.node import FleetNode
from paceline.ways.kv.service import KvSharing
from paceline.ways.kv.source import PeerKv

DIGEST = "d" * 64
SLOW = 1.0
"""Tokens of prompts a second, as cards say: slow enough that fetching pays from a block or two on."""


class ToldLoans(KvLoans):
    """Tells each prefix at once, as if another conversation had begun with it too."""

    def used(self, keys: Sequence[bytes], n_prompt: int, caller: str = "") -> None:
        super().used(keys, n_prompt, caller)
        for chain in self._chains.values():
            chain.n_shared = len(chain.keys)
        self._tell()


class Sharer:
    """A node with an engine."""

    def __init__(
        self,
        fleet: TestFleet,
        root: Path,
        name: str,
        *peers: FleetNode,
        trust: Trust = Trust.MEMBER,
        speed: float = SLOW,
        nixl: bool = False,
        check_every: int = 512,
    ) -> None:
        offer = ModelOffer("null", Role.VERIFIER, "bf16", 1.0, speed, DIGEST, warm=True, numerics_id="null")
        self.node = make_node(fleet, root, name, *peers, offers=(offer,), trust=trust)
        self.loans = ToldLoans()
        self._came, self._turn = threading.Event(), threading.Lock()
        self.kv: PeerKv
        sizes = {"n_blocks": 64, "max_context": 200, "kv_check_every": check_every}
        self.bench = EngineBench(kv=self._made, wait=self._wait, loans=self.loans, model_digest=DIGEST, **sizes)  # type: ignore[arg-type]
        self.kv.nixl = nixl
        self.loans.wake = self._woken
        self.sharing = KvSharing(self.node, SystemClock())
        self.threads = ThreadPoolExecutor(16)
        """Each runs a request of another node: those of the loop are others' too."""
        self.pace: Callable[[], object] = lambda: None
        """Called before each step of a prompt that is computed for another."""

    async def start(self) -> None:
        await self.node.start(self.sharing.service)
        self.sharing.attach(self.kv, lambda request: Computing(self, request))

    async def stop(self) -> None:
        self.kv.close()
        await self.sharing.stop()
        await self.node.stop()
        self.threads.shutdown(wait=False)

    async def answer(self, name: str, prompt: list[int], **fields: str) -> Answer:
        """Run a request to its end, while the event loop goes on."""
        request = GenerationRequest(RequestId(name), tuple(prompt), 6, SamplingParams(seed=1), ignore_eos=True, **fields)  # type: ignore[arg-type]

        def run() -> Answer:
            with self._turn:
                answer = self.bench.run(request)[request.request_id, 0]
            self._woken()
            return answer

        return await asyncio.to_thread(run)

    async def knows(self, other: Sharer) -> None:
        """Wait until this node knows, and has priced, what the other used last."""
        await self.was_told(other)
        sharing, name = self.sharing, other.node.node_id
        # What was told is priced a moment later.
        await until(lambda: not sharing._stale and name in sharing.meter.least_tokens)  # pyright: ignore[reportPrivateUsage]

    async def was_told(self, other: Sharer) -> None:
        """Wait until this node was told what the other used last."""
        version, told = other.loans.prefixes.version, self.sharing._told  # pyright: ignore[reportPrivateUsage]
        await until(lambda: any(key[0] == other.node.node_id and one.version >= version for key, one in told.items()))

    async def computes_for(self, other: Sharer) -> None:
        """Wait until the other would have its prompts computed here."""
        await until(lambda: self.node_id in other.sharing.meter.least_pushed)

    def compute(self, request: GenerationRequest, stopped: threading.Event) -> None:
        """Run a request of another node to its end, or until it is stopped."""
        with self._turn:
            self.bench.add(request)
        self.pace()
        while True:
            with self._turn:
                if stopped.is_set():
                    self.bench.engine.abort(request.request_id)
                self.bench.step()
                answers = [self.bench.answers.get((request.request_id, index)) for index in request.indices]
                if all(answer is not None and answer.finish is not None for answer in answers):
                    break
            self.pace()
        self._woken()

    @property
    def node_id(self) -> NodeId:
        return self.node.node_id

    def _made(self, runner: NullRunner) -> PeerKv:
        self.kv = PeerKv(runner, DIGEST, None, self.loans, self._came.set)
        return self.kv

    def _wait(self, seconds: float) -> None:
        del seconds
        assert self._came.wait(60)
        self._came.clear()

    def _woken(self) -> None:
        """As an engine's thread is, where it rests; else whoever has the turn looks again when it leaves it, or has a step under way."""
        self._came.set()
        under_way = 0
        while not under_way and self.loans.is_waiting and self._turn.acquire(blocking=False):
            try:
                self.bench.engine.submit()
                self.bench.engine.check_invariants()
                under_way = self.bench.engine.stats().steps_in_flight
            finally:
                self._turn.release()


class Computing:
    """A request of another node, as a host streams it."""

    def __init__(self, at: Sharer, request: GenerationRequest) -> None:
        self._at, self._request, self._stopped = at, request, threading.Event()
        self._running: asyncio.Future[None] | None = None

    def __aiter__(self) -> Computing:
        return self

    async def __anext__(self) -> list[GenerationChunk]:
        if self._running is not None:
            raise StopAsyncIteration
        self._running = asyncio.get_running_loop().run_in_executor(self._at.threads, self._at.compute, self._request, self._stopped)
        await asyncio.shield(self._running)
        found = {index: self._at.bench.answers[self._request.request_id, index] for index in self._request.indices}
        return [
            GenerationChunk(
                self._request.request_id, index, tuple(one.token_ids), one.text, (), one.finish, cached_tokens=one.cached_tokens
            )
            for index, one in found.items()
        ]

    async def aclose(self) -> None:
        self._stopped.set()


@asynccontextmanager
async def sharers(root: Path, *made: Callable[[TestFleet, Path, tuple[FleetNode, ...]], Sharer]) -> AsyncGenerator[list[Sharer]]:
    """Nodes of one fleet, each of which knows those before."""
    fleet, found = TestFleet(), list[Sharer]()
    try:
        for make in made:
            found.append(make(fleet, root, tuple(one.node for one in found)))
            await found[-1].start()
        for one in found:
            await until(lambda one=one: len(one.node.view().ids) == len(found))
        yield found
    finally:
        await asyncio.gather(*(one.stop() for one in found))


def sharer(
    name: str, trust: Trust = Trust.MEMBER, speed: float = SLOW, *, nixl: bool = False
) -> Callable[[TestFleet, Path, tuple[FleetNode, ...]], Sharer]:
    return lambda fleet, root, peers: Sharer(fleet, root, name, *peers, trust=trust, speed=speed, nixl=nixl)
