"""A connection that has not shown yet who it is and what it wants: a handshake, then a hello. Nothing here blocks."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from enum import Enum, auto

from paceline.core.errors import StreamClosed, StreamCorrupt
from paceline.net.tensor.conversation import Conversation
from paceline.net.tensor.frames import CloseCode, close
from paceline.net.tensor.incoming import FROM_SENDER, Hello, Incoming
from paceline.net.trust.certificates import Member

HELLO_BYTES = 1024
"""What is read of a peer that has not said hello. It is longer than that, as no peer sends more before the welcome."""


class Wants(Enum):
    """What a newcomer waits for."""

    READ = auto()
    WRITE = auto()


class Newcomer:
    """One of them.

    Args:
        sock: not blocking, its handshake not begun.
        host: where it calls from.
        until: on the monotonic clock; then it is turned away.
    """

    def __init__(self, sock: ssl.SSLSocket, host: str, port: int, until: float) -> None:
        self.sock, self.host, self.port, self.until = sock, host, port, until
        self.member: Member | None = None
        self.conversation = Conversation()
        self._incoming = Incoming(self.conversation, FROM_SENDER, HELLO_BYTES)

    @property
    def who(self) -> str:
        """By what it proved, or where it is."""
        return self.member.node_id if self.member is not None else self.host

    def go_on(self, admit: Callable[[bytes], Member]) -> Wants | bytes:
        """As far as what came allows.

        Args:
            admit: whose certificate (DER) this is; raises NotTrusted.

        Returns:
            What it waits for, or the ticket that it brought.

        Raises:
            OSError: TLS turned it away, or it left.
            NotTrusted: it is no node of the fleet, or no longer.
            TensorStreamError: it says something else than hello.
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
        """Close it; a member is told why."""
        if self.member is not None and why:
            with contextlib.suppress(OSError):
                self.sock.send(close(CloseCode.REFUSED, why))
        self.sock.close()
