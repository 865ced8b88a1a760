"""GenerateService: runs what this node has loaded, for another node that was asked. It never forwards, so a request can't go in circles.

The caller's end is the generation's end: grpc cancels the handler, which closes the stream, which frees its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Self
from uuid import uuid4

from google.protobuf.message import Message

from paceline.core.background import end_tasks
from paceline.core.errors import ContextOverflow, UnknownModel, WayNotAllowed
from paceline.core.generation import GenerationRequest
from paceline.core.ids import RequestId, Trust
from paceline.core.inference import ChunkStream, Inference, ModelFacts, ServedModel
from paceline.core.model import ModelRef
from paceline.core.text import printable
from paceline.engine.grammar import VERSION
from paceline.fleet.eligibility import Use
from paceline.net.member.meter import FleetMeter
from paceline.net.server import KIB, Service
from paceline.net.trust.handlers import Context, Limit, caller_of
from paceline.net.wire import generate_pb2 as wire
from paceline.net.wire.generate_pb2_grpc import GenerateServiceServicer, add_GenerateServiceServicer_to_server
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.tokenizer import pack_tokenizer, tokenizer_digest
from paceline.ways.forward.codec import numerics_asked, read_request, write_chunks

NOTICE_S = 1.0
"""From one sign to the next that an answer is worked on. Raising it: who waits for it gives up a machine that sleeps later."""
MAX_REQUEST_BYTES = 2944 * KIB
"""Size of one request. A chat may have a photo of 2 MiB. Raising it: callers can fill more memory with requests."""
PART_BYTES = 1 << 20
"""Of a tokenizer, in one message."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What exactly a node has loaded under a name."""

    model: ModelRef
    numerics_id: str
    created: int
    """Unix seconds."""
    max_context: int
    tokenizer: str = ""
    """SHA-256 of its packed tokenizer and template."""
    holds_identity: bool = False
    """A row's bytes don't depend on what runs beside it."""
    has_tokenizer: bool = True
    """False: its engine keeps its own to itself, and takes whole chats only."""


Allows = Callable[[Context, Use], bool]
"""Function that returns True if a call's node may have a use of this one."""


def check_outside(name: str, facts: ModelFacts, context: Context, allows: Allows) -> None:
    """Check that a call's node may reach a model, if it runs outside of the home network.

    Raises:
        WayNotAllowed: it may not.
    """
    if facts.leaves_network and not allows(context, Use.REACH_OUTSIDE):
        raise WayNotAllowed(
            f"{name} runs outside of this home network, and this machine does not let yours reach it",
            "On the machine that shares it: [trust] min_outside_trust.",
        )


class GenerateServicer(GenerateServiceServicer):
    def __init__(self, models: LocalModels, allows: Allows = lambda *_: False) -> None:
        self._models, self._allows = models, allows

    # Written to the context rather than yielded: a generator that is not asked for more would be closed only when it is collected.
    async def Generate(self, request: wire.GenerateRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._check(request)
        if (served := self._models.served(request.model_id)) is not None:
            check_outside(served.name, served.facts, context, self._allows)
        # Ids are the caller's; two callers may have chosen one.
        wanted = read_request(request, RequestId(f"{request.request_id[:64]}@{uuid4().hex}"), caller_of(context))
        wanted = replace(wanted, shares_kv=self._allows(context, Use.SHARE_KV))
        async with (
            aclosing(self._models.generate(request.model_id, wanted)) as stream,
            Notices(context, wire.GenerateResponse(), self._models.advances) as notices,
        ):
            async for chunks in stream:
                await notices.write(write_chunks(chunks))

    async def DescribeModel(self, request: wire.DescribeModelRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loaded = self._models.find(request.model_id)
        if loaded is None:
            raise _not_here(request.model_id)
        digest, packed = await self._models.packed_tokenizer(loaded.model.name) if loaded.has_tokenizer else ("", b"")
        description = wire.DescribeModelResponse(
            digest=loaded.model.digest,
            quantization=loaded.model.weights,
            numerics_id=loaded.numerics_id,
            created_unix=loaded.created,
            max_context=loaded.max_context,
            tokenizer_sha256=digest,
        )
        await context.write(description)
        for at in range(0, len(packed), PART_BYTES):
            await context.write(wire.DescribeModelResponse(tokenizer_part=packed[at : at + PART_BYTES]))

    def _check(self, request: wire.GenerateRequest) -> None:
        """A caller whose view is out of date must not get other bytes than it promised."""
        loaded = self._models.find(request.model_id)
        if loaded is None:
            raise _not_here(request.model_id)
        formed = request.HasField("grammar")
        if formed and request.grammar.version != VERSION:
            raise UnknownModel(f"Grammars are followed by {VERSION} here, and {printable(request.grammar.version, 100)} is asked for")
        numerics = numerics_asked(loaded.numerics_id, VERSION if formed else None)
        if (loaded.model, numerics) != (ModelRef(request.digest, request.quantization), request.numerics_id):
            raise UnknownModel(f"Another {request.model_id[:200]} is loaded here than the one asked for")
        longest = max((len(one.token_ids) for one in request.so_far), default=0)
        if len(request.prompt_ids) + longest > loaded.max_context:  # before as many numbers are made of them
            raise ContextOverflow(
                f"Prompt and answer have {len(request.prompt_ids) + longest} tokens and the model's context {loaded.max_context}",
                field="prompt",
            )


class Notices:
    """Says every `NOTICE_S`, while an answer is silent, that the node works on it.

    Args:
        notice: the message that says so.
        advances: returns whether it does.
    """

    def __init__(self, context: Context, notice: Message, advances: Callable[[], bool]) -> None:
        self._context, self._notice, self._advances = context, notice, advances
        self._writing = asyncio.Lock()
        self._written = False
        """Since the last notice was due."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tell(), name="notices of a generation")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    async def write(self, message: Message) -> None:
        self._written = True
        async with self._writing:
            await self._context.write(message)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(NOTICE_S)
            if not self._written and self._advances():
                async with self._writing:
                    await self._context.write(self._notice)
            self._written = False


def _not_here(name: str) -> UnknownModel:
    return UnknownModel(f"The model {name[:200]!r} is not loaded here")


def generate_service(models: LocalModels, allows: Allows = lambda *_: False) -> Service:
    """Return the service that a node's server registers.

    Args:
        allows: if a node may share KV, what is computed for it is not kept apart.
    """
    limits = {
        # Half a million tokens and more, or a chat with images. An answer that goes on here is the longest of what else there is.
        "GenerateService/Generate": Limit(
            MAX_REQUEST_BYTES, 512, 512 * KIB, bulk=wire.GenerateRequest.PROMPT_IDS_FIELD_NUMBER, least=Trust.GUEST
        ),
        "GenerateService/DescribeModel": Limit(4 * KIB, 8, least=Trust.GUEST),
    }
    return Service(partial(add_GenerateServiceServicer_to_server, GenerateServicer(models, allows)), limits)


STALL_S = 6.0
"""Without a part of a step, or a look for machines, until what is run for others counts as stalled. Raising it: an engine that hangs is left later."""
STALLED_TIMES = 5.0
"""By what factor a step may take longer than steps like it took."""


class LocalModels:
    """What this node runs itself: models of its own engine.

    Args:
        inference: the engine; None for a node that serves no model.
    """

    def __init__(self, inference: Inference | None, loaded: tuple[LoadedModel, ...], meter: FleetMeter) -> None:
        self.inference = inference
        self._loaded = {one.model.name: one for one in loaded}
        self._meter = meter
        self._up = frozenset(self._loaded)
        """Those whose engine takes requests: they are offered."""
        self._packed: dict[str, asyncio.Task[tuple[str, bytes]]] = {}

    def show(self, inference: Inference | None, loaded: Sequence[LoadedModel], up: Collection[str]) -> None:
        """What is loaded changed.

        Args:
            up: those whose engine takes requests.
        """
        self.inference, self._loaded, self._up = inference, {one.model.name: one for one in loaded}, frozenset(up)
        self._packed = {name: task for name, task in self._packed.items() if name in self._loaded}

    @property
    def all(self) -> tuple[LoadedModel, ...]:
        """What is offered now."""
        return tuple(one for name, one in self._loaded.items() if name in self._up)

    def find(self, name: str) -> LoadedModel | None:
        loaded, served = self._loaded.get(name), self.served(name)
        if loaded is None or served is None:
            return loaded
        now = loaded.numerics_id if served.numerics_id is None else served.numerics_id
        return replace(loaded, max_context=served.max_context, numerics_id=now)

    def served(self, name: str) -> ServedModel | None:
        models = () if self.inference is None else self.inference.models()
        return next((model for model in models if model.name == name), None)

    async def packed_tokenizer(self, name: str) -> tuple[str, bytes]:
        """SHA-256 (hex) and bytes of a model's tokenizer. Packed once, in a thread.

        Raises:
            UnknownModel: there is none to give.
        """
        task = self._packed.get(name)
        if task is None:
            task = self._packed[name] = asyncio.create_task(asyncio.to_thread(self._pack, name))
        return await asyncio.shield(task)

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """Run a request of another node.

        Raises:
            UnknownModel: nothing is loaded under that name.
        """
        if self.inference is None:
            raise UnknownModel(f"The model {model[:200]!r} is not loaded here")
        self._meter.served += 1
        return self.inference.generate(model, request)

    def advances(self) -> bool:
        """Whether the engine gets on with what it has to do."""
        if self.inference is None:
            return False
        progress = self.inference.progress()
        return progress.error is None and progress.seconds_since_sign <= max(STALL_S, STALLED_TIMES * progress.step_expected_s)

    def _pack(self, name: str) -> tuple[str, bytes]:
        model = self.served(name)
        if model is None or not isinstance(model.tokenizer, BoundedTokenizer):
            raise UnknownModel(f"The model {name[:200]!r} has no tokenizer that could be sent")
        packed = pack_tokenizer(model.tokenizer.model)
        return tokenizer_digest(packed), packed
