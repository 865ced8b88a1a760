"""Who is told what a pipeline does, by its executor: one counts (`node` has the meter), one looks whether stages compute what they should."""

from __future__ import annotations

from typing import Protocol

from paceline.engine.local import WireBits
from paceline.ways.pipeline.executor.route import Fault, Opening, Route
from paceline.ways.pipeline.executor.stage_batch import StageBatch


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


class Inspector(Protocol):
    """Told of every batch by the thread that runs them. Returns at once, keeps no array it is shown, and never raises."""

    def sent(self, route: Route, batch: StageBatch, x_TD: WireBits) -> None:
        """A batch is about to be sent."""
        ...

    def came(self, batch: StageBatch, x_TD: WireBits) -> None:
        """It is back, from the last stage of the same route."""
        ...

    def close(self) -> None:
        """The pipeline ends. Idempotent."""
        ...
