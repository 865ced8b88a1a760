"""Where a pipeline's next route comes from, once it has none: other machines, as long as the limits allow looking; then this one, if it may, until others
are back.

Law: a search is bounded by silence: it lasts as long as machines load further bytes, however many there are. One that found none is over, and the next request begins another, which ends at once where still none can, and waits for those that are
getting ready; a fallback, once begun, is seen through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from paceline.core.clock import Clock
from paceline.core.errors import (
    ExecutorUnavailable,
    PacelineError,
    PipelineError,
    PipelineStalled,
    ShardCorrupt,
    ShardUnavailable,
    WeightsMismatch,
)
from paceline.ways.pipeline.executor.fallback import Fallback
from paceline.ways.pipeline.executor.limits import PipelineLimits
from paceline.ways.pipeline.executor.route import Fault, Opening, Route, Router

logger = logging.getLogger(__name__)

TOLD = (WeightsMismatch, PipelineStalled)
"""Why machines that are there are of no use, by their codes; all else is that none are there."""
LOOK_AGAIN_S = 5.0
"""Between two looks for others while this machine goes on alone."""
ALONE_MOST_S = 600.0
"""See `PipelineLimits.alone_s`: doubled each time, up to this; and from the beginning again after so long with others."""


class Search:
    """For the engine's thread.

    Args:
        router: finds routes over other machines.
        fallback: this machine alone; None: it may not.
        layers: that a route must run, for messages.
    """

    def __init__(self, router: Router, fallback: Fallback | None, layers: str, limits: PipelineLimits, clock: Clock) -> None:
        self._router, self._fallback, self._layers, self._limits, self._clock = router, fallback, layers, limits, clock
        self._until: float | None = None
        self._found_none = False
        """The search before this one."""
        self.opening: Opening | None = None
        """What the last look saw of a route on its way."""
        self._advanced = 0
        """Of that, when it was last seen to rise."""
        self._prepares_until: float | None = None
        """Set while machines have no bytes to count."""
        self._since = clock.monotonic()
        self.reason = self._hint = ""
        """Why no machines were found, as far as it is known, and what would help."""
        self._code = ShardUnavailable.code
        """Of that, as clients are told."""
        self._broke: Fault | None = None
        """What the search is for: how the last route broke."""
        self.is_alone = False
        """The route found last is this machine's own."""
        self._alone_s, self._back_at = 0.0, -inf
        """For how long others were not looked for when this machine last went on alone, and when it no longer did."""
        self._again_at = 0.0

    @property
    def seconds(self) -> float:
        """Since there was a route."""
        return self._clock.monotonic() - self._since

    def lost(self, fault: Fault) -> None:
        """The route broke."""
        self._since, self._broke = self._clock.monotonic(), fault
        if fault.code == ShardCorrupt.code:
            self._router.forget_kv()  # of those behind it, too: it was computed from what is wrong
        self._router.quarantine(fault)
        if self._fallback is not None:
            self._fallback.lost()

    def others_are_back(self, fits: Callable[[Route], bool]) -> Route | None:
        """A route over others, where they can take over from this machine, which goes on alone. Takes no time.

        Args:
            fits: whether what goes on may go on over a route.
        """
        now = self._clock.monotonic()
        if not self.is_alone or now < self._again_at or (self._fallback is not None and self._fallback.is_due):
            return None
        try:
            route = self._router.find(0.0)
        except PipelineError:
            self._again_at = now + LOOK_AGAIN_S
            return None
        if isinstance(route, Opening):
            return None
        self._forget_opening()
        if (fault := route.fault()) is not None:  # it broke while nothing was asked of it
            route.close()
            self._router.forget_kv()
            self._router.quarantine(fault)
            self._again_at = now + LOOK_AGAIN_S
            return None
        if not fits(route):
            route.close()
            self._router.forget_kv()
            self._again_at = now + ALONE_MOST_S
            logger.info(
                "others could run layers %s again, but with other numerics, or less memory for answers than is needed now", self._layers
            )
            return None
        self._back_at, self.is_alone = now, False
        return route

    def look(self) -> Route | None:
        """A route, or None where it is worth looking again. Takes a moment.

        Raises:
            ExecutorUnavailable: it is not.
        """
        self.is_alone = False
        now, fallback = self._clock.monotonic(), self._fallback
        if fallback is not None and fallback.has_begun:
            return self._alone(fallback)
        begins = self._until is None
        if self._until is None:
            self._until = now + self._limits.search_s
        if fallback is not None and fallback.is_due:
            self.reason = "they were lost too often"
            return self._alone(fallback)
        self.reason, self._hint, self._code, any_left = "none answered in time", "", ShardUnavailable.code, True
        try:
            found = self._router.find(self._limits.look_s)
        except PipelineError as error:
            self.reason, self._hint, any_left = error.message, error.hint, False
            self._code = error.code if isinstance(error, TOLD) else ShardUnavailable.code
            self.opening = self._prepares_until = None
        else:
            if not isinstance(found, Opening):
                self._until, self._found_none, self._broke = None, False, None
                self._forget_opening()
                return found
            self._heed(found)
        if self._clock.monotonic() < (self._prepares_until or self._until) and (any_left or not self._found_none):
            if begins and not any_left:
                logger.warning(
                    "looking for machines for layers %s for %g s: %s. %s", self._layers, self._limits.search_s, self.reason, self._hint
                )
            return None
        if fallback is None and not self._found_none:
            logger.warning("no machines are left for layers %s: %s. %s", self._layers, self.reason, self._hint)
        self._until, self._found_none = None, True
        if fallback is not None:
            return self._alone(fallback)
        raise self._unavailable(self.reason)

    def forget_kv(self) -> None:
        """As `Router.forget_kv`."""
        self._router.forget_kv()

    def close(self) -> None:
        """Idempotent; does not wait."""
        if self._fallback is not None:
            self._fallback.close()
        self._router.close()

    def _heed(self, opening: Opening) -> None:
        """Go on for as long as there is progress."""
        self.opening, now = opening, self._clock.monotonic()
        if opening.nodes:
            self.reason = f"{' and '.join(opening.nodes)} loaded nothing more ({opening.percent} % done)"
            self._code = PipelineStalled.code
        if opening.advanced > self._advanced:
            self._advanced = opening.advanced
            self._until = now + self._limits.search_s
        if not opening.counts_no_bytes:
            self._prepares_until = None
        elif self._prepares_until is None:
            self._prepares_until = now + self._limits.prepare_s

    def _forget_opening(self) -> None:
        self.opening, self._advanced, self._prepares_until = None, 0, None

    def _alone(self, fallback: Fallback) -> Route | None:
        try:
            route = fallback.wait(self._limits.look_s)
        except PacelineError as error:
            if self._until is not None and self._clock.monotonic() < self._until:
                logger.warning("layers %s can't run here: %s", self._layers, error)
                return None
            raise self._unavailable(f"{self.reason}; and not here: {error}") from error
        if route is not None:
            logger.warning("no machines are left for layers %s (%s): they run here until others are back", self._layers, self.reason)
            self._until, self._found_none, self._broke, self.is_alone = None, False, None, True
            self._router.forget_kv()
            now = self._clock.monotonic()
            again = now - self._back_at < ALONE_MOST_S
            self._alone_s = min(2 * self._alone_s, ALONE_MOST_S) if again else self._limits.alone_s
            self._again_at = now + self._alone_s
        return route

    def _unavailable(self, reason: str) -> ExecutorUnavailable:
        """What requests end with: that no machines are there, unless it is known why those that are there are of no use."""
        code, broke, self._broke = self._code, self._broke, None
        if code == ShardUnavailable.code and broke is not None and broke.code == PipelineStalled.code:
            code, reason = broke.code, f"{broke.message}; and in its place: {reason}"
        return ExecutorUnavailable(
            f"No machines are left for layers {self._layers}: {reason}", self._hint or "Start one that has them.", code=code
        )
