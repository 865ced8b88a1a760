"""How far a load is: bytes its source examined, bytes fetched, bytes put into memory, and those of the loads it waits for.

Law: bytes done only rise, so that a caller can tell a load that goes on from one that hangs. Counted on the event loop and in threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Phase:
    """One thing that is done with all bytes."""

    done: int = 0
    total: int = 0

    def show(self, done: int, total: int) -> None:
        """As `LoadProgress`."""
        self.done, self.total = max(self.done, done), max(self.total, total)


@dataclass(slots=True)
class LoadMeter:
    """Of one load."""

    examined: Phase = field(default_factory=Phase)
    """Files that a source reads, to describe them for the first time."""
    fetched: Phase = field(default_factory=Phase)
    packed: Phase = field(default_factory=Phase)
    _fetches: list[Phase] = field(default_factory=list[Phase])
    _ahead: list[LoadMeter] = field(default_factory=list["LoadMeter"])

    def wait_for(self, other: LoadMeter) -> None:
        """Another load comes first: its bytes count as this one's."""
        self._ahead.append(other)

    def wait_for_fetch(self, other: LoadMeter) -> None:
        """Another load's fetch comes first: its bytes count as this one's."""
        self._fetches += (other.examined, other.fetched)

    def end(self) -> None:
        """Nothing more is fetched or packed: the load is over, or was given up."""
        for phase in (self.examined, self.fetched, self.packed):
            phase.done = phase.total

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes done, of bytes; 0 of 0 while nothing is known. What is fetched is packed afterwards, so it counts twice."""
        phases = (self.examined, self.fetched, self.packed, *self._fetches)
        done = sum(phase.done for phase in phases)
        total = sum(phase.total for phase in phases) + (0 if self.packed.total else self.fetched.total)
        for other in self._ahead:
            more_done, more_total = other.progress
            done, total = done + more_done, total + more_total
        return done, total
