"""How long batches may take before they count as stalled, from how long others took.

Law: a row of a small batch costs far more than one of a large batch, so each kind has its own estimate; until a large one was seen, what is known
of small ones holds for it, which is more than enough. One slow batch moves an estimate by a tenth, so that a machine that turns slow is found.
"""

from __future__ import annotations

SMALL = 8
"""Rows of a small batch at most."""
WEIGHT = 0.1
"""Of a new time. Raising it: estimates follow faster, and a machine that turns slow is taken for an ordinary one sooner."""
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

    def took(self, n_rows: int, seconds: float) -> None:
        """A batch came back."""
        each_s = seconds / max(1, n_rows)
        if n_rows <= SMALL:
            self._small_s = _moved(self._small_s, each_s)
        else:
            self._large_s = _moved(self._large_s, each_s)

    def of(self, n_rows: int) -> float:
        """What a batch may take, in seconds."""
        return MARGIN * n_rows * ((n_rows > SMALL and self._large_s) or self._small_s)


def _moved(known_s: float, new_s: float) -> float:
    return known_s + WEIGHT * (new_s - known_s) if known_s else new_s
