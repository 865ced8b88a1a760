"""Responses kept in memory, so that a next one can go on from them.

Law: what is kept is bounded by bytes, count and age; what was used least recently goes first. An item that several responses of one conversation share is
held, and counted, once. A response that is gone takes no other with it: each has its whole conversation.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.server.responses.requests import AnyItem

RESPONSE_OVERHEAD, PLACE = 1024, 9
"""Bytes of a response without any text, and of an item's place in a list."""
_MADE_HERE = re.compile(r"[a-z]+_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, eq=False)
class KeptItem:
    """An item of a conversation."""

    id: str
    item: AnyItem
    shown: dict[str, object]
    """As clients are shown it."""
    size: int
    """Bytes that it takes, about."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response."""

    id: str
    body: bytes
    """Its JSON."""
    before: Sequence[KeptItem]
    """The conversation before its own items."""
    input: Sequence[KeptItem]
    output: Sequence[KeptItem]

    @property
    def own_size(self) -> int:
        """Bytes that it takes beside its items, about."""
        return RESPONSE_OVERHEAD + len(self.body) + PLACE * (len(self.before) + len(self.input) + len(self.output))

    @property
    def items(self) -> list[KeptItem]:
        """The conversation with it: what a next response goes on from."""
        return [*self.before, *self.input, *self.output]


@dataclass(frozen=True, slots=True)
class KeptBounds:
    """How much is kept; see `ServerSettings`."""

    count: int
    size: int
    """Bytes."""
    age_s: float


@dataclass(slots=True)
class _Held:
    item: KeptItem
    times: int = 0


class KeptResponses:
    """The responses of one server. Safe to call from several threads."""

    def __init__(self, bounds: KeptBounds, clock: Clock) -> None:
        self._bounds, self._clock = bounds, clock
        self._lock = threading.Lock()
        self._responses: OrderedDict[str, tuple[Kept, float]] = OrderedDict()
        """With when each was last used, the longest ago first."""
        self._held: dict[KeptItem, _Held] = {}
        self._by_id: dict[str, KeptItem] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._size

    def __len__(self) -> int:
        with self._lock:
            return len(self._responses)

    def put(self, kept: Kept) -> None:
        """Keep a response, and drop others where that is too much."""
        with self._lock:
            self._drop(kept.id)
            self._responses[kept.id] = kept, self._clock.monotonic()
            self._size += kept.own_size
            for item in kept.items:
                held = self._held.get(item)
                if held is None:
                    held = self._held[item] = _Held(item)
                    if _MADE_HERE.fullmatch(item.id):  # what clients call their own items says nothing to others
                        self._by_id.setdefault(item.id, item)
                    self._size += item.size
                held.times += 1
            self._drop_old()

    def find(self, response_id: str) -> Kept | None:
        """A response by its id, which counts as used by that."""
        with self._lock:
            self._drop_old()
            found = self._responses.get(response_id)
            if found is None:
                return None
            self._responses[response_id] = found[0], self._clock.monotonic()
            self._responses.move_to_end(response_id)
            return found[0]

    def item(self, item_id: str) -> KeptItem | None:
        """An item of a kept response."""
        with self._lock:
            self._drop_old()
            return self._by_id.get(item_id)

    def delete(self, response_id: str) -> bool:
        """Forget a response. Returns whether there was one."""
        with self._lock:
            return self._drop(response_id)

    def _drop_old(self) -> None:
        oldest_s = self._clock.monotonic() - self._bounds.age_s
        while self._responses:
            response_id, (_, used_s) = next(iter(self._responses.items()))
            if used_s > oldest_s and len(self._responses) <= self._bounds.count and self._size <= self._bounds.size:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> bool:
        found = self._responses.pop(response_id, None)
        if found is None:
            return False
        kept, _ = found
        self._size -= kept.own_size
        for item in kept.items:
            held = self._held[item]
            held.times -= 1
            if not held.times:
                del self._held[item]
                self._size -= item.size
                if self._by_id.get(item.id) is item:
                    del self._by_id[item.id]
        return True
