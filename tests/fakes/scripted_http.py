"""Real HTTP servers that answer as a test says, in threads of their own: engines as their documents describe them, and engines that misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_S = 60.0
"""Longest silence of a server; it ends with the server."""


@dataclass(frozen=True)
class Hang:
    """A silence, until the server ends at the latest."""

    most_s: float = HANG_S


class Drop:
    """The connection breaks."""


Part = bytes | Hang | Drop


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Said:
    """An answer. With a length it is whole; without one it ends with its connection."""

    parts: Iterable[Part] = ()
    status: int = 200
    kind: str = "application/json"
    length: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def said(body: Any, status: int = 200, **headers: str) -> Said:
    """Return an answer of JSON."""
    data = json.dumps(body).encode()
    return Said((data,), status, length=len(data), headers=headers)


def events(*found: Any, done: bool = True) -> Generator[bytes]:
    """Yield server-sent events."""
    for each in found:
        yield b"data: " + json.dumps(each).encode() + b"\n\n"
    if done:
        yield b"data: [DONE]\n\n"


Script = Callable[[Asked], Said]


@dataclass
class Served:
    url: str
    asked: list[Asked]
    """All requests, in the order in which they came."""

    def paths(self) -> list[str]:
        return [f"{each.method} {each.path}" for each in self.asked]


@contextmanager
def served(script: Script, server_name: str = "test") -> Generator[Served]:
    """Answer as the script says, on a port of loopback."""
    asked: list[Asked] = []
    ending = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def version_string(self) -> str:
            return server_name

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Asked(self.command, self.path, dict(self.headers), json.loads(data) if data else None)
            asked.append(request)
            self.close_connection = True
            with suppress(OSError):
                self._say(script(request))

        do_POST = do_GET

        def _say(self, answer: Said) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Connection", "close")
            if answer.length is not None:
                self.send_header("Content-Length", str(answer.length))
            for name, value in answer.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            for part in answer.parts:
                match part:
                    case Hang():
                        ending.wait(part.most_s)
                    case Drop():
                        return
                    case data:
                        self.wfile.write(data)
                        self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{server.server_address[1]}", asked)
    finally:
        ending.set()
        server.shutdown()
        server.server_close()
        thread.join()
