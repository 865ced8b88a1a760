"""What this node asks of another that runs a model: an answer, as a stream of chunks, and the model's tokenizer, which is kept by its hash.

Law: a tokenizer is the one that the cards of its route name, or it is refused. What other nodes can make this one hold is bounded: one fetch at
a time a node, so many bytes each and on disk, and in memory those alone that are used. What is damaged, or breaks its reader, is removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from google.protobuf.message import Message

from paceline.core.errors import FleetError, NodeUnreachable, PacelineError
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import NodeId
from paceline.core.inference import ModelFacts, ServedModel, fingerprint_of
from paceline.core.model import ModelRef
from paceline.core.no_tokenizer import NoTokenizer
from paceline.core.text import Tokenizer
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.wire import generate_pb2 as wire
from paceline.net.wire.generate_pb2_grpc import GenerateServiceStub
from paceline.store.bounded_tokenizer import BoundedTokenizer, TokenizerProcess
from paceline.store.catalog import find_whole, open_model
from paceline.store.home import Home, write_cache
from paceline.store.tokenizer import MAX_PACKED_BYTES, tokenizer_digest, unpack_tokenizer
from paceline.ways.forward.codec import read_chunks, write_request
from paceline.ways.forward.routes import AnswerRoute, Meaning
from paceline.ways.forward.service import LoadedModel

M = TypeVar("M", bound=Message)


SILENCE_S = 4.0
"""Of a node that answers, until it is given up: four of its notices are missing then. Raising it: a machine that sleeps is noticed later."""
PARTS = 8
"""Of that time. Raising it: silence is measured more finely, at more timers."""


class AnswerSilence:
    """Waits for a peer to say nothing for `SILENCE_S` while it is listened to.

    Law: time in which this process stood still is not the peer's silence: it is counted in parts, and passes in one of them. Nor is time in which
    what it says is not read.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended = ended
        self._parts = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_too_long = False

    def begin(self) -> None:
        self._parts = 0
        self._listen()

    def end(self) -> None:
        """Listen no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _listen(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S / PARTS, self._heard_nothing)

    def _heard_nothing(self) -> None:
        self._parts += 1
        if self._parts < PARTS:
            self._listen()
        else:
            self.is_too_long = True
            self._ended()


class PeerCall(Generic[M]):
    """Messages that a peer streams. A silence of more than `SILENCE_S` ends them.

    Args:
        begin: begins the call; may raise `FleetError`.
        peer: its name, for messages.
    """

    def __init__(self, begin: Callable[[], grpc.aio.UnaryStreamCall[Any, M]], peer: str) -> None:
        self._begin, self._peer = begin, peer
        self._call: grpc.aio.UnaryStreamCall[Any, M] | None = None
        self._silence = AnswerSilence(self.hang_up)

    async def read(self) -> M | None:
        """Return the next message; None at the end. The first read begins the call.

        Raises:
            RequestError: the peer refuses the request.
            NodeUnreachable: it can't be reached, or no longer, or does not advance.
        """
        if self._call is None:
            with unless_closed(self._peer):
                self._call = self._begin()
        self._silence.begin()
        try:
            with unless_closed(self._peer):
                message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._why(error_of(error, self._peer)) from error
        except NodeUnreachable as error:
            raise self._why(error) from error
        finally:
            self._silence.end()
        return cast("M", message) if isinstance(message, Message) else None  # grpc's mark of a stream's end

    def hang_up(self) -> None:
        """End the call there too. Idempotent."""
        if self._call is not None:
            self._call.cancel()

    def _why(self, error: PacelineError) -> PacelineError:
        if self._silence.is_too_long:
            return NodeUnreachable(f"{self._peer} has said nothing for {SILENCE_S:g} s", "Look at `paceline status`.")
        return error


class RemoteStream:
    """A `ChunkStream` over a channel. Nothing is sent before the first item is asked for."""

    def __init__(self, dial: Callable[[], grpc.aio.Channel], peer: str, model: LoadedModel, request: GenerationRequest) -> None:
        """Prepare.

        Args:
            dial: gives a channel to the node that runs it; may raise `FleetError`.
            peer: its name, for messages.
        """
        self._request = request
        self._call = PeerCall(lambda: GenerateServiceStub(dial()).Generate(write_request(model.model, model.numerics_id, request)), peer)

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        """What was gained since the last item; empty where the node says that it works on. Raises as `PeerCall.read`."""
        message = await self._call.read()
        if message is None:
            raise StopAsyncIteration
        return read_chunks(message, self._request.request_id)

    async def aclose(self) -> None:
        """End it there too. Idempotent."""
        self._call.hang_up()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a node says of a model it has loaded."""

    model: LoadedModel
    tokenizer_sha256: str
    tokenizer: bytes | None
    """Packed. None where the caller has it."""


async def describe_model(
    channel: grpc.aio.Channel, peer: str, name: str, *, known: frozenset[str], most_bytes: int, timeout_s: float
) -> ModelDescription:
    """Ask a node for a model it has loaded.

    Args:
        known: SHA-256 of tokenizers held here: theirs are not fetched.
        most_bytes: a longer tokenizer is refused.

    Raises:
        UnknownModel: it is not loaded there.
        NodeUnreachable: the node can't be reached.
        FleetError: what it sent is not what it announced.
    """
    with unless_closed(peer):
        call = GenerateServiceStub(channel).DescribeModel(wire.DescribeModelRequest(model_id=name), timeout=timeout_s)
    first: wire.DescribeModelResponse | None = None
    packed = bytearray()
    try:
        with unless_closed(peer):
            async for message in call:
                if first is None:
                    first = message
                    if first.tokenizer_sha256 in known:
                        break
                    continue
                packed += message.tokenizer_part
                if len(packed) > most_bytes:
                    raise FleetError(f"The tokenizer of {name} at {peer} is longer than {most_bytes} bytes")
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer) from error
    finally:
        call.cancel()
    if first is None:
        raise FleetError(f"{peer} says nothing of {name}")
    have = first.tokenizer_sha256 in {"", *known}
    if not have and hashlib.sha256(packed).hexdigest() != first.tokenizer_sha256:
        raise FleetError(f"The tokenizer of {name} came from {peer} damaged")
    model = LoadedModel(ModelRef(first.digest, first.quantization, name), first.numerics_id, first.created_unix, first.max_context)
    return ModelDescription(model, first.tokenizer_sha256, None if have else bytes(packed))


logger = logging.getLogger(__name__)

FETCH_S = 30.0
"""For one tokenizer, which may be megabytes. Raising it: a node that answers slowly holds up its models' appearance for longer."""
MOST_DISK_BYTES = 256 << 20
"""Of all that are kept for later; those used longest ago go first."""

IDLE_S = 900
"""Without a text for a model of another node, until the process of its tokenizer ends. Raising it: models that are asked for now and then hold some
50 MB each for longer."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model of another node, ready to be shown and tokenized for."""

    loaded: LoadedModel
    tokenizer: Tokenizer

    def served(self, route: AnswerRoute) -> ServedModel:
        """Return the model as the server shows it, with what its route says."""
        loaded, model, engine = self.loaded, self.loaded.model, route.engine
        facts = ModelFacts(model.digest if model.has_digest else "", route.size_bytes)
        if engine is not None:
            facts = replace(facts, stored_as=engine.quantisation, engine=engine.engine, leaves_network=engine.leaves_network, via=route.via)
        fingerprint = fingerprint_of(model, route.numerics_id)
        # Engines say their contexts on cards; that of own kernels changes where machines lease memory, so they are asked for it.
        are_known = all(stop.context for stop in route.stops)
        largest = route.context() if are_known else max(loaded.max_context, route.context())
        return ServedModel(
            *(model.name, loaded.created, largest, self.tokenizer, fingerprint), replace(facts, on_disk=route.on_disk), route.chats
        )


class TokenizerStore:
    """Under PACELINE_HOME/cache/tokenizers.

    Args:
        most_bytes: of all files there that came from other nodes.
    """

    def __init__(self, home: Home, most_bytes: int = MOST_DISK_BYTES) -> None:
        self._home, self._most_bytes = home, most_bytes
        self._built: WeakValueDictionary[str, BoundedTokenizer] = WeakValueDictionary()
        """By hash: as long as a model is shown with it."""
        self._asking: WeakValueDictionary[NodeId, asyncio.Lock] = WeakValueDictionary()

    async def describe(self, channel: grpc.aio.Channel, node_id: NodeId, name: str, meaning: Meaning) -> Described:
        """Ask a node what it has loaded under a name, and for its tokenizer if it is not here.

        Args:
            meaning: what its card says of the model.

        Raises:
            PacelineError: it can't be had, or is another than the card says.
        """
        asking = self._asking.setdefault(node_id, asyncio.Lock())
        async with asking:
            tokenizer: Tokenizer | None = self._built.get(meaning.tokenizer) or await asyncio.to_thread(self._here, meaning)
            known = frozenset() if tokenizer is None else frozenset({meaning.tokenizer})
            said = await describe_model(channel, node_id, name, known=known, most_bytes=MAX_PACKED_BYTES, timeout_s=FETCH_S)
            loaded, sha256 = said.model, said.tokenizer_sha256
            if (loaded.model, sha256) != (meaning.model, meaning.tokenizer or sha256):
                raise FleetError(f"{node_id} has another {name[:200]} loaded than its card says, or another tokenizer for it")
            if not sha256:
                tokenizer = NoTokenizer()
            elif tokenizer is None:
                tokenizer = self._built[sha256] = await asyncio.to_thread(self._take, sha256, said.tokenizer or b"", node_id)
            return Described(loaded, tokenizer)

    def _here(self, meaning: Meaning) -> BoundedTokenizer | None:
        """What this node has on disk: the model's own files come before what any other node says of it."""
        try:
            whole = find_whole(meaning.model.digest, self._home)
            own = None if whole is None else open_model(str(whole[0].path), self._home).tokenizer
        except PacelineError as error:
            logger.debug("this node's own files have no tokenizer: %s", error)
            own = None
        if own is not None:
            return BoundedTokenizer(own, IDLE_S)
        path = self._path(meaning.tokenizer)
        try:
            packed = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        try:
            if tokenizer_digest(packed) != meaning.tokenizer:
                raise FleetError(f"{path} is damaged")
            tokenizer = self._built[meaning.tokenizer] = BoundedTokenizer(unpack_tokenizer(packed, path), IDLE_S)
            return tokenizer
        except PacelineError as error:
            logger.warning("a tokenizer that was kept is removed, and fetched again: %s", error)
            path.unlink(missing_ok=True)
            return None

    def _take(self, sha256: str, packed: bytes, node_id: NodeId) -> BoundedTokenizer:
        """Read what came, and keep it once it is understood."""
        TokenizerProcess(packed).end()  # what is read here was read before within bounds
        tokenizer = BoundedTokenizer(unpack_tokenizer(packed, Path(f"the tokenizer of {node_id}")), IDLE_S)
        write_cache(self._path(sha256), packed)
        self._make_room()
        return tokenizer

    def _make_room(self) -> None:
        kept: list[tuple[float, int, Path]] = []
        for path in self._home.tokenizers.glob("*.packed"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process of this home removed it
            kept.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in kept) - self._most_bytes
        for _, size, path in sorted(kept):
            if over <= 0:
                break
            path.unlink(missing_ok=True)
            over -= size

    def _path(self, sha256: str) -> Path:
        return self._home.tokenizers / f"{sha256}.packed"
