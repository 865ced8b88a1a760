"""Whoever wants to know whether stages compute what they should: sees what goes out and what comes back, and holds nothing up."""

from __future__ import annotations

from typing import Protocol

from paceline.engine.local import WireBits
from paceline.parallel.route import Route
from paceline.parallel.stage_batch import StageBatch


class Inspector(Protocol):
    """Told of every batch by the thread that runs them. Returns at once, keeps no array it is shown, and never raises."""

    def sent(self, route: Route, batch: StageBatch, x_TD: WireBits) -> None:
        """A batch is about to be sent.

        Args:
            route: the one in use.
            batch: what the rows are.
            x_TD: they.
        """
        ...

    def came(self, batch: StageBatch, x_TD: WireBits) -> None:
        """It is back, from the last stage of the same route."""
        ...

    def close(self) -> None:
        """The pipeline ends. Idempotent."""
        ...
