"""Which of the nodes that give the same bytes a request goes to: the one that is likely to answer first.

Law: the plan says how long each takes when it is idle; what is under way there makes it longer, a prefix that it holds shorter. A node that was lost
comes last until it was heard of again. A choice changes no byte.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import NodeStopping, NodeUnreachable, PacelineError
from paceline.core.ids import NodeId
from paceline.ways.forward.routes import WORTH_A_HOP, Stop

BUSY = 0.5
"""By what part of itself an answer takes longer for each other one under way. Raising it: requests spread sooner, to slower machines too."""
ALIKE = 1.25
"""Machines whose speeds differ by less are taken for equal: estimates are rough."""
FAVOUR = 0.5
"""Of an answer's time, what a prompt that is in memory as a whole saves. Raising it: conversations stay longer where they are, though others idle."""
PREFIX_TOKENS = 64
"""From one remembered prefix of a prompt to the next. Raising it: prefixes are found less exactly, with less work."""
MOST_PREFIXES = 256
"""Of one prompt."""
REMEMBERED = 1 << 14
"""Prefixes, of all prompts. Raising it: memory, some 100 bytes each."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a node's cache knows a prompt by: equal ids for another model, or under another salt, are another prompt."""

    ids: Sequence[int]
    model: str = ""
    """Its digest and the format of its weights."""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that failed a request."""

    instance: bytes
    at_s: float


class Sharing:
    """What one node knows of whom it sends requests to.

    Args:
        own: this node.
        own_load: sequences that run and wait here.
        heard_s: when a node last showed that it lives, on the clock; None: it is not in view.
    """

    def __init__(self, own: NodeId, own_load: Callable[[], int], heard_s: Callable[[NodeId], float | None], clock: Clock) -> None:
        self._own, self._own_load, self._heard_s, self._clock = own, own_load, heard_s, clock
        self._under_way: Counter[NodeId] = Counter()
        self._lost: dict[NodeId, Lost] = {}
        self._prefixes: OrderedDict[bytes, NodeId] = OrderedDict()
        """Where each was sent last."""

    def choose(self, stops: Sequence[Stop], prompt: Prompt, left: Collection[NodeId]) -> Stop | None:
        """The stop to ask now; None where all were left.

        Args:
            stops: the best first, as the plan has them.
        """
        open_stops = [stop for stop in stops if stop.node_id not in left]
        if len(open_stops) < 2:
            return open_stops[0] if open_stops else None
        known = self._known(prompt)
        times = [stop.expected_s for stop in stops if stop.expected_s is not None]
        quickest_s, slowest_s = min(times, default=0.5), max(times, default=0.5)
        has_own = any(stop.node_id == self._own for stop in stops)

        def cost(stop: Stop) -> tuple[bool, float]:
            node_id = stop.node_id
            seconds = 2 * slowest_s if stop.expected_s is None else stop.expected_s
            if seconds < ALIKE * quickest_s:
                seconds = quickest_s
            if has_own and node_id != self._own:
                seconds *= WORTH_A_HOP
            load = max(self._under_way[node_id], stop.under_way, self._own_load() if node_id == self._own else 0)
            return self._is_lost(stop), seconds * (1 + BUSY * load) * (1 - FAVOUR * known.get(node_id, 0.0))

        return min(open_stops, key=cost)  # the first of equal ones

    def began(self, node_id: NodeId, prompt: Prompt) -> None:
        """A request goes to a node."""
        self._under_way[node_id] += 1
        for key in prefix_keys(prompt):
            self._prefixes[key] = node_id
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > REMEMBERED:
            self._prefixes.popitem(last=False)

    def ended(self, stop: Stop, error: PacelineError | None) -> None:
        """It is over there.

        Args:
            error: why it left before its end.
        """
        node_id = stop.node_id
        self._under_way[node_id] -= 1
        if self._under_way[node_id] <= 0:
            del self._under_way[node_id]
        if isinstance(error, NodeUnreachable | NodeStopping) and node_id != self._own:
            self._lost[node_id] = Lost(stop.instance, self._clock.monotonic())

    def _is_lost(self, stop: Stop) -> bool:
        lost = self._lost.get(stop.node_id)
        if lost is None:
            return False
        heard_s = self._heard_s(stop.node_id)
        if lost.instance != stop.instance or (heard_s is not None and heard_s > lost.at_s):
            del self._lost[stop.node_id]
            return False
        return True

    def _known(self, prompt: Prompt) -> dict[NodeId, float]:
        """How much of a prompt each node was sent before: 0 to 1."""
        found: dict[NodeId, float] = {}
        for place, key in enumerate(prefix_keys(prompt), start=1):
            node_id = self._prefixes.get(key)
            if node_id is not None:
                found[node_id] = min(1.0, place * PREFIX_TOKENS / len(prompt.ids))
        return found


def prefix_keys(prompt: Prompt) -> list[bytes]:
    """Names of a prompt's prefixes, the shortest first."""
    hashed = hashlib.blake2b(repr((prompt.model, prompt.salt)).encode(), digest_size=16)
    keys: list[bytes] = []
    for place in range(min(MOST_PREFIXES, len(prompt.ids) // PREFIX_TOKENS)):
        hashed.update(array("I", prompt.ids[place * PREFIX_TOKENS : (place + 1) * PREFIX_TOKENS]).tobytes())
        keys.append(hashed.copy().digest())
    return keys
