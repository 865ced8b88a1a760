"""The one port of a node where activations arrive. A peer with a ticket from a session is handed to that session; every other connection is closed.

One thread accepts callers, shakes hands and reads hellos, of all callers at the same time and for a bounded time each. The number of callers without
a hello is bounded. When one more comes, the oldest caller of the busiest host is closed. So a flood of silent callers costs little and keeps no
member out. The log names what is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from paceline.core.clock import Clock
from paceline.core.errors import NotTrusted, RevokedNode, StreamClosed, StreamStalled, TensorStreamError
from paceline.core.ids import NodeId
from paceline.core.ports import hold_port, listen_on
from paceline.fleet.eligibility import Voids
from paceline.net.tensor.dialling import Newcomer, Wants
from paceline.net.tensor.ends import TensorReceiver
from paceline.net.tensor.frames import TICKET_BYTES, WELCOME, CloseCode, Event
from paceline.net.tensor.incoming import FROM_SENDER, IncomingBytes
from paceline.net.tensor.pipe import Pipe, tune
from paceline.net.trust.certificates import FleetRoot, Member
from paceline.net.trust.credentials import server_context
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals


class ExpectedStream:
    """Stream that a session waits for. Made by the listener.

    Args:
        ticket: the ticket that a peer must bring.
        forget: called, in any thread, when the ticket becomes invalid.
    """

    def __init__(self, ticket: bytes, forget: Callable[[ExpectedStream], None]) -> None:
        self.ticket, self._forget = ticket, forget
        self._changed = threading.Condition()
        self._receiver: TensorReceiver | None = None
        self._over = False

    def wait(self, deadline: float) -> TensorReceiver:
        """Wait until a peer brings the ticket, and return its stream. The caller owns the stream then.

        Args:
            deadline: on the monotonic clock.

        Raises:
            StreamStalled: no peer came before `deadline`. Waiting again is possible.
            StreamClosed: the wait was cancelled, the listener closed, or the peer that came was revoked.
        """
        with self._changed:
            while self._receiver is None and not self._over:
                if not self._changed.wait(max(0.0, deadline - time.perf_counter())):
                    raise StreamStalled("No node opened the expected tensor stream in time")
            receiver, self._receiver, self._over = self._receiver, None, True
        if receiver is None:
            raise StreamClosed("The tensor stream that was waited for will not come")
        return receiver

    def cancel(self) -> None:
        """Make the ticket invalid. A stream that was not fetched is closed."""
        self._forget(self)
        with self._changed:
            receiver, self._receiver, self._over = self._receiver, None, True
            self._changed.notify_all()
        if receiver is not None:
            receiver.close()

    def deliver(self, receiver: TensorReceiver) -> bool:
        """Hand over the stream. Called by the listener. Returns: False if no session waits any more."""
        with self._changed:
            if self._over:
                return False
            self._receiver = receiver
            self._changed.notify_all()
            return True


TENSOR_OPTIONS = "--tensor-port or --fleet-host"
BACKLOG = 128
MAX_NEWCOMERS = 64
HELLO_S = 5.0
JOIN_S = 5.0
FULL_S = 0.1
"""Seconds without accepting after the system ran out of descriptors."""
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TensorListener:
    """Listener for tensor streams. A node makes, starts and closes it.

    Args:
        voids: the revocations known; looked up in the listener's thread.
    """

    def __init__(self, identity: Identity, voids: Voids, clock: Clock, refusals: Refusals) -> None:
        self._identity, self._shown = identity, identity.member
        self._context = server_context(identity)
        # A copy of its own, since another thread uses the identity's.
        self._root = FleetRoot(identity.root.certificate)
        self._voids, self._clock, self._refusals = voids, clock, refusals
        self._lock = threading.Lock()
        self._expected: dict[bytes, ExpectedStream] = {}
        self._streams: dict[TensorReceiver, Member] = {}
        self._newcomers: OrderedDict[int, Newcomer] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        self._listening: socket.socket | None = None
        self._paused_until = 0.0
        self._wake_out, self._wake_in = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="tensor-listener", daemon=True)
        self.port = 0

    def start(self, host: str = "", port: int = 0) -> int:
        """Listen; returns the port.

        Args:
            host: an address of this machine; empty: all of them, IPv4 and IPv6.
            port: 0 for any free one.

        Raises:
            ConfigError: the address can't be used.
        """
        return self.serve_on(hold_port(host, port, "activations", TENSOR_OPTIONS))

    def serve_on(self, held: socket.socket) -> int:
        """Listen on a port that is already bound; returns its number."""
        self._listening = held
        listen_on(held, BACKLOG)
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        self._wake_out.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread.start()
        return self.port

    def expect(self, ticket: bytes | None = None) -> ExpectedStream:
        """Register a ticket and return the stream to wait for. The ticket works once.

        Args:
            ticket: 32 random bytes; None: drawn here.

        Raises:
            StreamClosed: the listener was closed.
        """
        ticket = os.urandom(TICKET_BYTES) if ticket is None else ticket
        assert len(ticket) == TICKET_BYTES, "a ticket has 32 bytes"
        expected = ExpectedStream(ticket, self._forget)
        with self._lock:
            if self._closing:
                raise StreamClosed("The listener for activations is closed")
            assert ticket not in self._expected, "a ticket is drawn once"
            self._expected[ticket] = expected
        return expected

    def cut(self, node_id: NodeId, not_after: int | None = None) -> None:
        """Close the streams of a revoked node, from any thread.

        Args:
            node_id: the revoked node.
            not_after: only streams with certificates issued up to then (Unix seconds); None: all.
        """
        with self._lock:
            cut = [
                receiver
                for receiver, member in self._streams.items()
                if member.node_id == node_id and (not_after is None or member.issued_at <= not_after)
            ]
        for receiver in cut:
            receiver.close(CloseCode.REFUSED, "revoked")

    def close(self) -> None:
        """Close the port, everything that came through it, and the thread. Idempotent."""
        with self._lock:
            closing, self._closing = self._closing, True
            expected, streams = list(self._expected.values()), list(self._streams)
        if not closing:
            self._wake_in.send(b"\0")
        for one in expected:
            one.cancel()
        for stream in streams:
            stream.close()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if not closing:
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()
            if self._listening is not None:
                self._listening.close()

    def _forget(self, expected: ExpectedStream) -> None:
        with self._lock:
            if self._expected.get(expected.ticket) is expected:
                del self._expected[expected.ticket]

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.data, Newcomer):
                    self._go_on(key.data)
            self._turn_away_late()
        for newcomer in list(self._newcomers.values()):
            self._drop(newcomer)

    def _pause(self) -> float | None:
        """Return how many seconds the thread may wait for events; None: until the next event."""
        now = time.perf_counter()
        waits = [newcomer.until - now for newcomer in list(self._newcomers.values())[:1]]
        if self._paused_until:
            waits.append(self._paused_until - now)
        return max(0.0, min(waits)) if waits else None

    def _turn_away_late(self) -> None:
        now = time.perf_counter()
        while self._newcomers and (oldest := next(iter(self._newcomers.values()))).until <= now:
            self._refuse(oldest, "it said no hello in time")
        if self._paused_until and self._paused_until <= now:
            self._paused_until = 0.0
            assert self._listening is not None, "it is paused after it began"
            self._selector.register(self._listening, selectors.EVENT_READ)

    def _accept(self) -> None:
        """Accept one caller. The selector reports any further ones."""
        assert self._listening is not None, "it has begun"
        try:
            sock, (host, port, *_) = self._listening.accept()
        except OSError as error:
            if error.errno in _FULL:
                self._selector.unregister(self._listening)
                self._paused_until = time.perf_counter() + FULL_S
            return
        try:
            sock.setblocking(False)
            tune(sock)
            if self._shown is not self._identity.member:  # renewed
                self._shown, self._context = self._identity.member, server_context(self._identity)
            tls = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            return
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._refuse(self._most_in_the_way(), "it said no hello while others came")
        newcomer = Newcomer(tls, host.removeprefix("::ffff:"), port, time.perf_counter() + HELLO_S)
        self._newcomers[tls.fileno()] = newcomer
        self._selector.register(tls, selectors.EVENT_READ, newcomer)

    def _most_in_the_way(self) -> Newcomer:
        """Return the oldest newcomer of the host that has the most newcomers."""
        newcomers = list(self._newcomers.values())
        ((host, _),) = Counter(one.host for one in newcomers).most_common(1)
        return next(one for one in newcomers if one.host == host)

    def _go_on(self, newcomer: Newcomer) -> None:
        if self._newcomers.get(newcomer.sock.fileno()) is not newcomer:
            return  # turned away since the selector named it
        try:
            step = newcomer.go_on(self._admit)
            if isinstance(step, Wants):
                events = selectors.EVENT_READ if step is Wants.READ else selectors.EVENT_WRITE
                self._selector.modify(newcomer.sock, events, newcomer)
                return
            self._welcome(newcomer, step)
        except RevokedNode as error:
            self._refuse(newcomer, error.message, error.who)
        except (NotTrusted, TensorStreamError) as error:
            self._refuse(newcomer, error.message)
        except (OSError, ValueError) as error:
            self._refuse(newcomer, f"it showed no certificate of this fleet, or left ({error})")

    def _admit(self, certificate: bytes) -> Member:
        member = self._root.member(certificate, self._clock.wall())
        self._check(member)
        return member

    def _check(self, member: Member) -> None:
        if self._voids(member.node_id, member.issued_at):
            raise RevokedNode(f"{member.node_id} was revoked", who=member.node_id)

    def _welcome(self, newcomer: Newcomer, ticket: bytes) -> None:
        """Hand a member to the session that gave out its ticket. The ticket stays valid if the connection breaks before the welcome."""
        member = newcomer.member
        assert member is not None, "it has shown its certificate"
        with self._lock:
            expected = self._expected.get(ticket)
        if expected is None:
            raise StreamClosed("it brought a ticket that is unknown or was used")
        newcomer.conversation.on(Event.WELCOME)
        newcomer.sock.send(WELCOME)
        self._forget(expected)
        self._release(newcomer)
        receiver = TensorReceiver(
            Pipe(newcomer.sock, member.node_id),
            newcomer.conversation,
            IncomingBytes(newcomer.conversation, FROM_SENDER),
            on_close=lambda: self._left(receiver),
        )
        with self._lock:
            self._streams[receiver] = member
        # The node may have been revoked just now, before `cut` could find this stream.
        if self._closing or self._voids(member.node_id, member.issued_at):
            receiver.close(CloseCode.REFUSED, "revoked")
        if not expected.deliver(receiver):
            receiver.close()

    def _left(self, receiver: TensorReceiver) -> None:
        with self._lock:
            self._streams.pop(receiver, None)

    def _refuse(self, newcomer: Newcomer, why: str, who: str = "") -> None:
        self._refusals.note(who or newcomer.who, f"{why} [activations]", at=f"port {newcomer.port}")
        self._release(newcomer)
        newcomer.turn_away(why)

    def _drop(self, newcomer: Newcomer) -> None:
        self._release(newcomer)
        newcomer.turn_away()

    def _release(self, newcomer: Newcomer) -> None:
        """Remove a caller from the newcomers."""
        if self._newcomers.pop(newcomer.sock.fileno(), None) is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(newcomer.sock)
