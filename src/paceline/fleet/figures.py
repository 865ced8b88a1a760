"""Two significant digits, and the will to keep them: what a node says changes only when it means something, so that plans don't flap."""

from __future__ import annotations

import math

WITHIN = 0.1
"""Of a figure that is measured while requests are answered, by how much it may be off. Raising it: fewer new cards, and prices that are older."""
SLACK = 0.25
"""How far, in steps of the last digit, a value must be past the edge where rounding changes. Raising it shows changes later."""


def two_digits(value: float) -> float:
    """A figure rounded to two significant digits, half away from nothing special: as decimal text rounds it. Not a number: 0."""
    return float(f"{value:.1e}") if math.isfinite(value) else 0.0


def settled(value: float, shown: float) -> float:
    """What to show for `value` where `shown` was shown before: the same, until the value is clearly nearer to another.

    Args:
        shown: the last result of this function, or 0.
    """
    rounded = two_digits(value)
    if rounded == shown or not math.isfinite(shown) or shown == 0 or (rounded > 0) != (shown > 0):
        return rounded
    # Below a power of ten steps are ten times finer: the finer ones count, or 9.7 would hide behind 10.
    step = min(_step(rounded), _step(shown)) if value != 0 else 0.0
    return shown if abs(value - shown) <= step * (0.5 + SLACK) else rounded


def kept(value: float, shown: float) -> float:
    """What to show of a figure that is measured again and again: what was shown, until it is off by more than a tenth."""
    return shown if shown > 0 and abs(value - shown) <= shown * WITHIN else two_digits(value)


def settled_within(value: float, shown: float) -> float:
    """The same for what may be taken: never more than there is. It falls at once, and rises once the value is clearly beyond the next figure."""
    rounded = two_digits(value)
    below = rounded if rounded <= value else two_digits(rounded - 10.0 ** (math.floor(math.log10(value)) - 1))
    return shown if 0 < shown < below and value < below + SLACK * _step(below) else below


def _step(value: float) -> float:
    """One of the last digit of a figure with two."""
    return float(f"1e{int(f'{value:.1e}'.partition('e')[2]) - 1}")
