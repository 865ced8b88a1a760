"""How many pipelines begin on a node at once."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import ShardUnavailable


class PipelineSlots:
    """Counts those that are open. Taken on the event loop; given back from any thread."""

    def __init__(self) -> None:
        self._taken: set[object] = set()

    @property
    def taken(self) -> int:
        """Those open, or opening."""
        return len(self._taken)

    def take(self, most: int) -> Callable[[], None]:
        """One more pipeline. Returns what gives its place back; calling that again does nothing.

        Args:
            most: at once.

        Raises:
            ShardUnavailable: there are as many already.
        """
        if len(self._taken) >= most:
            raise ShardUnavailable(
                f"{len(self._taken)} pipelines begin on this machine, and no more are allowed at once", "Raise max_concurrent_pipelines."
            )
        place = object()
        self._taken.add(place)
        return lambda: self._taken.discard(place)
