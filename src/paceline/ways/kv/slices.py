"""Which part of a block of KV goes from which holder of it to which, where both sides share it among different numbers of ranks or stages.

Law: pure. Ranks share KV heads, and stages layers; either is an interval, so one arithmetic serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvSlice:
    """Heads, or layers, that one holder sends another."""

    source: int
    """Place of the holder that sends."""
    target: int
    part: range
    """As the whole model counts them."""
    source_at: int
    """Where they begin in what the sender holds."""
    target_at: int


def kv_slices(sources: Sequence[range], targets: Sequence[range]) -> tuple[KvSlice, ...]:
    """What each target is sent, by target and place: all that it holds, each head or layer once. Of sources that hold the same, targets take turns.

    Raises:
        ValueError: no source holds a part of what a target does.
    """
    found: list[KvSlice] = []
    for target, wanted in enumerate(targets):
        at = wanted.start
        while at < wanted.stop:
            holders = [source for source, held in enumerate(sources) if at in held]
            if not holders:
                raise ValueError(f"no source has {at} of {wanted}")
            source = holders[target % len(holders)]
            part = range(at, min(wanted.stop, sources[source].stop))
            found.append(KvSlice(source, target, part, at - sources[source].start, at - wanted.start))
            at = part.stop
    return tuple(found)
