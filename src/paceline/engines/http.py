"""HTTP to engines of other makers: the one layer that all adapters share.

Laws:
- Every wait has a bound. While an answer is silent, the engine is asked whether it lives; if it does not, the answer ends.
- Errors of the HTTP library, broken bytes and unknown shapes become `EngineGone`.
- An engine's key is sent to its door and nowhere else: redirects are not followed, and no message repeats what contains it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp.abc import ResolveResult

from paceline.core.errors import ConfigError, EngineGone, PacelineError
from paceline.core.via import VIA_HEADER, write_via
from paceline.engines.addresses import are_at_home
from paceline.engines.contract import Door
from paceline.engines.patience import EnginePatience
from paceline.engines.refusals import refusal_of
from paceline.engines.stream import MAX_EVENT_BYTES, Refusal, Stream

MAX_JSON_BYTES: Final = 16 << 20
"""Maximum size of an answer. Raising it: a broken engine can fill more memory; lists of hundreds of models take 1 MiB."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An engine's whole answer to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body. None if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


def place_of(door: Door) -> str:
    """Return a door's address for messages, without a password."""
    parts = urlsplit(door.url)
    return str(door.socket) if door.socket is not None else f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class _LeavesHome(OSError):
    """A name at home means an address outside of the home network now."""


class _HomeResolver(aiohttp.ThreadedResolver):
    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        at_home = [each for each in found if are_at_home([each["host"]])]  # routers give names an address of the internet too
        if not at_home:
            raise _LeavesHome(f"{host} is outside of the home network")
        return at_home


class _OwnConnector(aiohttp.TCPConnector):
    """Connects to an engine that this node started, and to nothing else that has its port.

    Looking after the connection was made leaves no gap: if the engine listens then, it listened all the time.
    """

    def __init__(self, is_held: Callable[[], bool], gone: EngineGone) -> None:
        super().__init__(limit=0, force_close=True)
        self._is_held, self._gone = is_held, gone

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:  # noqa: ASYNC109 - aiohttp calls it so
        await self._check()
        connection = await super().connect(req, traces, timeout)
        try:
            await self._check()
        except BaseException:
            connection.close()
            raise
        return connection

    async def _check(self) -> None:
        if not await asyncio.to_thread(self._is_held):
            raise EngineGone(self._gone.message, self._gone.hint)


class Http:
    """Requests to one engine. One event loop uses it."""

    def __init__(self, door: Door, name: str, patience: EnginePatience) -> None:
        """Open no connection yet.

        Args:
            name: the engine's name in messages.

        Raises:
            ConfigError: the key can't stand in a header.
        """
        if not (door.api_key.isascii() and door.api_key.isprintable()):
            raise ConfigError(
                "An engine's key has characters that no HTTP header takes", "Copy the key again: letters, digits and signs only."
            )
        self.door, self.name, self.patience = door, name, patience
        self.place = place_of(door)
        """The address in messages."""
        self._session: aiohttp.ClientSession | None = None

    async def move(self, door: Door) -> None:
        """Send requests to another door from now on. Running ones end."""
        self.door, self.place = door, place_of(door)
        await self.close()

    def gone(self, what: str, hint: str = "") -> EngineGone:
        """Return an error that says what the engine did."""
        return EngineGone(f"{self.name} at {self.place} {what}", hint)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        wait_s: float | None = None,
        max_bytes: int = MAX_JSON_BYTES,
        via: tuple[str, ...] = (),
    ) -> HttpReply:
        """Send a request and return the answer, whatever its status.

        Args:
            wait_s: maximum seconds for all of it. None: `EnginePatience.answer_s`.
            via: see `Ask.via`.

        Raises:
            EngineGone: no answer in time, or one that is not HTTP, or is longer than `max_bytes`.
        """
        wait_s = self.patience.answer_s if wait_s is None else wait_s
        try:
            async with asyncio.timeout(wait_s), self._request(method, path, body, via) as response:
                whole = bytearray()
                async for part in response.content.iter_any():
                    whole += part
                    if len(whole) > max_bytes:
                        response.close()
                        raise self.gone(f"sent more than {max_bytes >> 20} MiB in answer to {path}")
                return HttpReply(response.status, response.headers, bytes(whole))
        except aiohttp.ClientError as error:
            raise self._broken(error) from None
        except TimeoutError:
            raise self.gone(f"did not answer {path} within {wait_s:g} s", "Restart it if it hangs.") from None
        except (OSError, ValueError) as error:
            raise self._broken(error) from None

    async def get(self, path: str, *, wait_s: float | None = None) -> dict[str, Any]:
        """Return the JSON object at a path.

        Raises:
            EngineGone: as `ask`, or the answer is not an object.
            PacelineError: the engine refuses; see `refusals`.
        """
        return self._object(await self.ask("GET", path, wait_s=wait_s), path)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        wait_s: float | None = None,
        max_bytes: int = MAX_JSON_BYTES,
        refusal: Refusal | None = None,
        via: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Send an object and return the one that answers it. Raises as `get`."""
        return self._object(await self.ask("POST", path, body, wait_s=wait_s, max_bytes=max_bytes, via=via), path, refusal)

    def refused(self, status: int, body: Any, retry_after: str = "", refusal: Refusal | None = None) -> PacelineError:
        """Return the error that a refusal stands for. `body` is its JSON, or None."""
        return refusal_of(f"{self.name} at {self.place}", self.door.api_key, status, body, retry_after, refusal)

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        explain: Callable[[], Awaitable[None]],
        *,
        verify: Callable[[], Coroutine[Any, Any, None]] | None = None,
        lines: bool = False,
        refusal: Refusal | None = None,
        via: tuple[str, ...] = (),
    ) -> AsyncGenerator[Stream]:
        """Send a request and read its events. Leaving the block ends the request at the engine.

        Args:
            explain: called while the answer is silent. It raises an error if the engine does not live, or does not work on the request.
            verify: runs at the same time. `Stream.begin` waits for it and raises its error.
            lines: each line is an object, instead of server-sent events.
            via: see `Ask.via`.

        Raises:
            EngineGone, PacelineError: as `post`.
        """
        sent = asyncio.ensure_future(self._sent("POST", path, body, via))
        verified = None if verify is None else asyncio.ensure_future(verify())
        try:
            async with self._opened(sent, explain, refusal) as response:
                stream = Stream(self, response, explain, verified, b"\n" if lines else b"\n\n", refusal)
                watched = asyncio.ensure_future(stream.watch())
                try:
                    yield stream
                finally:
                    watched.cancel()
        finally:
            if verified is not None and not verified.cancel() and not verified.cancelled():
                verified.exception()  # seen, so that the event loop does not report it

    @asynccontextmanager
    async def _opened(
        self, sent: asyncio.Future[aiohttp.ClientResponse], explain: Callable[[], Awaitable[None]], refusal: Refusal | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Wait for the answer to begin, and close it at the end of the block."""
        try:
            await self._begun(sent, explain)
            response = sent.result()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._broken(error) from None
        finally:
            sent.cancel()
        try:
            if response.status != 200:
                raise self.refused(response.status, await self._refusal(response), response.headers.get("Retry-After", ""), refusal)
            yield response
        finally:
            response.close()

    async def _sent(self, method: str, path: str, body: Any, via: tuple[str, ...]) -> aiohttp.ClientResponse:
        return await self._request(method, path, body, via)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Any:
        """Return the JSON of a refusal, or None."""
        try:
            async with asyncio.timeout(self.patience.answer_s):
                return HttpReply(response.status, response.headers, await response.content.read(MAX_JSON_BYTES)).json
        except (aiohttp.ClientError, OSError):
            return None

    async def _begun(self, sent: asyncio.Future[aiohttp.ClientResponse], explain: Callable[[], Awaitable[None]]) -> None:
        """Wait for an answer to begin. An engine with a queue, or one that reads the prompt first, may take long."""
        patience = self.patience
        asked_s = asyncio.get_running_loop().time()
        while not (await asyncio.wait((sent,), timeout=patience.quiet_s))[0]:
            if asyncio.get_running_loop().time() - asked_s > patience.first_token_s:
                raise self.gone(f"did not begin its answer within {patience.first_token_s:g} s")
            await explain()

    def _object(self, reply: HttpReply, path: str, refusal: Refusal | None = None) -> dict[str, Any]:
        found = reply.json
        if reply.status != 200:
            raise self.refused(reply.status, found, reply.headers.get("Retry-After", ""), refusal)
        if not isinstance(found, dict):
            raise self.gone(f"did not answer {path} with a JSON object")
        if found.keys() == {"error"}:  # LM Studio's answer to a page that it does not have
            raise self.refused(404, found, refusal=refusal)
        return found

    def _request(self, method: str, path: str, body: Any = None, via: tuple[str, ...] = ()) -> Any:
        """Return aiohttp's request: awaitable, and a context manager."""
        headers = {VIA_HEADER: write_via(via)} if via else None
        if self._session is None:
            self._session = self._open()
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        return self._session.request(method, self.door.url.rstrip("/") + path, data=data, headers=headers, allow_redirects=False)

    def _open(self) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.door.api_key:
            headers["Authorization"] = f"Bearer {self.door.api_key}"
        # Each request has its own connection: llama-server closes idle ones after 5 s and others after 100 requests, and a request may meet one.
        connector: aiohttp.BaseConnector
        if self.door.socket is not None:
            connector = aiohttp.UnixConnector(str(self.door.socket), limit=0, force_close=True)
        elif self.door.is_held is not None:
            connector = _OwnConnector(self.door.is_held, self.gone("does not run now", "It is started again; see its log for the cause."))
        else:
            resolver = None if self.door.may_leave else _HomeResolver()
            connector = aiohttp.TCPConnector(limit=0, force_close=True, resolver=resolver, use_dns_cache=False)
        return aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.patience.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=MAX_EVENT_BYTES >> 4,
        )

    def _broken(self, error: Exception) -> EngineGone:
        """Return the error for one of the HTTP library, whose own words name no cause that a person knows."""
        if isinstance(error, aiohttp.ClientSSLError):
            return self.gone(
                "has a certificate that this machine does not trust", "Check the address, or add its authority to this machine's."
            )
        if isinstance(error.__cause__, _LeavesHome):
            return self.gone("has an address outside of your network now", "Share it again, which marks it, or use its address at home.")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError | ConnectionRefusedError):
            return self.gone("can't be reached", "Start it, or take it off the list of engines.")
        if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | aiohttp.ClientOSError | OSError):
            return self.gone("broke off its answer", "See its own log for the cause.")
        return self.gone("does not speak HTTP as it should", "Check the address and the port.")
