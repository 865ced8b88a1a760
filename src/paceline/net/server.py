"""The one gRPC port of a node: mTLS, a guard that checks every RPC, and a stop that waits for open calls, but not for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from paceline.core.errors import ConfigError
from paceline.fleet.eligibility import TrustPolicy
from paceline.net.channels import COMMON, RECEIVE, Options
from paceline.net.trust.certificates import join_host
from paceline.net.trust.credentials import server_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Admission, Behaviour, Context, Continuation, Handler, Limit, WellFormed, rewrap
from paceline.net.trust.identity import Identity


class RpcMeter(grpc.aio.ServerInterceptor):
    """Counter of the RPCs that a server answers, by method and outcome. It is the first interceptor, so that it counts what the others refuse."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        """Answered RPCs by method (Service/Method). Only methods that exist count, so a peer can't make up names."""
        self.failed: Counter[str] = Counter()
        """RPCs that were refused, cancelled or broken, by method."""
        self.open: Counter[str] = Counter()

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method = handler_call_details.method.rpartition(".")[2]
        return rewrap(await continuation(handler_call_details), lambda behaviour: self._counted(behaviour, method))

    def _counted(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def counted(request: Any, context: Context) -> Any:
            self.open[method] += 1
            try:
                answer = await behaviour(request, context)
            except BaseException:
                self.failed[method] += 1
                raise
            finally:
                self.open[method] -= 1
            self.answered[method] += 1
            return answer

        return counted


MAX_CONNECTIONS = 3072
"""Open connections of members and of callers still in their handshake. Raising it: unauthenticated callers can make a node hold more, 70 KB each until
`grpc.server_handshake_timeout_ms`; lowering it: fewer such callers suffice to keep members out."""
IDLE_S = 300
"""Seconds without any call until the server closes a connection; the next call dials again. Raising it: idle connections hold memory longer; lowering
it: more calls begin with a handshake."""
AGE_S = 3600
"""Seconds until new calls need a new connection. Raising it: after a renewal, a connection shows its old certificate longer; lowering it: more handshakes."""
KIB = 1 << 10
MAX_REQUEST_BYTES = 3008 * KIB
"""Largest message that gRPC gathers before this code sees it. It is a little more than any method takes, so a message that is too long for its method
gets a typed error. Raising it: a caller can make this node hold more by messages that it never finishes (`handlers.MOST_READS`)."""

MAX_STREAMS = 128
"""Open RPCs of one connection. Raising it: a peer can hold more unfinished messages. The number exceeds the answers that a node may have here at once
(`engine.config.SHARES`), so that one more gets a worded refusal and does not wait for a place."""
SERVER_OPTIONS: Options = [
    *(option for option in COMMON if option[0] != RECEIVE),
    (RECEIVE, MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
    ("grpc.keepalive_permit_without_calls", 1),  # otherwise a connection without calls outlives a machine that lost its power
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.http2.bdp_probe", 0),  # the probe would widen the window of calls that no handler reads yet to megabytes
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_connection_idle_ms", IDLE_S * 1000),
    ("grpc.max_connection_age_ms", AGE_S * 1000),  # open calls go on
]


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a node's port, and bounds on the requests of its methods. A message takes 35 times its size once it is parsed, and it is
    parsed on the event loop.
    """

    register: Callable[[grpc.aio.Server], None]
    limits: Mapping[str, Limit]
    """Bounds by Service/Method, with the least trust of a caller. A method without an entry is not answered."""


def secure_port(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    """Make a server listen at one address of this machine, or at all of them if `host` is empty. Returns: the port; 0 if the port can't be bound."""
    for address in (host,) if host else ("::", "0.0.0.0"):  # noqa: S104  the second where there is no IPv6
        with suppress(RuntimeError):
            if bound := server.add_secure_port(join_host(address, port), credentials):
                return bound
    return 0


class NodeServer:
    """The gRPC server of a node."""

    def __init__(
        self,
        identity: Identity,
        guard: PeerGuard,
        meter: RpcMeter,
        policy: TrustPolicy,
        options: Options = SERVER_OPTIONS,
    ) -> None:
        self._identity = identity
        self._limits: dict[str, Limit] = {}
        self._server = grpc.aio.server(
            interceptors=[meter, guard, WellFormed(guard.refusals, self._limits, Admission(guard.peer, policy))], options=options
        )

    def add(self, *services: Service) -> None:
        """Add services. Call it before `start`."""
        for service in services:
            service.register(self._server)
            self._limits |= {f"/paceline.v1.{method}": limit for method, limit in service.limits.items()}
        assert all(limit.nbytes < MAX_REQUEST_BYTES for limit in self._limits.values()), "gRPC gathers no more of a message"

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Args:
            host: an address of this machine; empty: all of them, IPv4 and IPv6.
            port: 0 for any free one.

        Raises:
            ConfigError: the address can't be used.
        """
        bound = secure_port(self._server, host, port, server_credentials(self._identity))
        if not bound:
            raise ConfigError(
                f"Cannot listen on {join_host(host or '::', port)} for the fleet",
                "Stop what listens there, or choose another --fleet-port or --fleet-host.",
            )
        await self._server.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and end open ones after `grace_s` seconds at the latest."""
        await self._server.stop(grace_s)
