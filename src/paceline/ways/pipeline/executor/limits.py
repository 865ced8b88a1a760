"""What bounds a pipeline's waits and batches, and how long batches may take before they count as stalled, from how long others took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Bounds of one pipeline."""

    stall_s: float = 2.0
    """Without a batch coming out, beyond what its rows take. Raising it: a machine that hangs is noticed later."""
    search_s: float = 30.0
    """How long machines are looked for, or may load no further byte, before requests end with an error. Raising it: they wait longer where
    none come back."""
    prepare_s: float = 300.0
    """How long machines may go on that have no bytes to count, before the first or behind the last: kernels are read or compiled. Raising it: one
    that hangs there is given up later."""
    alone_s: float = 30.0
    """How long this machine goes on alone, once it has to, before it looks for others again. Raising it: machines that come back are used later, and
    those that come and go hold up answers less often."""
    row_s: float = 0.01
    """What a row may take in all stages, until rows were seen. The bound on a stall grows with the rows under way."""
    look_s: float = 0.25
    """How long one look for machines may hold up the engine's thread."""
    max_rows: int = 1024
    max_context: int = 1 << 20
    journal_bytes: int = 256 << 20
    """Of what went to the first stage, kept so that a loss costs this machine's own layers nothing. Raising it takes memory."""


SMALL = 8
"""Rows of a small batch at most."""
WEIGHT = 0.1
"""Of a new time. Raising it: estimates follow faster, and a machine that turns slow is taken for an ordinary one sooner."""
MEASURED_BYTES = 1 << 20
"""Of a batch whose way says how fast the link is: what is smaller lies in the system's buffers at once."""
MARGIN = 4.0
"""By what factor a batch may take longer than estimated. Raising it: a stall is noticed later."""


class Patience:
    """How long batches of one pipeline may take.

    Law: a row of a small batch costs far more than one of a large batch, so each kind has its own estimate; until a large one was seen, what is known
    of small ones holds for it, which is more than enough. One slow batch moves an estimate by a tenth, so that a machine that turns slow is found.

    Args:
        row_s: seconds for a row of a small batch, as far as that is known beforehand.
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
            hop_bytes: of its activations, over all links that it goes.
        """
        return MARGIN * (n_rows * ((n_rows > SMALL and self._large_s) or self._small_s) + hop_bytes * self._byte_s)


def _moved(known_s: float, new_s: float) -> float:
    return known_s + WEIGHT * (new_s - known_s) if known_s else new_s
