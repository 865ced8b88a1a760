"""Distinct id types, so that a block can't be passed where a sequence is meant; and how far a member of a fleet is trusted."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
"""One client request. Unique within a process."""

SequenceId = NewType("SequenceId", int)
"""One generated sequence of a request (a request with `n=3` has three). Never reused within a process."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in one pool. Local to one executor."""

BatchId = NewType("BatchId", int)
"""A step batch; strictly increasing within one engine."""

NodeId = NewType("NodeId", str)
"""One machine of a fleet: the common name of its certificate. Stable across restarts."""


class Trust(StrEnum):
    """From the least to the most."""

    GUEST = "guest"
    MEMBER = "member"
    """The default, and what certificates without a level mean."""
    TRUSTED = "trusted"

    def reaches(self, least: Trust) -> bool:
        """Whether it is as much as `least`, or more."""
        order = list(Trust)
        return order.index(self) >= order.index(least)
