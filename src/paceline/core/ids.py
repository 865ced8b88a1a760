"""Distinct id types, so that a block can't be passed where a sequence is meant; and the trust levels of a fleet's members."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NewType

_SHA256 = re.compile(r"[0-9a-f]{64}")

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


def is_sha256(text: str) -> bool:
    """Return whether `text` is a SHA-256 in lower-case hex, as the digest of a model or a file is."""
    return _SHA256.fullmatch(text) is not None


class Trust(StrEnum):
    """How far a member of the fleet is trusted, from the least to the most."""

    GUEST = "guest"
    MEMBER = "member"
    """The default, and the level of certificates that name none."""
    TRUSTED = "trusted"

    def reaches(self, least: Trust) -> bool:
        """Return whether this level is `least` or higher."""
        order = list(Trust)
        return order.index(self) >= order.index(least)
