"""Descriptions on the wire, and what a servicer refuses: over a real socket, with bytes that nobody should send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from paceline.core.errors import ModelFileError, ModelNotFound, SourceLost, WrongBytes
from paceline.core.manifest import MOST_RUNS, PIECE, ByteRuns, FileEntry, ModelManifest, ModelPart, PieceRun, TensorAt, pieces_needed
from paceline.core.model import LayerRange
from paceline.net import weights_servicer
from paceline.net.weights_client import WeightsClient
from paceline.net.weights_servicer import MAX_RANGES, WeightsDescription, WeightsServicer, parts
from paceline.net.wire import weights_pb2 as wire
from paceline.net.wire.weights_pb2_grpc import WeightsServiceStub, add_WeightsServiceServicer_to_server

DIGEST = "a" * 64
SUM = bytes(range(32))


def manifest(n_files: int = 2, n_pieces: int = 3, n_tensors: int = 5) -> ModelManifest:
    files = tuple(FileEntry(f"{at}.gguf", PIECE * (n_pieces - 1) + 7, "b" * 64, SUM * n_pieces, in_digest=True) for at in range(n_files))
    tensors = tuple(TensorAt(f"model.layers.{at}.x.weight", at % n_files, at, 3) for at in range(n_tensors))
    return ModelManifest(DIGEST, files, tensors)


def described(*said: wire.DescribeWeightsResponse) -> ModelManifest:
    description = WeightsDescription(DIGEST)
    for part in said:
        description.add(part)
    return description.manifest()


@pytest.mark.parametrize("sizes", [(1, 1, 0), (2, 3, 5), (3, 40_000, 10_000), (4096, 2, 1)])
def test_a_description_survives_the_wire_in_small_messages(sizes: tuple[int, int, int]) -> None:
    said, heard = manifest(*sizes), WeightsDescription(DIGEST)
    for part in parts(said):
        data = part.SerializeToString()
        assert len(data) < 1 << 20
        heard.add(wire.DescribeWeightsResponse.FromString(data))
    assert heard.manifest() == said


@given(st.binary(max_size=200))
def test_bytes_that_are_no_description_make_none(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        part = wire.DescribeWeightsResponse.FromString(data)
        with pytest.raises(WrongBytes):
            described(part)


@pytest.mark.parametrize(
    "part",
    [
        wire.DescribeWeightsResponse(files=[wire.WeightsFile(name="x.gguf", size_bytes=1 << 60, sha256=SUM)]),
        wire.DescribeWeightsResponse(files=[wire.WeightsFile(name="x.gguf", size_bytes=5, sha256=SUM)]),
        wire.DescribeWeightsResponse(files=[wire.WeightsFile(name="x.gguf", size_bytes=0, sha256=b"")]),
        wire.DescribeWeightsResponse(files=[wire.WeightsFile(name="x" * 600, size_bytes=0, sha256=SUM)]),
        wire.DescribeWeightsResponse(tensors=wire.TensorIndex(names=["a"], files=[0], offsets=[0])),
        wire.DescribeWeightsResponse(),
        wire.DescribeWeightsResponse(
            files=[wire.WeightsFile(name="x.gguf", size_bytes=5, sha256=SUM)],
            pieces=[wire.PieceDigests(file=0, sha256=SUM)],
            tensors=wire.TensorIndex(names=["a"], files=[0], offsets=[4], sizes=[2]),
        ),
        wire.DescribeWeightsResponse(
            files=[wire.WeightsFile(name="x.gguf", size_bytes=0, sha256=SUM)],
            tensors=wire.TensorIndex(names=["a"], files=[1], offsets=[0], sizes=[0]),
        ),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(part: wire.DescribeWeightsResponse) -> None:
    with pytest.raises(WrongBytes):
        described(part)


def test_descriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_servicer, "MAX_FILES", 10)
    with pytest.raises(WrongBytes, match="than any model"):
        described(*[wire.DescribeWeightsResponse(files=[wire.WeightsFile(name="x")])] * 20)
    monkeypatch.setattr(weights_servicer, "MAX_PIECES", 10)
    with pytest.raises(WrongBytes, match="than any model"):
        described(*(wire.DescribeWeightsResponse(pieces=[wire.PieceDigests(file=file)]) for file in range(20)))


SPANS = st.lists(st.tuples(st.integers(0, 6 * PIECE), st.integers(0, 2 * PIECE)), max_size=20)


@settings(max_examples=examples(200))
@given(SPANS, st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_needed_pieces_cover_what_a_part_needs_and_are_apart(spans: list[tuple[int, int]], start: int, stop: int, edges: bool) -> None:
    size = 8 * PIECE + 5
    tensors = tuple(TensorAt(f"model.layers.{at}.x", 0, first, n) for at, (first, n) in enumerate(spans))
    model = ModelManifest(DIGEST, (FileEntry("a.gguf", size, "b" * 64, SUM * 9, in_digest=True),), tensors)
    part = ModelPart(LayerRange(start, stop), edges)
    runs = pieces_needed(model, part)
    covered = {piece for run in runs for piece in range(run.first, run.stop)}
    for at in tensors:
        if part.needs(at.name) and at.nbytes:
            assert set(range(at.offset // PIECE, -(-(at.offset + at.nbytes) // PIECE))) <= covered
    assert sum(map(len, runs)) == len(covered)
    assert all(left.stop < right.first for left, right in itertools.pairwise(runs))
    assert pieces_needed(model, None) == [PieceRun(0, 0, 9)]


class Library:
    """Two pieces of one model."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.given_up = threading.Event()

    def describe(self, digest: str, examined: Callable[[int, int], None]) -> ModelManifest:
        self.began.set()
        if digest != DIGEST:
            raise ModelNotFound("no such model")
        while not self.go_on.wait(0.01):
            try:
                examined(1, 2)
            except BaseException:
                self.given_up.set()
                raise
        return manifest(1, 2, 0)

    def read(self, digest: str, file: int, piece: int) -> bytes:
        if (digest, file) != (DIGEST, 0) or piece > 1:
            raise ModelNotFound("no such piece")
        if piece == 1:
            raise ModelFileError("/secret/path is damaged")
        return b"x" * PIECE

    def read_runs(self, digest: str, runs: ByteRuns) -> bytes:
        if (digest, runs.file) != (DIGEST, 0):
            raise ModelNotFound("no such file")
        return bytes([runs.offset % 251]) * runs.nbytes


async def served(
    library: Library, use: Callable[[grpc.aio.Channel], Awaitable[None]], servicer: type[WeightsServicer] = WeightsServicer
) -> None:
    server = grpc.aio.server()
    add_WeightsServiceServicer_to_server(servicer(library, lambda _: None, streams=1), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await use(channel)
    finally:
        await server.stop(None)


async def code_of(call: grpc.aio.UnaryStreamCall[object, object]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert "/secret" not in (caught.value.details() or "")
    return caught.value.code()


def test_what_is_not_in_the_catalog_is_refused_by_type() -> None:
    async def use(channel: grpc.aio.Channel) -> None:
        stub = WeightsServiceStub(channel)
        for digest in ("", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65):
            assert await code_of(stub.DescribeWeights(wire.DescribeWeightsRequest(digest=digest))) is grpc.StatusCode.INVALID_ARGUMENT
            assert await code_of(stub.FetchPieces(wire.FetchPiecesRequest(digest=digest))) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(stub.DescribeWeights(wire.DescribeWeightsRequest(digest="c" * 64))) is grpc.StatusCode.NOT_FOUND
        far = [wire.PieceRange(file=0, first=0, count=1), wire.PieceRange(file=0, first=1 << 31, count=1 << 31)]
        assert await code_of(stub.FetchPieces(wire.FetchPiecesRequest(digest=DIGEST, ranges=far))) is grpc.StatusCode.NOT_FOUND
        many = [wire.PieceRange(file=0, first=0, count=0)] * (MAX_RANGES + 1)
        assert await code_of(stub.FetchPieces(wire.FetchPiecesRequest(digest=DIGEST, ranges=many))) is grpc.StatusCode.INVALID_ARGUMENT
        broken = [wire.PieceRange(file=0, first=0, count=2)]
        assert await code_of(stub.FetchPieces(wire.FetchPiecesRequest(digest=DIGEST, ranges=broken))) is grpc.StatusCode.DATA_LOSS
        assert [part async for part in stub.FetchPieces(wire.FetchPiecesRequest(digest=DIGEST))] == []
        for wrong in (
            wire.ByteRuns(length=1, count=PIECE + 1),
            wire.ByteRuns(length=2, count=MOST_RUNS + 1),
            wire.ByteRuns(length=PIECE + 1, count=1),
        ):
            runs = wire.FetchPiecesRequest(digest=DIGEST, runs=[wrong])
            assert await code_of(stub.FetchPieces(runs)) is grpc.StatusCode.INVALID_ARGUMENT
        elsewhere = wire.FetchPiecesRequest(digest=DIGEST, runs=[wire.ByteRuns(file=1, length=1, count=1)])
        assert await code_of(stub.FetchPieces(elsewhere)) is grpc.StatusCode.NOT_FOUND

    asyncio.run(served(Library(), use))


@pytest.mark.parametrize(
    "runs", [ByteRuns(0, 7, 3 * PIECE + 5, 0, 1), ByteRuns(0, 7, 400, 1000, 9000), ByteRuns(0, 7, 1, 2, MOST_RUNS + 3)]
)
def test_bytes_between_pieces_come_as_they_were_asked_for(runs: ByteRuns) -> None:
    async def use(channel: grpc.aio.Channel) -> None:
        got = await WeightsClient(channel, "it").fetch_runs(DIGEST, runs)
        assert got == b"".join(bytes([part.offset % 251]) * part.nbytes for part in runs.pieces())
        assert len(got) == runs.nbytes

    asyncio.run(served(Library(), use))


def test_only_so_many_are_served_and_who_leaves_makes_room() -> None:
    library = Library()
    library.go_on.clear()

    async def use(channel: grpc.aio.Channel) -> None:
        stub = WeightsServiceStub(channel)
        first = stub.DescribeWeights(wire.DescribeWeightsRequest(digest=DIGEST))
        await asyncio.to_thread(library.began.wait, 10)
        assert await code_of(stub.FetchPieces(wire.FetchPiecesRequest(digest=DIGEST))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        assert await asyncio.to_thread(library.given_up.wait, 10), "the thread of a caller who left ends"
        library.go_on.set()
        while True:  # until the servicer has seen the thread end
            try:
                assert (await WeightsClient(channel, "node").describe(DIGEST, lambda done, total: None)) == manifest(1, 2, 0)
                break
            except SourceLost:
                await asyncio.sleep(0)

    asyncio.run(served(library, use))


def test_a_node_that_says_how_far_it_is_is_waited_for_and_one_that_is_silent_is_not() -> None:
    library = Library()
    library.go_on.clear()

    async def use(channel: grpc.aio.Channel) -> None:
        def examined(done: int, total: int) -> None:
            assert (done, total) == (1, 2)
            library.go_on.set()

        assert await WeightsClient(channel, "node").describe(DIGEST, examined) == manifest(1, 2, 0)
        library.go_on.clear()
        with pytest.raises(SourceLost, match="node has sent nothing"):
            await WeightsClient(channel, "node", idle_s=0.01).describe(DIGEST, examined)
        library.go_on.set()

    asyncio.run(served(library, use))


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        ([wire.FetchPiecesResponse(file=0, piece=1, data=b"x" * 7)], WrongBytes, "another piece"),
        ([wire.FetchPiecesResponse(file=1, piece=0, data=b"x" * PIECE)], WrongBytes, "another piece"),
        ([wire.FetchPiecesResponse(file=0, piece=0, data=b"x")], WrongBytes, "another piece"),
        ([wire.FetchPiecesResponse(file=0, piece=0, data=b"x" * PIECE)], SourceLost, "stopped before"),
        ([], SourceLost, "stopped before"),
    ],
)
def test_pieces_that_nobody_asked_for_or_that_lack_are_noticed(
    sent: list[wire.FetchPiecesResponse], error: type[Exception], words: str
) -> None:
    class Liar(WeightsServicer):
        async def FetchPieces(self, request: wire.FetchPiecesRequest, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
            for piece in sent:
                await context.write(piece)

    async def use(channel: grpc.aio.Channel) -> None:
        async def take() -> None:
            async for _ in WeightsClient(channel, "node").fetch(manifest(1, 2, 0), [PieceRun(0, 0, 2)]):
                pass

        with pytest.raises(error, match=words):
            await take()

    asyncio.run(served(Library(), use, Liar))


@pytest.mark.parametrize(
    "sign_of_life", [lambda n: (0, 100 << 20), lambda n: (n, 1 << 60), lambda n: (n % 2 << 30, 1 << 60), lambda n: (0, 0)]
)
def test_a_node_that_comes_no_further_is_not_waited_for(sign_of_life: Callable[[int], tuple[int, int]]) -> None:
    class Stalling(WeightsServicer):
        async def DescribeWeights(self, request: wire.DescribeWeightsRequest, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
            for number in itertools.count():
                done, total = sign_of_life(number)
                await context.write(wire.DescribeWeightsResponse(examined_bytes=done, bytes_to_examine=total))

    async def use(channel: grpc.aio.Channel) -> None:
        with pytest.raises(SourceLost, match="come no further"):
            await WeightsClient(channel, "node", idle_s=0.5).describe(DIGEST, lambda done, total: None)

    asyncio.run(served(Library(), use, Stalling))
