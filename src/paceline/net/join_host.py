"""The join port: open while a token can be used, closed otherwise.

`paceline up` keeps it while it runs; `paceline token` does if no `up` runs. A lock in the fleet's folder decides between processes. The process with the
lock notices within a second what other processes wrote to the folder: a new token opens the port, a revocation is passed on.

JoinService hands each join request to the issuer. The log names each machine that joined or was refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import IO

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from paceline.core.clock import Clock
from paceline.core.errors import FleetError, JoinRefused, MembershipError, NotTrusted, UserError
from paceline.core.ids import NodeId
from paceline.fleet.card import SealedRevocation
from paceline.net.server import secure_port
from paceline.net.trust.certificates import key_pem, make_key, make_request, open_request
from paceline.net.trust.folder import FleetFolder, Stamp
from paceline.net.trust.handlers import WellFormed
from paceline.net.trust.issuer import Issuer, JoinAttempt
from paceline.net.trust.refusals import Refusals, remote_of
from paceline.net.trust.seals import open_revocations
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import JoinServiceServicer, add_JoinServiceServicer_to_server

logger = logging.getLogger(__name__)

HINT_KEY = "paceline-hint"
MAX_PEERS = 64
MAX_AT_ONCE = 4
"""Joins that are decided at a time; others wait. Each holds the folder's lock. Raising it: more threads wait for the lock at once."""
Context = grpc.aio.ServicerContext[wire.JoinRequest, Awaitable[wire.JoinResponse]]


def _claimed(attempt: JoinAttempt) -> str:
    try:
        return open_request(attempt.request)[0]
    except NotTrusted:
        return "nobody in particular"


LOOK_S = 1.0
"""Seconds between two looks at the files of the folder. Raising it: a new token opens the port later; lowering it: more reads of the disk."""
MAX_JOIN_BYTES = 16 << 10
MAX_CONNECTIONS = 3072
"""Connections at once. Any machine may open one before it has shown a token. Raising it: unknown machines can make this process hold more memory, 70 KB a
connection for `CONNECTION_S`; lowering it: fewer such connections are enough to keep new nodes out."""
MAX_STREAMS = 2
"""Calls at once on one connection; a joining node makes one."""
CONNECTION_S = 30
"""Seconds after which a connection is closed. Raising it: unknown machines can occupy connections for longer."""
SILENT_S = 10
"""Seconds that a handshake may take, and that a connection may stay without a call."""
LAST_CALLS_S = 5
NEW_KEY_S = 86400.0
"""Seconds for which the port shows one certificate. After that it is closed and opened again with a new one."""
GRACE_S = 2.0
"""Seconds that running joins get to finish when the port closes."""


class JoinHost(JoinServiceServicer):
    """The join port of one process, and the service that answers there.

    Args:
        folder: the fleet's folder, which holds the CA.
        clock: its wall time decides about expiry.
        peers: returns addresses (host:port) of members, which new nodes get.
        host: address to listen on; empty: all addresses.
        on_joined: called with the id of each node that joined.
        here: returns the known ids of members.
        on_revocations: called with all revocations on disk whenever a file changed.
        look_s: seconds between two looks at the files.

    Raises:
        MembershipError: the CA is not on this machine.
        IdentityError: the CA's files can't be used.
    """

    def __init__(
        self,
        folder: FleetFolder,
        clock: Clock,
        refusals: Refusals,
        *,
        peers: Callable[[], Iterable[str]] | None = None,
        host: str = "",
        on_joined: Callable[[str], None] | None = None,
        here: Callable[[], Iterable[NodeId]] = tuple,
        on_revocations: Callable[[tuple[SealedRevocation, ...]], None] | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        identity = folder.identity()
        self.issuer = Issuer(folder.served_authority(identity.root), folder, clock)
        self._folder, self._clock, self._refusals, self._host, self._look_s = folder, clock, refusals, host, look_s
        self._own, self._peers, self._here = identity.node_id, peers or folder.peers, here
        self._on_joined, self._on_revocations = on_joined, on_revocations
        self._deciding = asyncio.Semaphore(MAX_AT_ONCE)
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._opened_at = 0.0
        self._lock: IO[bytes] | None = None
        self._seen: Stamp | None = None
        self._trouble = ""

    @property
    def is_open(self) -> bool:
        """True if the port is open."""
        return self._server is not None

    def claim(self) -> bool:
        """Try to become the one process that keeps the port. Return False if another process keeps it.

        Raises:
            MembershipError: the folder can't be written.
        """
        if self._lock is None:
            self._lock = self._folder.hold(self._folder.host_lock_file)
        return self._lock is not None

    async def run(self) -> None:
        """Keep the port until cancelled. While the port is taken or another process keeps it, try again every `look_s` seconds."""
        try:
            while True:
                try:
                    if self.claim():
                        await self.refresh()
                    else:
                        self._pass_on_revocations()
                    self._trouble = ""
                except (UserError, FleetError) as error:
                    if str(error) != self._trouble:
                        logger.warning("no machine can join: %s", error)
                    self._trouble = str(error)
                await asyncio.sleep(self._look_s)
        finally:
            await self.close()

    async def refresh(self) -> None:
        """Open the port if a token can be used, close it if none can, and pass on new revocations.

        Raises:
            MembershipError: another program uses the port.
        """
        until, port = await asyncio.to_thread(lambda: (self.issuer.open_until(), self.issuer.join_port))
        if self._server is not None and until is not None and port != self._port:
            logger.info("join port %d closed: from now on it is %d", self._port, port)
            await self._shut()
        if self._server is not None and abs(self._clock.wall() - self._opened_at) >= NEW_KEY_S:
            await self._shut()
        if until is not None and self._server is None:
            await self._open(port)
        elif until is None and self._server is not None:
            logger.info("join port closed: no token is left that could be used")
            await self._shut()
        self._pass_on_revocations()

    async def close(self) -> None:
        """Close the port and release the lock, so that another process may keep it."""
        try:
            await self._shut()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    # ------------------------------------------------------------------------------------------------------------ for newcomers

    async def Join(self, request: wire.JoinRequest, context: Context) -> wire.JoinResponse:
        attempt = JoinAttempt(request.certificate_request, request.token_id, request.proof, request.nonce, request.protocol)
        try:
            # Signing and waiting for the disk would block the event loop.
            async with self._deciding:
                node_id, certificate = await asyncio.to_thread(self.issuer.admit, attempt, {self._own, *self._here()})
            revocations = await asyncio.to_thread(self._folder.sealed_revocations)
        except (JoinRefused, NotTrusted) as error:
            host, port = remote_of(context.peer())
            self._refusals.note(host, f"{error.message} (a join as {_claimed(attempt)})", at=f"port {port}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.message, ((HINT_KEY, error.hint),))
        except (UserError, FleetError) as error:
            logger.error("could not let %s in: %s", _claimed(attempt), error)  # noqa: TRY400 - it says all there is
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "The machine that issues certificates has trouble of its own: see its log"
            )
        logger.info("%s joined from %s", node_id, context.peer())
        if self._on_joined is not None:
            self._on_joined(node_id)
        return wire.JoinResponse(
            certificate=certificate,
            ca_certificate=self.issuer.authority.root.der,
            peer_addresses=list(dict.fromkeys(self._peers()))[:MAX_PEERS],
            revocations=[wire.SignedRevocation.FromString(one) for one in revocations],
        )

    # ------------------------------------------------------------------------------------------------------------------ inside

    async def _open(self, port: int) -> None:
        server = grpc.aio.server(
            interceptors=[WellFormed(self._refusals)],
            options=(
                ("grpc.max_receive_message_length", MAX_JOIN_BYTES),
                ("grpc.max_metadata_size", 8 << 10),
                ("grpc.so_reuseport", 0),
                ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.server_handshake_timeout_ms", SILENT_S * 1000),
                ("grpc.max_connection_idle_ms", SILENT_S * 1000),
                ("grpc.max_connection_age_ms", CONNECTION_S * 1000),
                ("grpc.max_connection_age_grace_ms", LAST_CALLS_S * 1000),
            ),
            # Calls at once have no bound: a machine that opens calls and sends nothing on them would keep all others out.
        )
        add_JoinServiceServicer_to_server(self, server)
        key = make_key()
        request = make_request(key, NodeId("join"))
        shown = await asyncio.to_thread(self.issuer.authority.issue_to_join_port, request, self._clock.wall())
        pem = x509.load_der_x509_certificate(shown).public_bytes(Encoding.PEM)
        credentials = grpc.ssl_server_credentials([(key_pem(key), pem)])
        if not secure_port(server, self._host, port, credentials):
            await server.stop(None)
            raise MembershipError(
                f"The join port {port} can't be opened: something else on this machine uses it",
                "End that (another fleet's node?), or take another port: paceline token --join-port PORT",
            )
        await server.start()
        self._server, self._port, self._opened_at = server, port, self._clock.wall()
        logger.info("join port %d open", port)

    async def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(GRACE_S)

    def _pass_on_revocations(self) -> None:
        seen = self._folder.stamp()
        if seen != self._seen:
            self._seen = seen
            if self._on_revocations is not None:
                self._on_revocations(open_revocations(self._folder.sealed_revocations(), self.issuer.authority.root))
