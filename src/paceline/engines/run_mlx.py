"""mlx-lm's server with a key and a Unix socket: `python -m paceline.engines.run_mlx`, with the options of `mlx_lm.server`.

Of itself it has neither, and lets every page read its answers. The key comes from MLX_SERVER_KEY. A `--host` that ends in .sock is the path of a socket.
Written for mlx-lm 0.32.
"""

from __future__ import annotations

import hmac
import os
import socket
import socketserver
import sys
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from importlib import import_module
from typing import Any

from paceline.engines.commands import NO_PAGE


class _SocketServer(ThreadingHTTPServer):
    """An HTTP server on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer looks up the host's name
        self.server_name, self.server_port = "localhost", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = self.socket.accept()
        return connection, ("localhost", 0)  # a Unix socket's peer has no address, and handlers write one into their log


def main() -> None:
    """Serve until SIGTERM."""
    server: Any = import_module("mlx_lm.server")
    key = os.environ.pop("MLX_SERVER_KEY", "").encode()
    handler: Any = server.APIHandler

    class Guarded(handler):
        """Answers 401 to every request without the key."""

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ").encode()
            if key and not hmac.compare_digest(given, key):
                self.send_error(HTTPStatus.UNAUTHORIZED)
                return False
            return True

    def serve(host: str, port: int, response_generator: Any, **_: object) -> None:
        def handle(*args: Any, **named: Any) -> Any:
            return Guarded(response_generator, *args, system_fingerprint=server.get_system_fingerprint(), **named)

        at: Any = host if host.endswith(".sock") else (host, port)
        (_SocketServer if host.endswith(".sock") else ThreadingHTTPServer)(at, handle).serve_forever()

    server._run_http_server = serve  # noqa: SLF001 - `run` has parameters for both classes, and ignores them
    sys.argv += ["--allowed-origins", NO_PAGE]
    server.main()


if __name__ == "__main__":
    main()
