"""This machine alone, in place of those that were lost: the layers that others ran are loaded here, beside the thread that waits for them.

Law: nothing is loaded before it is wanted, and what was loaded in vain is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.parallel.route import Route

FORGET_S = 600.0
"""A loss so long ago does not count any more. Raising it: machines that go away now and then are given up on sooner."""


class Fallback:
    """For the engine's thread.

    Args:
        load: the route that stays here; may take its time.
        after: losses that end the search for other machines; None: the search lasts its time.
    """

    def __init__(self, load: Callable[[], Route], after: int | None, clock: Clock) -> None:
        self._load, self._after, self._clock = load, after, clock
        self._losses: deque[float] = deque(maxlen=after or 1)
        self._loading: Future[Route] | None = None

    def lost(self) -> None:
        """A route over other machines broke."""
        self._losses.append(self._clock.monotonic())

    @property
    def is_due(self) -> bool:
        """Whether so many were lost that no others are to be looked for."""
        return len(self._losses) == self._after and self._clock.monotonic() - self._losses[0] < FORGET_S

    @property
    def has_begun(self) -> bool:
        """Whether it is being loaded."""
        return self._loading is not None

    def wait(self, seconds: float) -> Route | None:
        """The route, or None while it is being loaded.

        Raises:
            PacelineError: it can't be had.
        """
        if self._loading is None:
            self._loading = Future()
            threading.Thread(target=self._run, args=(self._loading,), name="paceline-fallback", daemon=True).start()
        if not wait((self._loading,), seconds).done:
            return None
        loading, self._loading = self._loading, None
        if loading.exception() is not None:
            self._losses.clear()  # others are to be looked for after all
        try:
            return loading.result()
        except (MemoryError, OSError) as error:
            raise PacelineError(f"The layers can't be loaded here: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Idempotent; does not wait."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.add_done_callback(_discard)

    def _run(self, loading: Future[Route]) -> None:
        try:
            loading.set_result(self._load())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            loading.set_exception(error)


def _discard(loading: Future[Route]) -> None:
    if loading.exception() is None:
        loading.result().close()
