"""Which requests are run in which configurations.

A round of a proposer and a number of stages is one configuration of a request at a time and one of sixteen at once. From round to round both have
other memory and other requests: one round each shows every memory with either number of stages, six show all there is. Who is to be preempted
has memory for a few of the sixteen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PROPOSERS = ("ngram", "model", "jacobi", "knowing", "auto")
"""The one that knows the answer uses it badly: see `UnsteadySource`. auto: all of them."""
STAGES = (1, 2)
PLAIN, HITS, PREEMPTED = "plain", "prefix hits", "preempted"
CROWD, FEW = 16, 4
"""Requests of a round that run at once, and those that run one after the other."""
ROUND = CROWD + FEW
DISTINCT = 5
"""Rounds in which no request comes twice. With so many, none comes twice into one configuration in ten rounds either."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """How requests are run."""

    proposer: str
    stages: int
    batch: int
    memory: str = PLAIN


def rounds_of(pairs: int) -> int:
    """Rounds of each proposer and number of stages, so that there are so many pairs at least."""
    return -(-pairs // (ROUND * len(PROPOSERS) * len(STAGES)))


def runs(proposer: str, stages: int, rounds: int) -> Iterator[tuple[Configuration, range]]:
    """Configurations, and the places of their requests among all, which begin anew where they end."""
    begin = PROPOSERS.index(proposer) + len(PROPOSERS) * STAGES.index(stages)
    for turn in range(begin, begin + rounds):
        first = turn * ROUND
        yield Configuration(proposer, stages, 1, (PLAIN, HITS)[turn % 2]), range(first, first + FEW)
        yield Configuration(proposer, stages, CROWD, (PLAIN, HITS, PREEMPTED)[turn % 3]), range(first + FEW, first + ROUND)
