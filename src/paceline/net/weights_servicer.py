"""Serving weights to other nodes: descriptions and pieces of the models in this machine's catalog, and nothing else.

Disks are read in threads. A stream holds at most two pieces in memory: one being sent, one read ahead. The number of streams is bounded, and one
node gets at most half of them; further calls are refused, so that a node tries elsewhere. A caller that asks and does not read is dropped.

`WeightsDescription` checks the numbers of a description from another node before it builds anything from them: sizes, counts and offsets that don't
fit raise `WrongBytes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NoReturn, Protocol, cast

import grpc
import grpc.aio

from paceline.core.errors import ModelFileError, ModelNotFound, WrongBytes
from paceline.core.ids import is_sha256
from paceline.core.manifest import MOST_RUNS, PIECE, SHA256_BYTES, ByteRuns, FileEntry, ModelManifest, TensorAt
from paceline.core.text import printable
from paceline.fleet.eligibility import Use
from paceline.net.mapper import Codec, Columns, Mapped, refuse_with
from paceline.net.server import KIB, Service
from paceline.net.trust.handlers import Context, Limit, caller_of
from paceline.net.wire import weights_pb2 as wire
from paceline.net.wire import weights_pb2_grpc

MAX_FILES: Final = 4096
MAX_TENSORS: Final = 1 << 20
MAX_PIECES: Final = 1 << 22
"""Pieces of a model (4 TiB of weights). Raising these bounds: a faulty node can take more memory of its receiver, about 100 bytes a tensor and 32 a
piece."""
_MAX_NAME: Final = 512
_TENSORS_A_PART: Final = 4096
_PIECES_A_PART: Final = 16384

_REFUSE: Final = refuse_with(WrongBytes)
_FILE: Final = Codec(
    FileEntry, wire.WeightsFile, _REFUSE, {"size": "size_bytes", "sha256": Mapped(write=bytes.fromhex, read=bytes.hex)}, given=["pieces"]
)
RUNS: Final = Codec(ByteRuns, wire.ByteRuns, _REFUSE)
_TENSORS: Final = Columns(
    TensorAt, wire.TensorIndex, _REFUSE, name=Mapped("names"), file=Mapped("files"), offset=Mapped("offsets"), nbytes=Mapped("sizes")
)


def parts(manifest: ModelManifest) -> Iterator[wire.DescribeWeightsResponse]:
    """Yield a description in messages of at most about 0.5 MiB."""
    for first in range(0, len(manifest.files), _TENSORS_A_PART):
        yield wire.DescribeWeightsResponse(files=_FILE.write_all(manifest.files[first : first + _TENSORS_A_PART]))
    for number, file in enumerate(manifest.files):
        for first in range(0, file.n_pieces, _PIECES_A_PART):
            sums = file.pieces[first * SHA256_BYTES : (first + _PIECES_A_PART) * SHA256_BYTES]
            yield wire.DescribeWeightsResponse(pieces=[wire.PieceDigests(file=number, sha256=sums)])
    for first in range(0, len(manifest.tensors), _TENSORS_A_PART):
        yield wire.DescribeWeightsResponse(tensors=_TENSORS.write(manifest.tensors[first : first + _TENSORS_A_PART]))
    yield wire.DescribeWeightsResponse(complete=True)


class WeightsDescription:
    def __init__(self, digest: str) -> None:
        self._digest: Final = digest
        self._files: Final[list[wire.WeightsFile]] = []
        self._pieces: Final[dict[int, bytearray]] = {}
        self._n_pieces = 0
        self._tensors: Final[list[TensorAt]] = []

    def add(self, part: wire.DescribeWeightsResponse) -> None:
        """Append a part.

        Raises:
            WrongBytes: the description has more parts than any model, a name is too long, or columns differ in length.
        """
        self._files.extend(part.files)
        for sums in part.pieces:
            self._pieces.setdefault(sums.file, bytearray()).extend(sums.sha256)
            self._n_pieces += max(1, len(sums.sha256) // SHA256_BYTES)
        tensors = _TENSORS.read(part.tensors)
        if any(len(named.name) > _MAX_NAME for named in (*tensors, *part.files)):
            raise WrongBytes("the description has a name longer than any")
        self._tensors.extend(tensors)
        if len(self._files) > MAX_FILES or len(self._tensors) > MAX_TENSORS or self._n_pieces > MAX_PIECES:
            raise WrongBytes("the description has more files, tensors or pieces than any model")

    def manifest(self) -> ModelManifest:
        """Return the manifest that the parts describe.

        Raises:
            WrongBytes: the parts contradict one another.
        """
        files: list[FileEntry] = []
        for number, file in enumerate(self._files):
            entry = _FILE.read(file, pieces=bytes(self._pieces.get(number, b"")))
            if (
                len(file.sha256) != SHA256_BYTES
                or file.size_bytes > PIECE * MAX_PIECES
                or len(entry.pieces) != SHA256_BYTES * entry.n_pieces
            ):
                raise WrongBytes(f"the description of {printable(file.name)} has checksums that don't fit its {file.size_bytes} bytes")
            files.append(entry)
        for at in self._tensors:
            if at.file >= len(files) or at.offset + at.nbytes > files[at.file].size:
                raise WrongBytes(f"the description has tensor {printable(at.name)} outside of its file")
        if not files:
            raise WrongBytes("the description has no files")
        return ModelManifest(self._digest, tuple(files), tuple(self._tensors))


logger = logging.getLogger(__name__)

MAX_RANGES: Final = 4096
_HEARTBEAT_S: Final = 1.0
WRITE_S: Final = 20.0
"""Seconds that a caller may leave a message untaken. Raising it: callers that hang keep others from their weights longer; lowering it: callers on slow
links are dropped."""

FetchContext = grpc.aio.ServicerContext[wire.FetchPiecesRequest, wire.FetchPiecesResponse]
DescribeContext = grpc.aio.ServicerContext[wire.DescribeWeightsRequest, wire.DescribeWeightsResponse]


class WeightsLibrary(Protocol):
    """Source of the weights that are served. Its methods block and may be called from any thread."""

    def describe(self, digest: str, examined: Callable[[int, int], None]) -> ModelManifest:
        """Describe a model. Raises ModelNotFound or ModelFileError, and what `examined` raises."""
        ...

    def read(self, digest: str, file: int, piece: int) -> bytes:
        """Read one piece of a file. Raises ModelNotFound or ModelFileError."""
        ...

    def read_runs(self, digest: str, runs: ByteRuns) -> bytes:
        """Read runs of bytes of a file. Raises ModelNotFound or ModelFileError."""
        ...


class _CallerLeft(Exception):
    """Error that stops a description after its caller has left."""


class WeightsServicer(weights_pb2_grpc.WeightsServiceServicer):
    """gRPC service that serves the weights of `library`.

    Args:
        admit: raises NotTrusted for callers that may not take weights.
        streams: open calls. Raising it: more nodes are served at a time and each of them slower, since they share the disk and the link.
        write_s: seconds that a caller may leave a message untaken.
    """

    def __init__(self, library: WeightsLibrary, admit: Callable[[Context], None], *, streams: int = 4, write_s: float = WRITE_S) -> None:
        self._library: Final = library
        self._admit: Final = admit
        self._free, self._share = streams, max(1, streams // 2)
        self._write_s: Final = write_s
        self._served: Final = Counter[str]()
        """Open calls by caller. A node that loads layers of two models has two."""
        self._describing: Final = asyncio.Lock()
        self._examined = (0, 0)
        """(bytes, of bytes) of the model that is being read. Callers that wait for another model get these numbers too, as a sign of progress."""

    # grpc.aio accepts coroutines that write, as well as generators. A cancelled coroutine ends at once, a generator only when it is collected.
    async def DescribeWeights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: wire.DescribeWeightsRequest, context: DescribeContext
    ) -> None:
        await self._check(request.digest, context)
        caller = self._take_stream(context)
        begun, left = False, False

        def examined(done: int, total: int) -> None:
            self._examined = (done, total)
            if left:
                raise _CallerLeft

        async def describe() -> ModelManifest:
            nonlocal begun
            # One after the other: the second caller for a model finds the description that the first one waited for.
            async with self._describing:
                begun = True
                return await asyncio.to_thread(self._library.describe, request.digest, examined)

        task = asyncio.create_task(describe())
        try:
            while not (await asyncio.wait({task}, timeout=_HEARTBEAT_S))[0]:
                await self._write(
                    context, wire.DescribeWeightsResponse(examined_bytes=self._examined[0], bytes_to_examine=self._examined[1])
                )
            for part in parts(task.result()):
                await self._write(context, part)
        except (ModelNotFound, ModelFileError) as error:
            await _refuse(context, error)
        finally:
            left = True
            if not begun:
                task.cancel()
            try:
                await _ended(task)
            finally:  # the call may be cancelled meanwhile
                self._give_stream(caller)

    async def FetchPieces(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: wire.FetchPiecesRequest, context: FetchContext
    ) -> None:
        await self._check(request.digest, context)
        if len(request.ranges) > MAX_RANGES or len(request.runs) > MAX_RANGES:
            ranges = max(len(request.ranges), len(request.runs))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{ranges} ranges are more than {MAX_RANGES}")
        if any(runs.length * runs.count > PIECE or runs.count > MOST_RUNS for runs in request.runs):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"more than {PIECE} bytes, or {MOST_RUNS} runs of them")
        caller = self._take_stream(context)
        wanted = _wanted(request)
        ahead = self._read(request.digest, next(wanted, None))
        try:
            while ahead is not None:
                got = await asyncio.shield(ahead)
                ahead = self._read(request.digest, next(wanted, None))
                await self._write(context, got)
        except (ModelNotFound, ModelFileError) as error:
            await _refuse(context, error)
        finally:
            try:
                if ahead is not None:
                    await _ended(ahead)
            finally:  # the call may be cancelled meanwhile
                self._give_stream(caller)

    def _read(self, digest: str, place: _Place | None) -> asyncio.Task[wire.FetchPiecesResponse] | None:
        if place is None:
            return None
        file, piece, runs = place

        def read() -> wire.FetchPiecesResponse:
            data = self._library.read(digest, file, piece) if runs is None else self._library.read_runs(digest, runs)
            return wire.FetchPiecesResponse(file=file, piece=piece, data=data)

        return asyncio.create_task(asyncio.to_thread(read))

    async def _check(self, digest: str, context: FetchContext | DescribeContext) -> None:
        self._admit(context)
        if not is_sha256(digest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a model is asked for by its digest, 64 hexadecimal digits")
        if self._free <= 0 or self._served[caller_of(context)] >= self._share:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this node gives weights to as many others as it will")

    async def _write(
        self, context: FetchContext | DescribeContext, message: wire.FetchPiecesResponse | wire.DescribeWeightsResponse
    ) -> None:
        try:
            async with asyncio.timeout(self._write_s):
                await cast("Context", context).write(message)
        except TimeoutError:
            # Not an abort: its status would wait behind the message that is not taken, and the stream would stay occupied.
            logger.warning("%s takes nothing of the weights that it asked for: it is left", caller_of(cast("Context", context)))
            raise asyncio.CancelledError from None

    def _take_stream(self, context: FetchContext | DescribeContext) -> str:
        caller = caller_of(context)
        self._free -= 1
        self._served[caller] += 1
        return caller

    def _give_stream(self, caller: str) -> None:
        self._free += 1
        self._served[caller] -= 1
        if not self._served[caller]:
            del self._served[caller]


_Place = tuple[int, int, ByteRuns | None]
"""A file and a piece of it, with None; or a file, the number of its runs in the request, and the runs."""


def _wanted(request: wire.FetchPiecesRequest) -> Iterator[_Place]:
    for run in request.ranges:
        for piece in range(run.first, run.first + run.count):
            yield run.file, piece, None
    for place, runs in enumerate(RUNS.read_all(request.runs)):
        yield runs.file, place, runs


async def _refuse(context: FetchContext | DescribeContext, error: ModelNotFound | ModelFileError) -> NoReturn:
    """Refuse a call. The message does not name files of this machine."""
    if isinstance(error, ModelNotFound):
        await context.abort(grpc.StatusCode.NOT_FOUND, error.message)
    logger.warning("weights can't be given: %s", error)
    await context.abort(grpc.StatusCode.DATA_LOSS, "the model's files are not what they were when they were described")


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait until a thread's task ends, and ignore its result."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def weights_service(library: WeightsLibrary, admit: Callable[[Context], None]) -> Service:
    limits = {
        "WeightsService/DescribeWeights": Limit(KIB, 8, least=Use.TAKE_WEIGHTS),
        "WeightsService/FetchPieces": Limit(128 * KIB, MAX_RANGES + 8, least=Use.TAKE_WEIGHTS),
    }
    return Service(partial(weights_pb2_grpc.add_WeightsServiceServicer_to_server, WeightsServicer(library, admit)), limits)
