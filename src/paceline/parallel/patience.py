"""How long batches may take before they count as stalled, from how long others took.

Law: a row of a small batch costs far more than one of a large batch, so each kind has its own estimate; until a large one was seen, what is known
of small ones holds for it, which is more than enough. One slow batch moves an estimate by a tenth, so that a machine that turns slow is found.
"""

from __future__ import annotations

SMALL = 8
"""Rows of a small batch at most."""
WEIGHT = 0.1
"""Of a new time. Raising it: estimates follow faster, and a machine that turns slow is taken for an ordinary one sooner."""
MEASURED_BYTES = 1 << 20
"""Of a batch whose way says how fast the link is: what is smaller lies in the system's buffers at once."""
MARGIN = 4.0
"""By what factor a batch may take longer than estimated. Raising it: a stall is noticed later."""


class Patience:
    """Of one pipeline.

    Args:
        row_s: seconds for a row of a small batch, as far as anybody knows beforehand.
    """

    def __init__(self, row_s: float = 0.0) -> None:
        self._small_s = row_s
        self._large_s = 0.0
        """0: not known."""
        self._byte_s = 0.0
        """On the way to the first stage; 0: faster than can be measured."""

    def took(self, n_rows: int, seconds: float) -> None:
        """A batch came back."""
        each_s = seconds / max(1, n_rows)
        if n_rows <= SMALL:
            self._small_s = _moved(self._small_s, each_s)
        else:
            self._large_s = _moved(self._large_s, each_s)

    def carried(self, n_bytes: int, seconds: float) -> None:
        """So long was the system at handing a batch to the network."""
        if n_bytes >= MEASURED_BYTES:
            self._byte_s = _moved(self._byte_s, seconds / n_bytes)

    def of(self, n_rows: int, hop_bytes: int = 0) -> float:
        """What a batch may take, in seconds.

        Args:
            n_rows: of it.
            hop_bytes: of its activations, over all links that it goes.
        """
        return MARGIN * (n_rows * ((n_rows > SMALL and self._large_s) or self._small_s) + hop_bytes * self._byte_s)


def _moved(known_s: float, new_s: float) -> float:
    return known_s + WEIGHT * (new_s - known_s) if known_s else new_s
