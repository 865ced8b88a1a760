"""The outermost layer, plain ASGI: access checks, a limit on concurrent requests, and the log of answers.

/health needs no key: it only says whether work advances, and probes have no key. The page at / needs none either: it asks for it.
All other paths need the key, /metrics too (Prometheus can send one); the owner's paths need the owner's key. No path answers a web page that was
not allowed, because a browser sends requests for any page that is open in it. Headers that a page can't set tell pages apart: Host (the name that
the browser looked up, which its owner may have pointed at this machine), Origin and Sec-Fetch-Site (the origin of the page). A page is let in if its
origin is named in `ServerSettings.allow_origins`, or is this server's own. A body of a type that a page could send without asking first is not accepted
as JSON. A link to the page at / may be followed from anywhere: the other page can't read it, and can't put it into a frame.

Each answer has an X-Request-Id: the client's own, or one that is made here. The log has it too.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from uuid import uuid4

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import ConfigError
from paceline.server.faults import BAD_KEY, COMPRESSED, Fault, Refusal, api_of, overloaded
from paceline.server.fields import FITTED
from paceline.server.fields import HEADER as IGNORED
from paceline.server.metrics import REQUEST_ID, Meter
from paceline.server.paths import ANTHROPIC_PATHS, OLLAMA_PATHS
from paceline.server.settings import OWNER_HEADER, ServerSettings

Headers = dict[bytes, bytes]
EXPOSED = b", ".join([b"retry-after", REQUEST_ID, IGNORED.encode(), FITTED.encode()])
"""Headers of an answer that a page of a named origin may read."""
PREFLIGHT_S = 600
"""How long a browser may remember what it may send."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+")
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""Form of a request id from a client: it is written into answers and logs."""


def headers_of(scope: Scope) -> Headers:
    """Return the headers, by name. Values of several headers with one name are joined by a comma, as HTTP defines it."""
    headers: Headers = {}
    for name, value in scope["headers"]:
        headers[name] = headers[name] + b", " + value if name in headers else value
    return headers


def check_origin(text: str) -> str:
    """Return an origin that was given, as browsers write it.

    Raises:
        ConfigError: the text is not an origin.
    """
    origin = text.strip().lower().rstrip("/")
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(f"{text!r} is no origin of a web page", "Write it like https://chat.example.org or http://localhost:3000.")
    return origin


def check_host(text: str) -> str:
    """Return a name that was given for this machine, in lower case.

    Raises:
        ConfigError: the text is not a host name.
    """
    name = text.strip().lower()
    if not re.fullmatch(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?", name):
        raise ConfigError(f"{text!r} is no host name", "Write it without a scheme and without a port, like nas.local.")
    return name


def is_json(content_type: str) -> bool:
    """Return whether a body is declared as JSON. A page can't declare it so without asking first."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def is_undeclared(headers: Headers) -> bool:
    """Return whether a body without a type, or with curl's default type, comes from a program other than a browser.

    A page can send such a body without asking. Then the browser names the page's origin: by Origin, which `Pages` refuses before, or by Sec-Fetch-Site or
    Referer. An old browser may send none of them, but every browser's name begins with Mozilla, which no page can change.
    """
    declared = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if declared not in {b"", b"application/x-www-form-urlencoded"}:
        return False
    tells = {b"origin", b"referer"} & headers.keys() or any(name.startswith(b"sec-fetch-") for name in headers)
    return not tells and not headers.get(b"user-agent", b"").lower().startswith(b"mozilla/")


class Pages:
    """Decides which web pages may use the API."""

    def __init__(self, settings: ServerSettings) -> None:
        self._origins = frozenset(origin.encode() for origin in settings.allow_origins)
        self._hosts = frozenset({"localhost", *settings.allow_hosts})
        self._any_host = settings.api_key is not None  # a page that had its own name looked up here has no key

    def refusal(self, scope: Scope, headers: Headers) -> Fault | None:
        """Return the error for a request that is not let in; None if it is."""
        host = headers.get(b"host", b"")
        if not self._any_host and host and not self._is_own(host):
            return Fault(
                403,
                f"This server is not called {host.decode('latin-1')[:200]!r}. If it is, start it with --allow-host and that name.",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin")
        if origin is not None:
            foreign = origin not in self._origins and origin.partition(b"://")[2] != host
        else:
            foreign = headers.get(b"sec-fetch-site") in {b"cross-site", b"same-site"} and not _follows_link(scope, headers)
        if foreign:
            page = "another page" if origin is None else origin.decode("latin-1")[:200]
            return Fault(
                403,
                f"Web pages of {page} may not use this server. To let them, start it with --allow-origin and their origin.",
                code="origin_not_allowed",
            )
        return None

    def sharing(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return headers that let an allowed page read an answer; empty if the request comes from no allowed page."""
        origin = headers.get(b"origin")
        if not self._origins:
            return []
        named = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
        return [(b"vary", b"Origin"), *(named if origin in self._origins else [])]  # pyright: ignore[reportReturnType]

    def preflight(self, scope: Scope, headers: Headers) -> list[tuple[bytes, bytes]] | None:
        """Return the headers that answer an allowed page's question about what it may send; None: the request is not such a question."""
        wanted = headers.get(b"access-control-request-method")
        if scope["method"] != "OPTIONS" or wanted is None or headers.get(b"origin") not in self._origins:
            return None
        allowed = headers.get(b"access-control-request-headers", b"")
        told = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-max-age", str(PREFLIGHT_S).encode()),
            (b"vary", b"Access-Control-Request-Headers"),
        ]
        if _NAMES.fullmatch(allowed):
            told.append((b"access-control-allow-headers", allowed))
        if headers.get(b"access-control-request-private-network") == b"true":
            told.append((b"access-control-allow-private-network", b"true"))
        return told

    def _is_own(self, host: bytes) -> bool:
        """Return whether a Host header is this machine's: an address, which no page can have looked up, or a name that was given."""
        text = host.decode("latin-1").lower()
        name, _, _ = text.rpartition(":") if re.search(r":\d*$", text) and not text.endswith("]") else (text, "", "")
        try:
            ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
        except ValueError:
            return name in self._hosts
        return True


def _follows_link(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser opens the page at / in a tab, by a link on any page."""
    opens = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return opens and scope["method"] == "GET" and scope["path"] == "/"


def is_owner(headers: Headers, key: str | None) -> bool:
    """Return whether a request comes from the owner, the user that can read this process's note in the home."""
    return key is not None and _is_same(headers.get(OWNER_HEADER.encode(), b""), key)


def _is_same(sent: bytes, key: str) -> bool:
    """Compare keys in constant time. Wrong ones are not counted: a key has too many letters to be guessed (`settings.check_bind`)."""
    return hmac.compare_digest(sent, key.encode("ascii"))


def _sent(headers: Headers) -> bytes:
    """Return the key in a request: as OpenAI's clients send it, or as Anthropic's and Azure's do."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def network_of(host: str) -> str:
    """Return the network that counts as one client. For IPv6 it is the network of a household, which has addresses without end. An IPv4 address that came
    over a socket for both (as ::ffff:a.b.c.d) is treated as plain IPv4.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


OPEN_PATHS = frozenset({"/", "/health"})
OWNER_PATHS = "/owner/"
"""Beginning of those that ask for the owner's key, whatever other key a client has."""
KNOWN_PATHS = (
    frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/health", "/metrics"})
    | OLLAMA_PATHS
    | ANTHROPIC_PATHS
    | frozenset({"/tokenize", "/detokenize"})
)
BUSY_RETRY_S = 1


class Guard:
    """ASGI middleware: pages, key, concurrency, counts."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, meter: Meter) -> None:
        self._app = app
        self._meter = meter
        self._max_requests = settings.max_requests
        self._pages, self._key, self._owner_key = Pages(settings), settings.api_key, settings.owner_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        label = path if path in KNOWN_PATHS else "other"
        meter, headers = self._meter, headers_of(scope)
        shared = self._pages.sharing(headers)
        own = [(b"request-id", b"req_" + uuid4().hex.encode())] if path in ANTHROPIC_PATHS else []  # which its clients show
        said = headers.get(REQUEST_ID)
        request_id = said if said is not None and _REQUEST_ID.fullmatch(said) else b"req_" + uuid4().hex.encode()
        own.append((REQUEST_ID, request_id))
        has_key = self._has_key(headers) or is_owner(headers, self._owner_key)
        scope.setdefault("state", {}).update(request_id=request_id.decode(), has_key=has_key)
        begun = False

        def counted(message: Message) -> Awaitable[None]:
            nonlocal begun
            if not begun:
                begun = True
                meter.answers[label, message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *shared, *own]
            return send(message)

        meter.in_flight += 1
        try:
            answer = self._answer(scope, headers, path)
            if answer is not None:
                await answer(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception:
            if not begun:
                meter.answers[label, 500] += 1
            raise
        finally:
            meter.in_flight -= 1

    def _has_key(self, headers: Headers) -> bool:
        return self._key is None or _is_same(_sent(headers), self._key)

    def _answer(self, scope: Scope, headers: Headers, path: str) -> Response | None:
        """Return the answer of this layer; None: the application answers."""
        fault = self._pages.refusal(scope, headers)
        if fault is None and (told := self._pages.preflight(scope, headers)) is not None:
            answer = Response(status_code=204)
            answer.raw_headers += told
            return answer
        if fault is None and path.startswith(OWNER_PATHS):
            fault = None if is_owner(headers, self._owner_key) else BAD_KEY
        elif fault is None and path not in OPEN_PATHS:
            fault = None if self._has_key(headers) else BAD_KEY
            if fault is None and not _REQUEST_ID.fullmatch(headers.get(REQUEST_ID, b"-")):
                fault = Fault(400, "X-Request-Id: send 1 to 128 printable ASCII characters without blanks", code="invalid_request_id")
            if fault is None and self._meter.in_flight > self._max_requests:
                fault = overloaded(f"More than {self._max_requests} requests are in flight. Try again in a moment.", BUSY_RETRY_S)
        return None if fault is None else fault.response(api_of(path))


class BodyReader:
    """Reads request bodies within bounds: each one's length, and the memory of all that are being read or parsed."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.pending_bytes = 0
        """Bytes of bodies held now."""

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncGenerator[bytes, None]:
        """Read the request's body, charged to the budget while the context is open.

        Raises:
            Refusal: 413 for a body that is too long, 415 for a compressed one, 429 when all bodies together are too long.
            ClientDisconnect: the client went away before its end.
        """
        if any(name == b"content-encoding" and value.strip().lower() not in {b"", b"identity"} for name, value in scope["headers"]):
            raise Refusal(COMPRESSED)
        longest = self._settings.max_body_bytes
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > longest:
            raise Refusal(_too_long(longest))
        held = 0
        parts: list[bytes] = []
        try:
            while True:
                message: Message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part: bytes = message.get("body", b"")
                held += len(part)
                self.pending_bytes += len(part)
                if held > longest:
                    raise Refusal(_too_long(longest))
                if self.pending_bytes > self._settings.max_pending_body_bytes:
                    raise Refusal(overloaded("Too many large requests are arriving at once. Try again in a moment.", BUSY_RETRY_S))
                parts.append(part)
                if not message.get("more_body", False):
                    break
            yield parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self.pending_bytes -= held


def _too_long(longest: int) -> Fault:
    return Fault(413, f"The request body is longer than {longest} bytes. Send less.", code="request_too_large")
