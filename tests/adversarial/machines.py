"""Machines of one fleet in this process, over real mTLS on loopback: some run a model of a few words, as honestly as a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import QUICK, Still, until_seen
from tests.unit.store.conftest import GgufModel

from paceline.core.clock import SystemClock
from paceline.core.errors import InvalidRequest
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId, Trust
from paceline.core.inference import ChunkStream, Progress, ServedModel
from paceline.core.model import ModelRef
from paceline.core.stats import EngineStats
from paceline.fleet.card import ModelOffer, ModelShape, Role
from paceline.fleet.eligibility import TrustPolicy
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.machine.weights import give_weights
from paceline.net.member.node import FleetNode
from paceline.net.server import Service
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.store.catalog import open_model
from paceline.store.home import Home
from paceline.store.tokenizer import ModelTokenizer, pack_tokenizer, tokenizer_digest
from paceline.ways.forward.client import TokenizerStore
from paceline.ways.forward.inference import FleetInference
from paceline.ways.forward.service import LoadedModel, LocalModels, generate_service

NAME, DIGEST, NUMERICS = "m", "d" * 64, "n" * 16
SHAPE = ModelShape(30, 576, 2_212_560, 30_081_384, 768, 8192)
TRUTH, LIE = (1, 2, 3), (9, 9, 9)
LONG = tuple(range(40))
"""Token ids of an answer."""


@cache
def tokenizer() -> ModelTokenizer:
    """A real one, of a tiny model."""
    with TemporaryDirectory() as folder:
        found = open_model(str(GgufModel().write(Path(folder) / "m.gguf")), Home(Path(folder))).tokenizer
    assert isinstance(found, ModelTokenizer)
    return found


@cache
def packed() -> bytes:
    return pack_tokenizer(tokenizer())


def with_template(template: str) -> bytes:
    """The same tokenizer with a chat template of somebody's own."""
    return json.dumps(json.loads(packed()) | {"template": template}, sort_keys=True, ensure_ascii=False).encode()


def offer(speed: float, packed_as: bytes | None = None, **changes: object) -> ModelOffer:
    """What a card says of the model."""
    sha256 = tokenizer_digest(packed() if packed_as is None else packed_as)
    said = ModelOffer(NAME, Role.VERIFIER, "int4", speed, 10 * speed, DIGEST, True, NUMERICS, True, 98_000_000, SHAPE, tokenizer=sha256)
    return replace(said, **changes)  # type: ignore[arg-type]


@dataclass
class Engine:
    """An `Inference` that always answers the same, and remembers what it was asked."""

    answer: Sequence[int] | Callable[[GenerationRequest], Sequence[int]] = TRUTH
    pack: Callable[[str], bytes] = lambda name: packed()
    """The tokenizer it gives, by model."""
    digest: str = DIGEST
    context: int = 4096
    tokenizer: str = field(default_factory=lambda: tokenizer_digest(packed()))
    refuse: Callable[[], Exception | None] = lambda: None
    ends: FinishReason = FinishReason.STOP
    live: set[RequestId] = field(default_factory=set)
    begins: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
    """Waited for before an answer's first token."""
    asked: list[GenerationRequest] = field(default_factory=list)
    described: int = 0
    describing: int = 0
    most_at_once: int = 0

    def models(self) -> Sequence[ServedModel]:
        return (ServedModel(NAME, 0, self.context, tokenizer(), "fp"),)

    async def generate(self, model: str, request: GenerationRequest) -> AsyncIterator[Sequence[GenerationChunk]]:
        del model
        refusal = self.refuse()
        if refusal is not None:
            raise refusal
        if request.request_id in self.live:
            raise InvalidRequest("The request id is in use")
        self.live.add(request.request_id)
        self.asked.append(request)
        answer = self.answer(request) if callable(self.answer) else self.answer
        try:
            await self.begins()
            for place, token in enumerate(answer):
                finish = self.ends if place == len(answer) - 1 else None
                yield [GenerationChunk(request.request_id, index, (token,), "x", finish_reason=finish) for index in range(request.n)]
        finally:
            self.live.remove(request.request_id)

    def stats(self) -> EngineStats:
        return EngineStats()

    def progress(self) -> Progress:
        return Progress(busy=False, seconds_since_step=0.0)


class Models(LocalModels):
    """What a machine runs, with a tokenizer of its own choice."""

    def __init__(self, engine: Engine | None, node: FleetNode) -> None:
        super().__init__(engine, () if engine is None else (self._named(NAME, engine),), node.meter)  # type: ignore[arg-type]
        self._engine = engine

    def find(self, name: str) -> LoadedModel | None:
        return None if self._engine is None else self._named(name, self._engine)

    def _named(self, name: str, engine: Engine) -> LoadedModel:
        return LoadedModel(ModelRef(engine.digest, "int4", name), NUMERICS, 0, engine.context, engine.tokenizer, holds_identity=True)

    async def packed_tokenizer(self, name: str) -> tuple[str, bytes]:
        assert self._engine is not None
        engine, data = self._engine, self._engine.pack(name)
        engine.described += 1
        engine.describing += 1
        engine.most_at_once = max(engine.most_at_once, engine.describing)
        await asyncio.sleep(0)
        engine.describing -= 1
        return tokenizer_digest(data), data


@dataclass
class Machine:
    """One of a fleet, with its API."""

    node: FleetNode
    inference: FleetInference
    engine: Engine | None
    portrait: Still
    home: Home

    async def answer(self, *prompt: int) -> list[int]:
        """What a client here gets."""
        stream: ChunkStream = self.inference.generate(NAME, GenerationRequest(RequestId("r"), prompt or (4, 7, 1, 1), 8))
        return [token async for chunks in stream for chunk in chunks for token in chunk.token_ids]

    @property
    def first(self) -> str:
        """Where a request would go."""
        route = self.inference._routes.get(NAME)
        return "" if route is None else route.stops[0].node_id

    def saw(self, *prompt: int) -> bool:
        """Whether a request for it ran here."""
        return self.engine is not None and any(asked.prompt_ids == prompt for asked in self.engine.asked)


@dataclass(frozen=True)
class Made:
    """How a machine is to be."""

    name: str
    engine: Engine | None = None
    offers: tuple[ModelOffer, ...] = ()
    trust: Trust = Trust.MEMBER
    policy: TrustPolicy = field(default_factory=TrustPolicy)
    home: Home | None = None
    tokenizer_bytes: int = 1 << 28
    draw: Callable[[], float] = lambda: 0.999
    """Which answers it computes again: none, unless a test says so."""


@asynccontextmanager
async def machines(root: Path, *made: Made, fleet: TestFleet | None = None) -> AsyncIterator[list[Machine]]:
    """A fleet of these, all of which see one another."""
    fleet, running, clock = fleet or TestFleet(), list[Machine](), SystemClock()
    async with AsyncExitStack() as stack:
        for one in made:
            home = one.home or Home(root / one.name)
            folder = FleetFolder(home.fleet)
            folder.write_secret(folder.identity_file, fleet.member(one.name, trust=one.trust).to_pem())
            peers = running[0].node.addresses if running else ()
            settings = FleetSettings(0, "127.0.0.1", peers=peers, mdns=False, preset=parse_preset(QUICK), trust=one.policy)
            portrait = Still(*one.offers)
            node = FleetNode(settings, folder, portrait, clock)
            models = Models(one.engine, node)
            inference = FleetInference(node, models, TokenizerStore(home, one.tokenizer_bytes), clock, one.draw)

            def give(guard: PeerGuard, home: Home = home, policy: TrustPolicy = one.policy) -> Service:
                return give_weights(home, guard, policy)

            await node.start(lambda _, models=models: generate_service(models), give)
            stack.push_async_callback(node.stop)
            stack.push_async_callback(inference.close)
            running.append(Machine(node, inference, one.engine, portrait, home))
        await asyncio.gather(*(until_seen(machine.node, *(one.name for one in made)) for machine in running))
        yield running
