"""Keeps the join port: open while a token lives, closed otherwise.

`paceline up` runs one for as long as it runs, and `paceline token` does where no `up` does; a lock in the fleet's folder says which. The
process that runs it notices within a second what other processes wrote there: a new token opens the port, a revocation is passed on.

JoinService on the wire: hands a join request to the issuer, and says in the log who came and who was refused.
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
"""Joins that are decided at a time; others wait. Each holds the folder's lock."""
Context = grpc.aio.ServicerContext[wire.JoinRequest, Awaitable[wire.JoinResponse]]


def _claimed(attempt: JoinAttempt) -> str:
    try:
        return open_request(attempt.request)[0]
    except NotTrusted:
        return "nobody in particular"


LOOK_S = 1.0
"""How often files are looked at."""
MAX_JOIN_BYTES = 16 << 10
MAX_CONNECTIONS = 3072
"""Any machine may open one before it has shown that it was invited. Raising it: what strangers can make this process hold, 70 KB each for `CONNECTION_S`;
lowering it: strangers who open so many keep newcomers out."""
MAX_STREAMS = 2
"""Calls on one connection; a joiner makes one."""
CONNECTION_S = 30
"""No machine has business here for longer."""
SILENT_S = 10
"""Seconds for a handshake, and without a call."""
LAST_CALLS_S = 5
NEW_KEY_S = 86400.0
"""So long the port shows one certificate; then it is opened anew."""
GRACE_S = 2.0
"""What a join under way is given when the port closes."""


class JoinHost(JoinServiceServicer):
    """The join port of one process: keeps it, and lets machines in.

    Args:
        folder: the fleet's folder, which holds the CA.
        clock: whose wall time rules expiry.
        peers: addresses (host:port) of members, for newcomers.
        host: where to listen; empty: everywhere.
        on_joined: told the id of each machine that came.
        here: ids of members as far as they are known.
        on_revocations: given all revocations on disk whenever a file changed.
        look_s: how often files are looked at.

    Raises:
        MembershipError: the CA is not on this machine.
        IdentityError: its files can't be used.
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
        """Whether the port is."""
        return self._server is not None

    def claim(self) -> bool:
        """Become the one process that keeps the port; False where another does.

        Raises:
            MembershipError: the folder can't be written.
        """
        if self._lock is None:
            self._lock = self._folder.hold(self._folder.host_lock_file)
        return self._lock is not None

    async def run(self) -> None:
        """Keep the port until cancelled; a port that is taken, or another keeper, is waited for."""
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
                        logger.warning("nobody can join: %s", error)
                    self._trouble = str(error)
                await asyncio.sleep(self._look_s)
        finally:
            await self.close()

    async def refresh(self) -> None:
        """Open or close the port as tokens have it, and pass on what is new.

        Raises:
            MembershipError: the port is taken.
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
        """Close the port and let another keep it."""
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
            # Signing and waiting for the disk are not for the event loop.
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
            # No bound on calls at once: a machine that begins some and never sends them would keep all others out.
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
