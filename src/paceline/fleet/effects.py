"""What gossip asks its owner to do, and what it tells it happened. Values: gossip itself does nothing.

`Call` and `Reseal` are asked; everything else is news, for logs, metrics, open streams and callers that wait for a change of the view.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard
from paceline.fleet.messages import Request


@dataclass(frozen=True, slots=True)
class Call:
    """Send `request` to a peer and hand back what came of it: `Gossip.on_reply(id, ...)` or `Gossip.on_failure(id, ...)`."""

    id: int
    addresses: tuple[str, ...]
    """host:port; any of them will do."""
    node_id: NodeId | None
    """Who must answer; None where only an address is known (a seed)."""
    request: Request
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Reseal:
    """Sign a new card and `Gossip.announce` it; its version must be above `above`."""

    above: int
    reason: str
    """For the log."""


@dataclass(frozen=True, slots=True)
class Appeared:
    """A node is in the view that was not."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Changed:
    """A node in the view has a new card."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Restarted:
    """A node in the view is a new process: what was held with the old one is gone."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Left:
    """A node said goodbye."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Expired:
    """A node was not heard of for its TTL."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Revoked:
    """The CA voided a node's certificates issued up to `not_after`: cancel its streams. It may be this very node."""

    node_id: NodeId
    not_after: int


@dataclass(frozen=True, slots=True)
class Clashed:
    """Two running processes claim one id. Newest evidence first."""

    node_id: NodeId
    addresses: tuple[str, ...]
    other_addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Some of what a peer passed on was not taken. One for each reason in a message, so that a storm is told in a line."""

    peer: NodeId
    node_id: NodeId | None
    """Whose card it was, or the first one's; None where that is not known."""
    reason: str
    count: int = 1
    """Cards or stamps that were not taken for this reason."""


Effect = Call | Reseal | Appeared | Changed | Restarted | Left | Expired | Revoked | Clashed | Ignored
