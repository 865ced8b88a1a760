"""Client for the weights of one node. Every wait is bounded. The data arrives in the order of the request, or an error is raised.

The caller checks the bytes against the checksums in the description.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from paceline.core.errors import NodeUnreachable, SourceLost, WrongBytes
from paceline.core.manifest import PIECE, ByteRuns, ModelManifest, PieceRun
from paceline.core.text import printable
from paceline.net.rpc_faults import unless_closed
from paceline.net.weights_servicer import MAX_RANGES, RUNS, WeightsDescription
from paceline.net.wire import weights_pb2 as wire
from paceline.net.wire import weights_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")

_WHY: Final = {
    grpc.StatusCode.NOT_FOUND: "it does not have this model",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "it gives weights to as many others as it will",
    grpc.StatusCode.UNIMPLEMENTED: "it gives no weights",
    grpc.StatusCode.PERMISSION_DENIED: "it gives this machine none, which it does not trust enough",
    grpc.StatusCode.DATA_LOSS: "its file of the model changed",
}


@dataclass(frozen=True, slots=True)
class Piece:
    file: int
    piece: int
    data: bytes


MOST_ANEW: Final = 8
"""Times that a node's progress may fall back, because it describes other models first. Raising it: a faulty node can keep a caller waiting longer."""


class _Patience:
    """Bound on waiting for a node that shows signs of life without progress. Within `idle_s` seconds it must examine a piece's worth of files, or send
    a part of the description.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s: Final = idle_s
        self._examined = self._anew = 0
        self._until = time.monotonic() + idle_s

    def holds(self, part: wire.DescribeWeightsResponse) -> bool:
        now = time.monotonic()
        told = part.files or part.pieces or part.tensors.names or part.complete
        if part.examined_bytes < self._examined and self._anew < MOST_ANEW:
            self._anew += 1
            self._examined = part.examined_bytes
        if told or part.examined_bytes >= self._examined + PIECE:
            self._examined = max(self._examined, part.examined_bytes)
            self._until = now + self._idle_s
        return now < self._until


class WeightsClient:
    """Client of one node's weights.

    Args:
        idle_s: seconds to wait for the next message. Raising it: a node that went silent is given up later.
    """

    def __init__(self, channel: grpc.aio.Channel, who: str, *, idle_s: float = 20.0) -> None:
        self._stub: Final = weights_pb2_grpc.WeightsServiceStub(channel)
        self._who: Final = who
        self._idle_s: Final = idle_s

    async def describe(self, digest: str, examined: Callable[[int, int], None]) -> ModelManifest:
        """Fetch the manifest of the node's model with this digest.

        Args:
            examined: called with (bytes, of bytes) while the node reads its files to describe them.

        Raises:
            SourceLost: the node can't be reached, or does not have the model.
            WrongBytes: the description contradicts itself.
        """
        description, patience = WeightsDescription(digest), _Patience(self._idle_s)
        with self._unless_closed():
            call = self._stub.DescribeWeights(wire.DescribeWeightsRequest(digest=digest))
        try:
            while (part := await self._next(call)) is not None:
                if not patience.holds(part):
                    raise SourceLost(f"{self._who} has come no further with its description for {self._idle_s:g} s")
                if part.bytes_to_examine:
                    examined(part.examined_bytes, part.bytes_to_examine)
                description.add(part)
                if part.complete:
                    await self._end(call)
                    return description.manifest()
        finally:
            call.cancel()
        raise SourceLost(f"{self._who} stopped in the middle of its description")

    async def fetch(self, manifest: ModelManifest, runs: Sequence[PieceRun]) -> AsyncGenerator[Piece]:
        """Fetch pieces, in the order of `runs`. Close the generator (`contextlib.aclosing`) to stop early.

        Raises:
            SourceLost: the node went away, or no longer has the model.
            WrongBytes: the node sends other pieces than those asked for.
        """
        for first in range(0, len(runs), MAX_RANGES):
            some = runs[first : first + MAX_RANGES]
            ranges = [wire.PieceRange(file=run.file, first=run.first, count=len(run)) for run in some]
            with self._unless_closed():
                call = self._stub.FetchPieces(wire.FetchPiecesRequest(digest=manifest.digest, ranges=ranges))
            try:
                for run in some:
                    for piece in range(run.first, run.stop):
                        got = await self._next(call)
                        if got is None:
                            raise SourceLost(f"{self._who} stopped before it had sent everything")
                        if (got.file, got.piece) != (run.file, piece) or len(got.data) != manifest.files[run.file].piece_size(piece):
                            raise WrongBytes(f"{self._who} sends another piece than the one asked for")
                        yield Piece(run.file, piece, got.data)
                await self._end(call)
            finally:
                call.cancel()

    async def fetch_runs(self, digest: str, runs: ByteRuns, arrived: Callable[[int], object] = lambda _: None) -> bytes:
        """Fetch runs of bytes of a file that the node described. The description has no checksums for runs, so the bytes are unverified. Raises as
        `fetch` does.

        Args:
            arrived: called with the number of new bytes, whenever some arrive.
        """
        asked, got = list(runs.pieces()), list[bytes]()
        with self._unless_closed():
            call = self._stub.FetchPieces(wire.FetchPiecesRequest(digest=digest, runs=RUNS.write_all(asked)))
        try:
            for place, each in enumerate(asked):
                part = await self._next(call)
                if part is None:
                    raise SourceLost(f"{self._who} stopped before it had sent everything")
                if (part.file, part.piece) != (each.file, place) or len(part.data) != each.nbytes:
                    raise WrongBytes(f"{self._who} sends other bytes than those asked for")
                got.append(part.data)
                arrived(len(part.data))
            await self._end(call)
        finally:
            call.cancel()
        return b"".join(got)

    async def _end(self, call: grpc.aio.UnaryStreamCall[Request, Response]) -> None:
        """Wait until the call ends, so that the node has room for the next one."""
        if await self._next(call) is not None:
            raise WrongBytes(f"{self._who} sends more than was asked for")

    async def _next(self, call: grpc.aio.UnaryStreamCall[Request, Response]) -> Response | None:
        """Return the next message; None at the end."""
        try:
            # Not wait_for: Python 3.11's loses a cancellation that comes together with the message.
            async with asyncio.timeout(self._idle_s):
                with self._unless_closed():
                    got = await call.read()
        except TimeoutError as error:
            raise SourceLost(f"{self._who} has sent nothing for {self._idle_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            self._lost(error)
        # At the end read() returns a marker, which the stubs don't name.
        return cast("Response", got) if isinstance(got, Message) else None

    @contextmanager
    def _unless_closed(self) -> Generator[None]:
        try:
            with unless_closed(self._who):
                yield
        except NodeUnreachable as error:
            raise SourceLost(error.message) from error

    def _lost(self, error: grpc.aio.AioRpcError) -> NoReturn:
        why = _WHY.get(error.code(), f"{error.code().name}: {printable(error.details() or '')}")
        raise SourceLost(f"{self._who} can't give the weights: {why}") from error
