"""TLS spoken by hand, as far as an attacker needs it: a hello with random bytes of its own choice, and what the server signs for it."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass

HELLO, KEY_EXCHANGE = 2, 12
HANDSHAKE, ALERT = 22, 21


@dataclass(frozen=True, slots=True)
class Signed:
    """What a server of TLS 1.2 signed: the caller's random bytes, its own, and its half of the key."""

    text: bytes
    signature: bytes


def _extension(kind: int, body: bytes) -> bytes:
    return struct.pack("!HH", kind, len(body)) + body


def ask_for_signature(port: int, random32: bytes, name: bytes) -> Signed | None:
    """What the server at a port of this machine signs for a caller without a certificate; None where it speaks no TLS 1.2."""
    assert len(random32) == 32
    groups = struct.pack("!HHH", 4, 0x1D, 0x17)
    extensions = (
        _extension(0, struct.pack("!HBH", len(name) + 3, 0, len(name)) + name)
        + _extension(10, groups)
        + _extension(11, b"\1\0")
        + _extension(13, b"\0\2\4\3")
        + _extension(16, b"\0\3\2h2")
        + _extension(23, b"")
    )
    body = b"\3\3" + random32 + b"\0" + b"\0\4\xc0\x2b\xc0\x2c" + b"\1\0" + struct.pack("!H", len(extensions)) + extensions
    message = b"\1" + len(body).to_bytes(3, "big") + body
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(b"\x16\3\1" + struct.pack("!H", len(message)) + message)
        stream = connection.makefile("rb")
        buffer, server_random = b"", b""
        while len(head := stream.read(5)) == 5:
            kind, _, length = struct.unpack("!BHH", head)
            if kind == ALERT:
                return None
            assert kind == HANDSHAKE
            buffer += stream.read(length)
            while len(buffer) >= 4 and len(buffer) >= 4 + int.from_bytes(buffer[1:4], "big"):
                length = int.from_bytes(buffer[1:4], "big")
                what, said, buffer = buffer[0], buffer[4 : 4 + length], buffer[4 + length :]
                if what == HELLO:
                    server_random = said[2:34]
                if what == KEY_EXCHANGE:
                    parameters, rest = said[: 4 + said[3]], said[4 + said[3] :]
                    signature = rest[4 : 4 + struct.unpack("!H", rest[2:4])[0]]
                    return Signed(random32 + server_random + parameters, signature)
    return None


async def until_cut(reader: asyncio.StreamReader) -> None:
    """Whatever is still on its way comes; then the connection is over."""
    async with asyncio.timeout(100):
        try:
            while await reader.read(1 << 16):
                pass
        except OSError:
            return
