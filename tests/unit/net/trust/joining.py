"""A node that holds a CA and keeps a join port, and a raw caller of it."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from tests.fakes.clock import FakeClock

from paceline.core.ids import NodeId, Trust
from paceline.core.ports import find_port
from paceline.net.join_host import JoinHost
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.authority import Authority
from paceline.net.trust.certificates import JOIN_NAME, NODE_NAME, make_key, make_request
from paceline.net.trust.credentials import client_context
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import Issuer
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.tokens import NONCE_BYTES, JoinToken
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import JoinServiceStub

SOON_S = 100.0


def free_port() -> int:
    return find_port("127.0.0.1")


@dataclass(slots=True)
class IssuerNode:
    """Where a fleet begins, with a clock that moves when told."""

    folder: FleetFolder
    clock: FakeClock
    issuer: Issuer
    port: int

    @classmethod
    def make(cls, root: Path) -> IssuerNode:
        clock = FakeClock(wall=time.time())
        folder = FleetFolder(root)
        authority = Authority.create(clock.wall())
        folder.write_secret(folder.authority_file, authority.to_pem())
        key, own = make_key(), NodeId("issuer-1")
        certificate = authority.issue(make_request(key, own), own, clock.wall(), trust=Trust.TRUSTED)
        folder.write_secret(folder.identity_file, Identity.assemble(key, certificate, authority.root, clock.wall()).to_pem())
        issuer = Issuer(authority, folder, clock)
        port = free_port()
        issuer.set_join_port(port)
        return cls(folder, clock, issuer, port)

    def mint(
        self, *, ttl_s: float = 3600, uses: int = 16, addresses: tuple[str, ...] | None = None, trust: Trust = Trust.MEMBER
    ) -> JoinToken:
        return self.issuer.mint(addresses or (f"127.0.0.1:{self.port}",), ttl_s=ttl_s, uses=uses, trust=trust)

    @asynccontextmanager
    async def hosted(self, joined: list[str] | None = None) -> AsyncIterator[JoinHost]:
        """The join port, if a token lives."""
        host = JoinHost(
            self.folder,
            self.clock,
            Refusals(),
            host="127.0.0.1",
            peers=lambda: ["10.0.0.1:8154", "nonsense"],
            on_joined=(joined if joined is not None else []).append,
        )
        assert host.claim()
        await host.refresh()
        try:
            yield host
        finally:
            await host.close()

    async def credentials(self) -> grpc.ChannelCredentials:
        """For a caller that believes whatever the port shows."""
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", self.port))
        return grpc.ssl_channel_credentials(pem.encode())

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[JoinServiceStub]:
        """A caller that sends what it likes."""
        options = [("grpc.ssl_target_name_override", JOIN_NAME)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.port}", await self.credentials(), options) as channel:
            yield JoinServiceStub(channel)


@asynccontextmanager
async def begun_calls(
    port: int, count: int, caller: Identity | None = None, path: str = "/paceline.v1.JoinService/Join", part: bytes = b"", live: str = ""
) -> AsyncIterator[asyncio.StreamReader]:
    """A connection with calls whose headers were sent and whose requests never come. Spoken by hand: no client would.

    Args:
        caller: whose connection; None: a stranger's.
        part: of each request, what comes.
        live: path of a call before them, whose request is empty and comes whole.
    """
    if caller is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = client_context(caller)
    context.set_alpn_protocols(["h2"])
    name = JOIN_NAME if caller is None else NODE_NAME
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)

    def call(place: int, path: str, part: bytes) -> bytes:
        headers = {":method": "POST", ":scheme": "https", ":path": path, ":authority": name}
        headers |= {"content-type": "application/grpc", "te": "trailers"}
        block = b"".join(b"\0" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode() for key, value in headers.items())
        return _frame(HEADERS, 1 + 2 * place, block) + (_frame(DATA, 1 + 2 * place, part) if part else b"")

    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, b""))
        if live:
            writer.write(call(0, live, bytes(5)))
            async with asyncio.timeout(SOON_S):
                while (await _read_frame(reader))[0] != DATA:  # until it is answered, its own request counts as begun
                    pass
        writer.write(b"".join(call(1 + place, path, part) for place in range(count)) + _frame(PING, 0, bytes(8)))
        await writer.drain()
        # The answer to the ping comes after the headers were read.
        async with asyncio.timeout(SOON_S):
            while (await _read_frame(reader)) != (PING, ACKNOWLEDGED):
                pass
        yield reader
    finally:
        writer.transport.abort()


async def hold_calls(port: int, count: int, caller: Identity, path: str, part: bytes, first: bytes = b"") -> asyncio.StreamWriter:
    """Begin calls, and send `first`, and then `part` of each as far as the node's windows let it, until it lets nothing more come."""
    context = client_context(caller)
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NODE_NAME)
    block = _headers(path)
    whole = memoryview(first + part)
    streams = range(1, 1 + 2 * count, 2)
    windows, sent, initial = dict.fromkeys((0, *streams), 65535), dict.fromkeys(streams, 0), 65535
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, b"") + b"".join(_frame(HEADERS, each, block) for each in streams)
    )
    with suppress(TimeoutError):
        while True:
            for each in tuple(sent):
                while (room := min(windows[0], windows[each], 16384, len(whole) - sent[each])) > 0:
                    writer.write(_frame(DATA, each, bytes(whole[sent[each] : sent[each] + room])))
                    sent[each], windows[0], windows[each] = sent[each] + room, windows[0] - room, windows[each] - room
                    await writer.drain()
            async with asyncio.timeout(0.3):
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == PING and not flags:
                writer.write(_frame(PING, 0, payload, ACKNOWLEDGED))
            elif kind == WINDOW_UPDATE and stream in windows:
                windows[stream] += int.from_bytes(payload, "big")
            elif kind == SETTINGS and not flags:
                for at in range(0, len(payload), 6):
                    if payload[at : at + 2] == b"\0\x04":
                        now = int.from_bytes(payload[at + 2 : at + 6], "big")
                        windows |= {each: windows[each] + now - initial for each in streams}
                        initial = now
                writer.write(_frame(SETTINGS, 0, b"", ACKNOWLEDGED))
            elif kind == RST_STREAM or (kind == HEADERS and flags & 1):
                sent.pop(stream, None)
    return writer


async def leave_answers(port: int, count: int, caller: Identity, path: str, message: bytes) -> asyncio.StreamWriter:
    """Make whole calls, and take none of their answers beyond the first windows."""
    context = client_context(caller)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NODE_NAME)
    body = len(message).to_bytes(5, "big") + message
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, b""))
    for each in range(1, 1 + 2 * count, 2):
        writer.write(_frame(HEADERS, each, _headers(path)) + _frame(DATA, each, body, 1))
        await writer.drain()
    return writer


def _headers(path: str) -> bytes:
    headers = {":method": "POST", ":scheme": "https", ":path": path, ":authority": NODE_NAME}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(b"\0" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode() for key, value in headers.items())


DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACKNOWLEDGED = 1


def _frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    flags |= 4 if kind == HEADERS else 0
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int]:
    head = await reader.readexactly(9)
    await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], head[4]


def request_for(token: JoinToken, name: str) -> wire.JoinRequest:
    """What a good joiner sends."""
    request, nonce = make_request(make_key(), NodeId(name)), secrets.token_bytes(NONCE_BYTES)
    return wire.JoinRequest(
        certificate_request=request,
        token_id=token.token_id.hex(),
        proof=token.proof(request, nonce),
        nonce=nonce,
        protocol=PROTOCOL_VERSION,
    )
