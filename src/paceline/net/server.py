"""The one gRPC port of a node: mTLS, every RPC checked by the guard, and an end that waits for answers under way, but not for long."""

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
    """Counts the RPCs a server answers, by method and outcome. Its first interceptor: what others refuse counts too."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        """By method (Service/Method). Only methods that exist count, so a peer can't make up names."""
        self.failed: Counter[str] = Counter()
        """Refused, cancelled or broken."""
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
"""Open at once, of members and of strangers whose handshake is under way. Raising it: what strangers can make a node hold, 70 KB each until
`grpc.server_handshake_timeout_ms`; lowering it: strangers who open so many keep members out."""
IDLE_S = 300
"""Without any call, until the server takes leave; the next call dials anew."""
AGE_S = 3600
"""Until calls go by a new connection, whose certificate is looked at again."""
KIB = 1 << 10
MAX_REQUEST_BYTES = 2112 * KIB
"""Largest message that gRPC gathers before this code sees it. It is a little more than any method takes, so a message that is too long for its method
gets a typed error. Raising it: a caller makes this node hold more with messages that it never finishes (`handlers.MOST_READS`)."""

MAX_STREAMS = 128
"""RPCs of one connection at once. Raising it: messages that a peer may have begun and not ended. More than the answers that a node may have here
at once (`engine.config.SHARES`), so that one more is refused in words and does not wait for a place."""
SERVER_OPTIONS: Options = [
    *(option for option in COMMON if option[0] != RECEIVE),
    (RECEIVE, MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
    ("grpc.keepalive_permit_without_calls", 1),  # else a connection without calls outlives a machine that lost its power
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.http2.bdp_probe", 0),  # it would widen the window of calls that nothing reads yet to megabytes
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_connection_idle_ms", IDLE_S * 1000),
    ("grpc.max_connection_age_ms", AGE_S * 1000),  # calls under way go on
]


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a node's port, and what is read of a request of each of its methods at most: a message takes 35 times its size once
    it is parsed, on the event loop.
    """

    register: Callable[[grpc.aio.Server], None]
    limits: Mapping[str, Limit]
    """By Service/Method, with the least trust of a caller. A method without one is not answered."""


def secure_port(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    """Have a server listen at an address of this machine, or, where `host` is empty, at all of them. Returns the port; 0: it can't be had."""
    for address in (host,) if host else ("::", "0.0.0.0"):  # noqa: S104  the second where there is no IPv6
        with suppress(RuntimeError):
            if bound := server.add_secure_port(join_host(address, port), credentials):
                return bound
    return 0


class NodeServer:
    """A server that was not started yet, or runs."""

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
        """Before `start`."""
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
        """Take no new calls, and end those under way after `grace_s` at the latest."""
        await self._server.stop(grace_s)
