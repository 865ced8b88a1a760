"""Opens a tensor stream to a node of the fleet, and to no other: who answers must hold exactly that node's certificate."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence

from paceline.core.errors import NodeUnreachable
from paceline.net.tensor.pipe import Pipe, tune
from paceline.net.tensor.sender import TensorSender
from paceline.net.trust.certificates import Member
from paceline.net.trust.credentials import check_callable, client_context
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import Voids

ADDRESS_S = 3.0
"""One address may take so long, where there are others to try."""


def dial(addresses: Sequence[str], member: Member, ticket: bytes, identity: Identity, voids: Voids, deadline: float) -> TensorSender:
    """A stream to `member`, whose session gave out `ticket`. Blocks.

    Args:
        addresses: host:port, the likeliest first.
        ticket: what its session gave out. Good for one stream.
        deadline: on the monotonic clock.

    Raises:
        RevokedNode: `member` was revoked.
        NodeUnreachable: it answers at none of its addresses.
        TensorStreamError: it answers, and does not take the ticket.
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
        # It is the right node, so what it says of the ticket is final.
        sender.greet(ticket, deadline)
        return sender
    tried = "; ".join(reasons) or "no time was left" if addresses else "it has no addresses"
    raise NodeUnreachable(f"{member.node_id} can't be reached for activations ({tried})")


def _connect(address: str, member: Member, context: ssl.SSLContext, until: float) -> ssl.SSLSocket:
    """Raises what `socket` and `ssl` raise."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.001, until - time.perf_counter()))
    try:
        tune(sock)
        sock.settimeout(max(0.001, until - time.perf_counter()))
        return context.wrap_socket(sock, server_hostname=member.tls_name)
    except BaseException:
        sock.close()
        raise
