"""How often a peer may ask. Each has a bucket of `burst` requests that refills over `period_s`; an empty one is a typed refusal."""

from __future__ import annotations

from paceline.core.errors import PeerFloods


class Shares:
    """Buckets by peer, for at most `max_peers` of them: the one that asked longest ago is forgotten, with a bucket that is full by then."""

    def __init__(self, burst: int, period_s: float, max_peers: int) -> None:
        self._burst, self._period_s, self._max_peers = burst, period_s, max_peers
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, peer: str, now: float) -> None:
        """Count one request of `peer`; raise `PeerFloods` where it has none left."""
        left, since = self._left.pop(peer, (float(self._burst), now))
        left = min(float(self._burst), left + (now - since) * self._burst / self._period_s)
        refused = left < 1
        self._left[peer] = (left if refused else left - 1, now)
        if len(self._left) > self._max_peers:
            del self._left[next(iter(self._left))]
        if refused:
            raise PeerFloods(
                f"{peer} asked more than {self._burst} times in {self._period_s:g} s",
                "Look for a second process on that machine, or one with another preset",
                retry_after_s=(1 - left) * self._period_s / self._burst,
            )

    def __len__(self) -> int:
        return len(self._left)
