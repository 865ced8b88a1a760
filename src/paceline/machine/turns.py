"""Turns at a few places, so that one party's crowd makes no other party wait behind it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from paceline.core.errors import Overloaded


class Turns:
    """Gives places to parties. For one event loop.

    Law: a free place goes to the party that holds the fewest; among equals to the one whose last turn is longest ago. Each party's own wait in order.

    Args:
        places: that may be held at once.
        most_waiting: of one party.
    """

    def __init__(self, places: int, most_waiting: int) -> None:
        self._free, self._most_waiting = places, most_waiting
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By party, the one whose last turn is longest ago first."""

    @asynccontextmanager
    async def turn(self, party: str) -> AsyncGenerator[None]:
        """Hold a place while the block runs.

        Raises:
            Overloaded: too many of this party wait.
        """
        await self._take(party)
        try:
            yield
        finally:
            self._give_back(party)

    async def _take(self, party: str) -> None:
        waiting = self._waiting.get(party, deque())
        if len(waiting) >= self._most_waiting:
            raise Overloaded(f"{len(waiting)} others of this address wait already", "Send it again.", retry_after_s=2)
        place = asyncio.get_running_loop().create_future()
        waiting.append(place)
        self._waiting.setdefault(party, waiting)
        self._hand_on()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(party, place)
            else:
                self._give_back(party)
            raise

    def _leave(self, party: str, place: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(party, deque())
        with suppress(ValueError):  # it was passed over meanwhile
            waiting.remove(place)
        if not waiting:
            self._waiting.pop(party, None)

    def _give_back(self, party: str) -> None:
        self._free += 1
        self._held[party] -= 1
        self._held += Counter()  # forgets who holds none
        self._hand_on()

    def _hand_on(self) -> None:
        while self._free and self._waiting:
            party = min(self._waiting, key=self._held.__getitem__)
            waiting = self._waiting.pop(party)
            place = waiting.popleft()
            if waiting:
                self._waiting[party] = waiting
            if not place.done():
                self._free -= 1
                self._held[party] += 1
                place.set_result(None)
