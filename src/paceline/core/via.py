"""Nodes that a request goes through, so that endpoints which share each other do not pass it around without end.

Laws:
- A list of models says which nodes a request for each goes through. A node offers no model that is reached through itself, so endpoints that share each other list
  no model that neither has.
- A node adds its mark to a request that leaves it for an engine of another maker or for another node, and refuses a request that has its mark.
- A mark is a node's name and a number that the process drew, since two fleets may have nodes of one name. Only the number leaves the home network.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from paceline.core.errors import InvalidRequest, RequestLoop

VIA_HEADER: Final = "x-paceline-via"
MOST_NODES: Final = 4
"""Nodes that a request may go through. Raising it: a chain of endpoints may be longer, and each adds to the first token's time."""
MARK: Final = re.compile(r"(?:[A-Za-z0-9._-]{1,64}~)?[0-9a-f]{16}")
MOST_LETTERS: Final = 512
"""Maximum length of the header: more than four marks take."""


def new_mark(name: str = "") -> str:
    """Draw the mark of this process.

    Args:
        name: the node's id in its fleet; empty: it is in none.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64]
    return f"{plain}~{secrets.token_hex(8)}" if plain else secrets.token_hex(8)


def is_node_mark(mark: object) -> bool:
    return isinstance(mark, str) and MARK.fullmatch(mark) is not None


def through(via: tuple[str, ...], mark: str) -> tuple[str, ...]:
    """Return the way of a request with this node at its end.

    Raises:
        RequestLoop: the request went through this node before, or through too many nodes.
    """
    numbers = [_number(each) for each in via]
    if _number(mark) in numbers:
        way = " -> ".join((*via[numbers.index(_number(mark)) :], mark))
        raise RequestLoop(
            f"The request came back to a node that it went through: {way}", "These endpoints share each other: stop sharing one of them."
        )
    if len(via) >= MOST_NODES:
        raise RequestLoop(
            f"The request went through {len(via)} nodes: {' -> '.join(via)}",
            f"Share the engine itself: at most {MOST_NODES} may pass it on.",
        )
    return (*via, mark)


def leads_back(via: tuple[str, ...], mark: str) -> bool:
    """Return whether `through` would refuse a request that goes on to these nodes from the node with this mark."""
    return _number(mark) in map(_number, via) or len(via) >= MOST_NODES


def outside(via: tuple[str, ...]) -> tuple[str, ...]:
    """Return the way without names of machines, for an engine outside of the home network."""
    return tuple(map(_number, via))


def write_via(via: tuple[str, ...]) -> str:
    return ", ".join(via)


def read_via(text: str) -> tuple[str, ...]:
    """Read the header of a request.

    Raises:
        InvalidRequest: it is not one that a node wrote.
    """
    marks = tuple(part.strip() for part in text.split(",")) if text else ()
    if len(text) > MOST_LETTERS or not all(map(is_node_mark, marks)):
        raise InvalidRequest(f"The header {VIA_HEADER} is not one that Paceline wrote", "Leave it out.", field=VIA_HEADER)
    return marks


def listed_via(entry: object) -> tuple[str, ...]:
    """Read the nodes of a list's entry, as an endpoint wrote them. Empty: another server wrote the list."""
    if not isinstance(entry, list):
        return ()
    return tuple(mark for mark in entry[: MOST_NODES + 1] if is_node_mark(mark))


def _number(mark: str) -> str:
    return mark.rpartition("~")[2]
