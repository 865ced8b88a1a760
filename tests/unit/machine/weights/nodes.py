"""Nodes that give weights: real gRPC servers over mTLS, on real files, with faults where a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
from tests.fakes.fleets import TestFleet

from paceline.core.errors import DownloadError
from paceline.core.ids import NodeId
from paceline.core.manifest import ModelManifest
from paceline.fleet.placement import WeightsSource
from paceline.machine.fetch import Dial, Fetch
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import channel_credentials, server_credentials
from paceline.net.trust.identity import Identity
from paceline.net.weights_servicer import WeightsServicer
from paceline.net.wire.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from paceline.store.catalog import Library
from paceline.store.home import Home


class WatchedLibrary(Library):
    """A library that counts what it gives, and lies or acts where it was told to."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.reads: list[tuple[int, int]] = []
        self.before_read: Callable[[int], None] = lambda count: None
        """Called in a thread with the number of pieces read before."""
        self.change: Callable[[tuple[int, int], bytes], bytes] = lambda place, data: data
        self.describe_as: Callable[[ModelManifest], ModelManifest] = lambda manifest: manifest

    def describe(self, digest: str, examined: Callable[[int, int], None]) -> ModelManifest:
        return self.describe_as(super().describe(digest, examined))

    def read(self, digest: str, file: int, piece: int) -> bytes:
        self.before_read(len(self.reads))
        self.reads.append((file, piece))
        return self.change((file, piece), super().read(digest, file, piece))


@dataclass(slots=True)
class Node:
    """A node that gives weights."""

    name: str
    library: WatchedLibrary
    server: grpc.aio.Server
    address: str

    def source(self, digest: str, model_id: str) -> WeightsSource:
        return WeightsSource(NodeId(self.name), (self.address,), model_id, digest, 1)

    def dies_after(self, pieces: int) -> None:
        """Close every connection, for good, once so many pieces were read."""
        loop = asyncio.get_running_loop()

        def before_read(count: int) -> None:
            if count >= pieces:
                asyncio.run_coroutine_threadsafe(self.server.stop(None), loop).result(10)

        self.library.before_read = before_read


@dataclass(slots=True)
class Fleet:
    """A CA, its nodes, and one more member who fetches."""

    trust: TestFleet = field(default_factory=TestFleet)
    announced: list[str] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Bytes here, of bytes."""

    @asynccontextmanager
    async def node(self, home: Home, name: str = "giver-1", streams: int = 4) -> AsyncIterator[Node]:
        server = grpc.aio.server()
        library = WatchedLibrary(home)
        add_WeightsServiceServicer_to_server(WeightsServicer(library, lambda _: None, streams=streams), server)
        port = server.add_secure_port("127.0.0.1:0", server_credentials(self.trust.member(name)))
        await server.start()
        try:
            yield Node(name, library, server, f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    def fetch(self, home: Home, *sources: WeightsSource) -> Fetch:
        async def no_wait(seconds: float) -> None:
            del seconds

        def progress(done: int, total: int) -> None:
            self.seen.append((done, total))

        return Fetch(sources, dialer(self.trust.member("taker-1")), home, progress, self.announced.append, no_wait)


def dialer(identity: Identity) -> Dial:
    credentials = channel_credentials(identity)

    def dial(source: WeightsSource, address: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", NODE_NAME)])

    return dial


def lying_about(manifest: ModelManifest, **changes: object) -> ModelManifest:
    """The description with its first file changed."""
    return replace(manifest, files=(replace(manifest.files[0], **changes), *manifest.files[1:]))  # type: ignore[arg-type]


def staged_files(home: Home) -> list[Path]:
    return [path for path in home.partial.glob("*/*") if path.is_file()]


def cause_of(error: DownloadError) -> type[BaseException]:
    return type(error.__cause__)
