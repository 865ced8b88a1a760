"""The KV blocks of one runner, leased to its sessions: each has a run of its own, and gives all of it back at once."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_BACK = 16
"""Blocks, of 16 tokens, for a session that comes later, where the first would take all: a short answer, or the prompt rows of a spot check. Raising it shortens the
context of a session that is alone."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks [base, base + n_blocks) of a runner's pool."""

    base: int
    n_blocks: int


class Leases:
    """Which lease has which blocks of a pool.

    Args:
        n_blocks: of the pool.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._held: list[Lease] = []

    @property
    def free(self) -> int:
        return self.n_blocks - sum(lease.n_blocks for lease in self._held)

    def take(self, wanted: int, least: int, kept_back: int) -> Lease | None:
        """Lease adjacent blocks: as many as are wanted, or what is free; sessions that come later get the rest.

        Args:
            wanted: no more.
            least: no fewer.
            kept_back: for sessions that may still come, if they leave this one half.

        Returns:
            None where there are not as many as `least` together.
        """
        base, room = self._widest_gap()
        if room < least:
            return None
        lease = Lease(base, min(room, wanted, max(least, self.free - kept_back, self.free // 2)))
        self._held.append(lease)
        self._held.sort(key=lambda held: held.base)
        return lease

    def give_back(self, lease: Lease) -> None:
        """No session uses these any more."""
        self._held.remove(lease)

    def _widest_gap(self) -> tuple[int, int]:
        """First block and size of the widest run that is free."""
        gaps: list[tuple[int, int]] = []
        at = 0
        for lease in self._held:
            gaps.append((at, lease.base - at))
            at = lease.base + lease.n_blocks
        gaps.append((at, self.n_blocks - at))
        return max(gaps, key=lambda gap: gap[1])
