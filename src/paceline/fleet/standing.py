"""When a node leaves the way it serves a model for another: hysteresis, so that what flaps in a view moves nothing.

Law: pure, and time is an argument. Another way is taken once it was the first choice, and better by `BETTER`, at each look for `HELD_S`; or once what
runs was no choice at all for as long. One look that says otherwise begins the wait anew.
"""

from __future__ import annotations

from paceline.fleet.plan import Choice, Plan

BETTER = 1.25
"""How many times longer a typical request must take as the model is served now. Raising it: a faster way is left unused; lowering it: models are
loaded anew for gains that estimates can't tell."""
HELD_S = 60.0
"""For how long that must hold. Raising it: a machine that came is used later, and one that left is missed for longer; lowering it: a machine that
comes and goes has models loaded anew each time."""
FAILED_S = 3600.0
"""For how long a way that could not be had after all is not tried again. Raising it: a passing fault costs its gain for longer; lowering it: a model
is taken away and brought back for nothing more often."""


class Standing:
    """What serves a model, and for how long something else would have been better."""

    def __init__(self, running: Choice) -> None:
        self.running = running
        """As it was priced last."""
        self.rather: Choice | None = None
        """What the last plan would have in its place."""
        self._since_s: float | None = None
        self._failed: tuple[Choice, float] | None = None

    def look(self, made: Plan | None, now: float) -> Choice | None:
        """What to move to, if to anything.

        Args:
            made: the plan as the view is now; None: there is none, so that there is nothing to move to.
        """
        priced = None if made is None else next((each for each in (made.chosen, *made.runners_up) if is_same(each, self.running)), None)
        if priced is not None and [stage.layers for stage in priced.stages] == [stage.layers for stage in self.running.stages]:
            self.running = priced
        better = None if made is None else _better(made.chosen, priced)
        if better is None or (self.rather is not None and not is_same(better, self.rather)):
            self._since_s = None
        self.rather = better
        if better is None:
            return None
        self._since_s = now if self._since_s is None else self._since_s
        if self._failed is not None and is_same(better, self._failed[0]) and now - self._failed[1] < FAILED_S:
            return None
        return better if now - self._since_s >= HELD_S else None

    def failed(self, chosen: Choice, now: float) -> None:
        """What was to be moved to could not be had."""
        self._failed = chosen, now

    def moved(self, chosen: Choice) -> None:
        """Something else serves the model from now on."""
        self.running, self.rather, self._since_s = chosen, None, None


def is_same(one: Choice, other: Choice) -> bool:
    """Whether two choices are the same machines doing the same, whatever was measured meanwhile. Which layers each has is the pipeline's."""
    return (one.way, one.node_ids) == (other.way, other.node_ids)


def _better(chosen: Choice, running: Choice | None) -> Choice | None:
    if running is chosen:
        return None
    if running is None or running.estimate.total_s >= BETTER * chosen.estimate.total_s:
        return chosen
    return None
