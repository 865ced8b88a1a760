"""Versions of a node's own card: strictly rising, across restarts and a clock that goes back."""


def next_version(persisted: int, wall_s: float, above: int = 0) -> int:
    """The version of the next card: past every one used (`persisted`) or seen (`above`), and at least the clock in microseconds.

    Keep the result on disk before the card is announced.
    """
    return max(persisted + 1, above + 1, int(wall_s * 1e6))
