"""The one version of everything that nodes tell one another, and the nodes that speak another one.

Law: nodes of two versions are no members of each other's fleet. The version is in the first exchange (GetNodeCapability, ExchangeCapabilities, Join), and a
difference is found there, before anything else is read. Everything later goes between nodes in view, so it needs no version of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cachetools import TTLCache

from paceline.core.clock import Clock
from paceline.core.errors import OtherProtocol
from paceline.core.ids import NodeId

logger = logging.getLogger(__name__)

PROTOCOL_VERSION: Final = 1
"""Version of the messages in proto/, of tensor streams, and of what signatures cover. Raising it: a fleet parts until all its machines are updated."""
REMEMBER_S: Final = 600.0
"""A node of another version is named for this long after it was met last. Raising it: it is named for longer after it was switched off."""
MOST_REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """A node that speaks another protocol version than this one."""

    node_id: NodeId
    protocol: int
    own_protocol: int

    @property
    def words(self) -> str:
        return f"{self.node_id} speaks protocol version {self.protocol}, and this machine version {self.own_protocol}: it is no member until both are alike"

    @property
    def todo(self) -> str:
        return f"Update Paceline on {self.node_id if self.protocol < self.own_protocol else 'this machine'}"


class Versions:
    """The protocol version that this side speaks, and the check of the other side's."""

    def __init__(self, own: int) -> None:
        self.own = own

    def check(self, node_id: NodeId, spoken: int) -> None:
        """Note which version a node speaks.

        Raises:
            OtherProtocol: it is not this side's.
        """
        if spoken != self.own:
            raise other_protocol(node_id, spoken, self.own)


PROGRAM: Final = Versions(PROTOCOL_VERSION)
"""Protocol versions for commands, which do not remember other nodes."""


class OtherVersions(Versions):
    """The nodes of other versions that one node has met lately.

    Args:
        lose: called with each such node, to drop its card.
    """

    def __init__(self, own: int, clock: Clock, lose: Callable[[NodeId], None]) -> None:
        super().__init__(own)
        self._lose = lose
        self._met = TTLCache[NodeId, int](MOST_REMEMBERED, REMEMBER_S, clock.monotonic)

    def check(self, node_id: NodeId, spoken: int) -> None:
        before = self._met.pop(node_id, self.own)
        if spoken != self.own:
            self._met[node_id] = spoken
            self._lose(node_id)
            if spoken != before:
                other = OtherVersion(node_id, spoken, self.own)
                logger.error("%s. %s", other.words, other.todo)
        super().check(node_id, spoken)

    @property
    def known(self) -> tuple[OtherVersion, ...]:
        """Nodes seen with another version within the last `REMEMBER_S`, in order of node id."""
        return tuple(OtherVersion(node_id, spoken, self.own) for node_id, spoken in sorted(self._met.items()))


def other_protocol(node_id: NodeId, spoken: int, own: int) -> OtherProtocol:
    other = OtherVersion(node_id, spoken, own)
    return OtherProtocol(other.words, other.todo, spoken=spoken)
