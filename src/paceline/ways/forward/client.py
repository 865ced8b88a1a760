"""A generation on another node, as a stream of chunks; and that node's tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from paceline.core.errors import FleetError, NodeUnreachable, PacelineError
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.wire import generate_pb2 as wire
from paceline.net.wire.generate_pb2_grpc import GenerateServiceStub
from paceline.ways.forward.codec import read_chunks, write_request
from paceline.ways.forward.service import LoadedModel

Call = grpc.aio.UnaryStreamCall[wire.GenerateRequest, wire.GenerateResponse]


SILENCE_S = 4.0
"""Of a node that answers, until it is given up: four of its notices are missing then. Raising it: a machine that sleeps is noticed later."""
PARTS = 8
"""Of that time. Raising it: silence is measured more finely, at more timers."""


class AnswerSilence:
    """Waits for a peer to say nothing for `SILENCE_S` while it is listened to.

    Law: time in which this process stood still is not the peer's silence: it is counted in parts, and passes in one of them. Nor is time in which
    what it says is not read.

    Args:
        ended: called once then.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended = ended
        self._parts = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_too_long = False

    def begin(self) -> None:
        """Listen from now on."""
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


class RemoteStream:
    """A `ChunkStream` over a channel. Nothing is sent before the first item is asked for."""

    def __init__(self, dial: Callable[[], grpc.aio.Channel], peer: str, model: LoadedModel, request: GenerationRequest) -> None:
        """Prepare.

        Args:
            dial: gives a channel to the node that runs it; may raise `FleetError`.
            peer: its name, for messages.
        """
        self._dial, self._peer, self._model, self._request = dial, peer, model, request
        self._call: Call | None = None
        self._silence = AnswerSilence(self._hang_up)

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        """What was gained since the last item; empty where the node says that it works on.

        Raises:
            RequestError: that node refuses the request.
            NodeUnreachable: it can't be reached, or no longer, or does not advance.
        """
        if self._call is None:
            model = self._model
            message = write_request(model.name, model.digest, model.weights, model.numerics_id, self._request)
            with unless_closed(self._peer):
                self._call = GenerateServiceStub(self._dial()).Generate(message)
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
        if not isinstance(message, wire.GenerateResponse):  # grpc's mark of a stream's end
            raise StopAsyncIteration
        return read_chunks(message, self._request.request_id)

    async def aclose(self) -> None:
        """End it there too. Idempotent."""
        self._hang_up()

    def _hang_up(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _why(self, error: PacelineError) -> PacelineError:
        if self._silence.is_too_long:
            return NodeUnreachable(f"{self._peer} has said nothing for {SILENCE_S:g} s", "Look at `paceline status`.")
        return error


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
        peer: its name, for messages.
        known: SHA-256 of tokenizers held here: theirs are not fetched.
        most_bytes: a longer tokenizer is refused.
        timeout_s: for all of it.

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
    have = first.tokenizer_sha256 in known
    if not have and hashlib.sha256(packed).hexdigest() != first.tokenizer_sha256:
        raise FleetError(f"The tokenizer of {name} came from {peer} damaged")
    model = LoadedModel(name, first.digest, first.quantization, first.numerics_id, first.created_unix, first.max_context)
    return ModelDescription(model, first.tokenizer_sha256, None if have else bytes(packed))
