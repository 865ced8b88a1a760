"""Two members, a listener of one of them, and streams between them: real sockets and certificates."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from tests.fakes.fleets import TestFleet

from paceline.core.clock import SystemClock
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals

SOON_S = 100.0
MOST_SENT = 64 << 20
"""Bytes; far more than a system queues for a socket."""


def soon(seconds: float = SOON_S) -> float:
    """A deadline. What is expected happens long before it."""
    return time.perf_counter() + seconds


class Noted(Refusals):
    """Keeps what it notes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._more = threading.Condition()

    def note(self, who: str, why: str, *, at: str = "") -> None:
        super().note(who, why, at=at)
        with self._more:
            self.lines.append((who, why))
            self._more.notify_all()

    def first(self, n: int) -> list[tuple[str, str]]:
        """The first lines, once there are so many."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.lines) >= n, SOON_S)
            return self.lines[:n]


@dataclass(slots=True)
class Meeting:
    """`far` listens, `near` dials."""

    fleet: TestFleet
    near: Identity
    far: Identity
    refusals: Noted = field(default_factory=Noted)
    listener: TensorListener = field(init=False)
    senders: list[TensorSender] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = TensorListener(self.far, self.fleet.revocations.voids, SystemClock(), self.refusals)
        self.listener.start("127.0.0.1")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    def dial(self, ticket: bytes, identity: Identity | None = None, far: Identity | None = None) -> TensorSender:
        member = (far or self.far).member
        sender = dial([self.address], member, ticket, identity or self.near, lambda _node, _at: False, soon())
        self.senders.append(sender)
        return sender

    def stream(self, identity: Identity | None = None) -> tuple[TensorSender, TensorReceiver]:
        expected = self.listener.expect()
        sender = self.dial(expected.ticket, identity)
        return sender, expected.wait(soon())


def until_it_breaks(sender: TensorSender, seconds: float = SOON_S) -> None:
    """Send until the other side's going is noticed, at the latest when the system takes no more."""
    for _ in range(MOST_SENT // 1152):
        sender.send(b"", np.zeros((1, 576), np.uint16), soon(seconds))


@contextmanager
def meeting(fleet: TestFleet) -> Generator[Meeting]:
    one = Meeting(fleet, fleet.member("near"), fleet.member("far"))
    try:
        yield one
    finally:
        for sender in one.senders:
            sender.close()
        one.listener.close()
