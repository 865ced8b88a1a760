"""Dialling a tensor stream to one node of the fleet, and the handshake of callers. The node that answers must hold exactly the certificate of the node
that was meant.

A `Newcomer` is a caller that has not yet shown its certificate and its ticket: first the TLS handshake, then a hello. Its methods never block.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from ipaddress import ip_address

from paceline.core.errors import NodeUnreachable, StreamClosed, StreamCorrupt
from paceline.fleet.eligibility import Voids
from paceline.fleet.links import leads_here
from paceline.net.tensor.ends import TensorSender
from paceline.net.tensor.frames import CloseCode, Conversation, close
from paceline.net.tensor.incoming import FROM_SENDER, Hello, IncomingBytes
from paceline.net.tensor.pipe import Pipe, tune
from paceline.net.trust.certificates import Member, join_host
from paceline.net.trust.credentials import check_callable, client_context
from paceline.net.trust.identity import Identity

HELLO_BYTES = 1024
"""Bytes read from a peer that has not said hello. A hello is shorter, and no peer sends more before the welcome."""


class Wants(Enum):
    """Socket event that a newcomer waits for."""

    READ = auto()
    WRITE = auto()


class Newcomer:
    """A caller that has not finished its handshake and its hello.

    Args:
        sock: non-blocking; its handshake has not begun.
        host, port: where it calls from.
        until: on the monotonic clock; then it is turned away.
    """

    def __init__(self, sock: ssl.SSLSocket, host: str, port: int, until: float) -> None:
        self.sock, self.host, self.port, self.until = sock, host, port, until
        self.member: Member | None = None
        self.conversation = Conversation()
        self._incoming = IncomingBytes(self.conversation, FROM_SENDER, HELLO_BYTES)

    @property
    def who(self) -> str:
        """Node id that it proved; before that, the host of its address."""
        return self.member.node_id if self.member is not None else self.host

    def go_on(self, admit: Callable[[bytes], Member]) -> Wants | bytes:
        """Continue the handshake and the hello as far as the received bytes allow.

        Args:
            admit: returns the member that holds a certificate (DER); raises NotTrusted.

        Returns:
            The event it waits for, or the ticket that it brought.

        Raises:
            OSError: TLS turned it away, or it left.
            NotTrusted: it is not a node of the fleet, or was revoked.
            TensorStreamError: it sent something other than a hello.
        """
        try:
            if self.member is None:
                self.sock.do_handshake()
                self.member = admit(self.sock.getpeercert(binary_form=True) or b"")
            while (event := self._incoming.next()) is None:
                n = self.sock.recv_into(self._incoming.space())
                if not n:
                    raise StreamClosed("it left without a hello")
                self._incoming.filled(n)
        except ssl.SSLWantReadError:
            return Wants.READ
        except ssl.SSLWantWriteError:
            return Wants.WRITE
        if not isinstance(event, Hello):
            raise StreamClosed("it left without a hello")
        if not self._incoming.empty:
            raise StreamCorrupt("it went on before it was welcome")
        return event.ticket

    def turn_away(self, why: str = "") -> None:
        """Close the connection. A member gets the reason first."""
        if self.member is not None and why:
            with contextlib.suppress(OSError):
                self.sock.send(close(CloseCode.REFUSED, why))
        self.sock.close()


ADDRESS_S = 3.0
"""Seconds for one address while there are others to try. Raising it: a dead address delays the others longer; lowering it: a slow address is given up
too soon."""


def tensor_addresses(addresses: Iterable[str], port: int) -> tuple[str, ...]:
    """Return the addresses of a node's tensor streams: the hosts of `addresses`, in that order, with the port for tensors."""
    return tuple(dict.fromkeys(f"{address.rpartition(':')[0]}:{port}" for address in addresses))


def dial(addresses: Sequence[str], member: Member, ticket: bytes, identity: Identity, voids: Voids, deadline: float) -> TensorSender:
    """Open a stream to `member`. Blocks.

    Args:
        addresses: host:port, the likeliest first.
        member: the only node that is accepted at the other end.
        ticket: from the member's session. Good for one stream.
        deadline: on the monotonic clock.

    Raises:
        RevokedNode: `member` was revoked.
        NodeUnreachable: it answers at none of its addresses.
        TensorStreamError: it answers, and does not accept the ticket.
    """
    check_callable(member, voids)
    context = client_context(identity)
    reasons: list[str] = []
    for at, address in enumerate(addresses):
        now = time.perf_counter()
        if now >= deadline:
            break
        until = deadline if at == len(addresses) - 1 else min(deadline, now + ADDRESS_S)
        try:
            sock = _connect(address, member, context, until)
        except (OSError, ValueError) as error:
            reasons.append(f"{address}: {error}")
            continue
        sender = TensorSender(Pipe(sock, member.node_id))
        # The certificate is the right one, so this node's word on the ticket is final.
        sender.greet(ticket, deadline)
        return sender
    tried = "; ".join(reasons) or "no time was left" if addresses else "it has no addresses"
    raise NodeUnreachable(f"{member.node_id} can't be reached for activations ({tried})")


def _connect(address: str, member: Member, context: ssl.SSLContext, until: float) -> ssl.SSLSocket:
    """Connect to one address, TLS handshake included. Raises the errors of `socket` and `ssl`."""
    host, _, port = address.rpartition(":")
    sock = _reach(host.strip("[]"), int(port), until)
    try:
        tune(sock)
        sock.settimeout(max(0.001, until - time.perf_counter()))
        return context.wrap_socket(sock, server_hostname=member.tls_name)
    except BaseException:
        sock.close()
        raise


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _reach(host: str, port: int, until: float) -> socket.socket:
    """Connect to a host. Only `localhost` and numbers may lead to loopback: a name that another node gave must not.

    A name is looked up once, and its addresses are tried here. `socket.create_connection` would look it up again, and may find loopback then.
    """
    hosts = [host]
    if not (_is_number(host) or host.lower() == "localhost"):
        hosts = [str(where[0]) for *_, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if any(leads_here(join_host(each, port)) for each in hosts):
            raise OSError(f"{host} leads to this machine itself")
    *others, last = hosts
    for each in others:
        with contextlib.suppress(OSError):
            return socket.create_connection((each, port), timeout=max(0.001, min(ADDRESS_S, until - time.perf_counter())))
    return socket.create_connection((last, port), timeout=max(0.001, until - time.perf_counter()))
