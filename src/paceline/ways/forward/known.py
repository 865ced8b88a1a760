"""Routes as a node read them last, and the names that had one a moment ago."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.core.clock import Clock
from paceline.core.errors import ModelAway
from paceline.ways.forward.routes import AnswerRoute, Meaning

LATELY_S: Final = 300.0
"""Seconds after its last machine left for which a model counts as one that comes back. Raising it: clients ask longer for one that does not."""


class KnownRoutes:
    """Routes by name. `read` replaces them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.routes: Mapping[str, AnswerRoute] = {}
        self._gone: dict[str, float] = {}
        """Times until which names had a route."""
        self._at_home: dict[str, float] = {}
        """Times until which names had a route that does not leave the home network."""

    @property
    def meanings(self) -> dict[str, Meaning]:
        return {name: route.meaning for name, route in self.routes.items()}

    def read(self, routes: Mapping[str, AnswerRoute]) -> None:
        before, self.routes, now = self.routes, routes, self._clock.monotonic()
        self._gone = {name: at for name, at in self._gone.items() if now - at < LATELY_S and name not in routes}
        self._gone |= dict.fromkeys(before.keys() - routes.keys(), now)
        at_home = {name for some in (before, routes) for name, route in some.items() if not route.leaves}
        self._at_home = {name: at for name, at in self._at_home.items() if now - at < LATELY_S} | dict.fromkeys(at_home, now)

    def expects(self, name: str) -> bool:
        """Return whether a name has a route, or had one lately."""
        return name in self.routes or self._is_lately(self._gone.get(name))

    def check_home(self, route: AnswerRoute) -> None:
        """Refuse to send outside what was answered at home a moment ago.

        Raises:
            ModelAway: only engines outside of the home network have the model now, and a node at home had it lately.
        """
        if route.leaves and self._is_lately(self._at_home.get(route.name)):
            raise ModelAway(
                f"No machine at home serves {route.name} at this moment, and prompts for it are not sent to an engine outside instead",
                "Try again in a few seconds, or share the engine's model under a name of its own.",
            )

    def _is_lately(self, at_s: float | None) -> bool:
        return at_s is not None and self._clock.monotonic() - at_s < LATELY_S
