"""What may be counted of a pipeline, as its executor tells it. `node` has the meter that counts."""

from __future__ import annotations

from typing import Protocol

from paceline.parallel.route import Fault, Opening


class PipelineWatch(Protocol):
    """Told by the engine's thread; must not wait."""

    def opening(self, opening: Opening) -> None:
        """A route is on its way, and so far has its machines loaded their layers. Told some times a second."""
        ...

    def constructed(self, seconds: float) -> None:
        """A route was found, so long after it was first looked for."""
        ...

    def lost(self, fault: Fault) -> None:
        """A route broke."""
        ...

    def failed_over(self) -> None:
        """Other machines took over."""
        ...

    def fell_back(self) -> None:
        """This machine took over."""
        ...


class Unwatched:
    """Counts nothing."""

    def opening(self, opening: Opening) -> None: ...
    def constructed(self, seconds: float) -> None: ...
    def lost(self, fault: Fault) -> None: ...
    def failed_over(self) -> None: ...
    def fell_back(self) -> None: ...
