"""A real server on a free port of this machine, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ssl
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import httpx

from paceline.core.encoding import Encoders
from paceline.core.inference import Inference
from paceline.machine.embedder import TextEncoder
from paceline.machine.encoders import LocalEncoders
from paceline.machine.models import Models
from paceline.server.app import create_app
from paceline.server.serve import bind, serve
from paceline.server.settings import ServerSettings, TlsFiles

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Inference)
BOUND_S = 100
"""Longest wait for anything a test waits for; reached only when it fails."""


class Served(Generic[Kind]):
    """A running server. Methods may be called from any other thread."""

    def __init__(
        self,
        inference: Kind,
        settings: ServerSettings | None = None,
        tls: TlsFiles | None = None,
        host: str = "127.0.0.1",
        encoder: TextEncoder | None = None,
        encoders: Encoders | None = None,
    ) -> None:
        self.inference = inference
        self.settings = settings or ServerSettings()
        self._encoders = LocalEncoders(encoder)
        self.app = create_app(inference, self.settings, encoders or self._encoders, inference if isinstance(inference, Models) else None)
        self._tls, self._host = tls, host
        self._up: concurrent.futures.Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()
        self.url, self.loop, self._stop = self._up.result(BOUND_S)
        verify = True if tls is None else ssl.create_default_context(cafile=tls.certificate)
        self.http = httpx.Client(
            base_url=self.url, timeout=BOUND_S, verify=verify, headers={"Content-Type": "application/json", **self.headers}
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.settings.api_key}"} if self.settings.api_key else {}

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, int(url.port or 0)

    def _run(self) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            await serve(
                self.app,
                self._host,
                bind(self._host, 0),
                stop=stop,
                on_ready=lambda url: self._up.set_result((url, loop, stop)),
                tls=self._tls,
            )

        try:
            asyncio.run(main())
        except BaseException as error:
            if not self._up.done():
                self._up.set_exception(error)
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND_S)

    def metric(self, name: str) -> float:
        """A value of /metrics, by its name (with labels as written there)."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
        assert len(lines) == 1, name
        return float(lines[0].rpartition(" ")[2])

    def begin_stop(self) -> None:
        """Tell the server to stop."""
        self.loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        """Wait for the server's thread."""
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.begin_stop()
        self.join()
        self._encoders.close()
