"""Runs an application on a socket until told to stop, and then ends within two seconds, whatever its clients do.

The caller owns signals: uvicorn's handlers are left out, `stop` is an event. Law of `Acceptor`: no more than `max_connections` are open, those of
unfinished TLS handshakes among them. Where they are all taken, a new connection gets the place of one that waits for no answer, of the network that has
the most; only a connection of that network itself is refused. So a client that holds them all keeps no other out.

Where HTTPS is asked for without a certificate, this machine makes one of its own, for its names and addresses, and keeps it. A node's can't be used: it
names no address, so no client of the API would take it, and its CA is the fleet's, which should vouch for nodes alone. This one vouches for itself: a client
is given the file, and then trusts this machine and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import ifaddr
import uvicorn

from paceline.core.background import end_tasks
from paceline.core.errors import ConfigError
from paceline.core.files import WRITABLE_HINT, write_file
from paceline.core.ports import hold_port, listen_on
from paceline.server.app import service_of
from paceline.server.application import Application
from paceline.server.faults import overloaded
from paceline.server.guard import network_of
from paceline.server.protocol import BoundedProtocol, bounded_protocol, whole_answer
from paceline.server.settings import ServerSettings, TlsFiles, check_bind
from paceline.store.home import Home

logger = logging.getLogger(__name__)

BUSY_RETRY_S = 2
OPENED_S = 0.3
"""How long a stop waits for handshakes. Raising it: slower ones get an answer, and a stop takes longer."""
AGAIN_S = 1.0
"""After the system had no connection to give: this process has too many files open. Raising it: clients wait longer once some are closed."""


class _Client:
    """One connection."""

    def __init__(self, network: str) -> None:
        self.network = network
        self.opening: asyncio.Task[None] | None = None
        self.protocol: BoundedProtocol | None = None
        """Its transport owns the socket."""

    @property
    def is_open(self) -> bool:
        """Its handshake is over, and a request may have come. From then on the protocol alone ends it: a cancelled opening closes the socket unsaid."""
        return self.protocol is not None and self.protocol.is_connected

    def drop(self) -> None:
        if self.opening is not None and not self.is_open:
            self.opening.cancel()
        elif self.protocol is not None:
            self.protocol.transport.abort()


class Acceptor:
    """Accepts the connections of one listening socket.

    Args:
        make: makes a connection's protocol from a function that the protocol calls once the connection is gone.
        context: None: connections are plain.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[Callable[[], None]], BoundedProtocol],
        bounds: ServerSettings,
        context: ssl.SSLContext | None,
    ) -> None:
        self._listening, self._make, self._bounds, self._context = listening, make, bounds, context
        self._clients: dict[_Client, None] = {}
        """Clients in the order of arrival."""
        self._of_network: Counter[str] = Counter()
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Accept from now on. On the event loop."""
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="accept")

    async def close(self) -> None:
        """Accept no more. What came before this is opened first, so that its requests are answered; a handshake that takes longer is ended."""
        await end_tasks(self._accepting)
        with suppress(OSError):  # none waits any more
            while True:  # closing the socket would reset those that the system has accepted for it
                connection, address = self._listening.accept()
                connection.setblocking(False)
                self._admit(connection, network_of(address[0]))
        self._listening.close()
        if openings := [client.opening for client in self._clients if client.opening is not None and not client.is_open]:
            await asyncio.wait(openings, timeout=OPENED_S)
        await end_tasks(*(client.opening for client in self._clients if not client.is_open))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("no connection could be accepted: %s", error.strerror)
                await asyncio.sleep(AGAIN_S)
                continue
            self._admit(connection, network_of(address[0]))

    def _admit(self, connection: socket.socket, network: str) -> None:
        if len(self._clients) >= self._bounds.max_connections and not self._make_room(network):
            self._refuse(connection)
            return
        client = _Client(network)
        self._clients[client] = None
        self._of_network[network] += 1
        client.opening = asyncio.create_task(self._open(client, connection))
        client.opening.add_done_callback(lambda _: self._opened(client, connection))

    def _make_room(self, network: str) -> bool:
        """Drop one of the network that has the most; False where that is the new client's own, or all of its are being answered."""
        largest, most = self._of_network.most_common(1)[0]
        if self._of_network[network] >= most:
            return False
        client = next(
            (client for client in self._clients if client.network == largest and not (client.protocol and client.protocol.is_answering)),
            None,
        )
        if client is None:
            return False
        self._leave(client)
        client.drop()
        return True

    def _refuse(self, connection: socket.socket) -> None:
        if self._context is None:
            with suppress(OSError):  # it is gone
                connection.send(whole_answer(overloaded("Too many connections. Try again in a moment.", BUSY_RETRY_S)))
        connection.close()

    async def _open(self, client: _Client, connection: socket.socket) -> None:
        def made() -> BoundedProtocol:
            client.protocol = self._make(lambda: self._leave(client))
            return client.protocol

        timeout_s = None if self._context is None else self._bounds.request_timeout_s
        with suppress(OSError):  # TLS refuses a connection without a handshake
            await asyncio.get_running_loop().connect_accepted_socket(made, connection, ssl=self._context, ssl_handshake_timeout=timeout_s)

    def _opened(self, client: _Client, connection: socket.socket) -> None:
        if client.protocol is None:  # told to end before it began
            connection.close()
        if not client.is_open:
            self._leave(client)

    def _leave(self, client: _Client) -> None:
        """Free the place of a client. Idempotent."""
        if client in self._clients:
            del self._clients[client]
            self._of_network[client.network] -= 1
            if not self._of_network[client.network]:
                del self._of_network[client.network]


BACKLOG = 2048
GRACE_S = 1
"""For clients to take the end of their streams at a stop."""


def bind(host: str, port: int) -> socket.socket:
    """Take the API's port, as `hold_port` does."""
    return hold_port(host or "0.0.0.0", port, "the API", "--port or --host")  # noqa: S104 - an empty host means all of IPv4


def url_of(host: str, held: socket.socket, tls: TlsFiles | None) -> str:
    """Return the base URL of an API on a port that `bind` took."""
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host or "0.0.0.0"  # noqa: S104 - shown, not bound
    return f"{'http' if tls is None else 'https'}://{shown}:{held.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Behind an acceptor of its own: uvicorn's bounds no handshake and shares no connections."""

    def __init__(self, config: uvicorn.Config, held: socket.socket, settings: ServerSettings, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._acceptor = Acceptor(held, self._protocol, settings, config.ssl)

    def _protocol(self, left: Callable[[], None]) -> BoundedProtocol:
        return cast("Any", self.config.http_protocol_class)(self.config, self.server_state, self.lifespan.state, left=left)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._acceptor.open()
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: Application,
    host: str,
    held: socket.socket,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Serve `app` (made by `create_app`) until `stop` is set.

    Args:
        host: an address of this machine.
        held: what `bind` took there.
        stop: set it on this event loop; every stream then ends with an error event, and `serve` returns in under 2 s.
        on_ready: called with the base URL once requests are accepted.
        tls: serve HTTPS with these; None: plain HTTP.

    Raises:
        ConfigError: the address is open to a network without an API key.
    """
    service = service_of(app)
    settings = service.settings
    check_bind(host, settings.api_key)
    context = None if tls is None else tls.context()
    listen_on(held, BACKLOG)
    url = url_of(host, held, tls)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # clients get the errors that they cause: a terminal is the wrong place for them
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # otherwise a client on this machine could claim another address
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.idle_timeout_s),
        timeout_graceful_shutdown=GRACE_S,
    )
    config.load()
    config.ssl = context
    server = _Server(config, held, settings, lambda: on_ready(url) if on_ready is not None else None)

    async def end() -> None:
        await stop.wait()
        service.stop()
        server.should_exit = True

    ending = asyncio.create_task(end())
    try:
        await server.serve(sockets=[])
    finally:
        await end_tasks(ending)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a client that does not read would hold it open
        held.close()


LASTS, RENEWED_BEFORE = timedelta(days=800), timedelta(days=30)
"""Apple's systems take no certificate that is good for more than 825 days."""
BACKDATED = timedelta(days=1)


def own_certificate(home: Home, hosts: Sequence[str], now: float) -> TlsFiles:
    """Return the certificate and its key. Makes new ones if there are none, or if the certificate ends soon or lacks one of the names.

    Args:
        hosts: names that clients use for this machine, in addition to its own.
        now: Unix seconds.

    Raises:
        ConfigError: the files can't be kept.
    """
    from cryptography import x509  # without --tls there is nothing to sign
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    files = TlsFiles(home.api / "cert.pem", home.api / "key.pem", own=True)
    names = sorted({*own_names(), *hosts})
    moment = datetime.fromtimestamp(now, UTC)
    if _is_good(files, names, moment):
        return files
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Paceline on {socket.gethostname()}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - BACKDATED)
        .not_valid_after(moment + LASTS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, names), *map(x509.IPAddress, own_addresses())]), critical=False)
        .sign(key, hashes.SHA256())
    )
    try:
        home.api.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), durable=True)
        write_file(files.certificate, certificate.public_bytes(Encoding.PEM), durable=True)
    except OSError as error:
        raise ConfigError(f"{home.api} can't be written: {error.strerror}", WRITABLE_HINT) from error
    return files


def own_names() -> set[str]:
    """Return the names of this machine."""
    name = socket.gethostname().lower().rstrip(".")
    plain = name.isascii() and bool(name)
    return {"localhost", *((name, f"{name.partition('.')[0]}.local") if plain else ())}


def own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of this machine, including loopback."""
    found = {ip.ip if isinstance(ip.ip, str) else ip.ip[0] for adapter in ifaddr.get_adapters() for ip in adapter.ips}
    return sorted({*map(ipaddress.ip_address, found | {"127.0.0.1", "::1"})}, key=lambda one: (one.version, one.packed))


def _is_good(files: TlsFiles, names: Sequence[str], now: datetime) -> bool:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        is_kept = files.key.is_file()
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    lasts = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - RENEWED_BEFORE
    return is_kept and lasts and set(names) <= set(held.get_values_for_type(x509.DNSName))
