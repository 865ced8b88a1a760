"""What a node says of the prefixes that it used last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.machines import sensible
from paceline.net.mapper import split_bytes
from paceline.net.wire import kv_pb2 as wire
from paceline.ways.kv.price import MARK_BYTES

MOST_TOLD: Final = 64
"""Prefixes that are taken of one message."""
MOST_SPANS: Final = 4096
"""Of one message that is believed: more than any model has layers."""


@dataclass(frozen=True, slots=True)
class ToldPrefixes:
    """What a node said of its prefixes last."""

    version: int
    block_tokens: int
    layout: bytes
    marks: frozenset[bytes]
    prefills: bool
    spans: tuple[LayerSpan, ...] = ()
    """Where its layers lie; none: with it."""
    prefills_in_parts: bool = False
    prompts_per_s: float = 0.0
    """Tokens, where several machines compute them; 0: as its card says."""


def read_told(said: wire.WatchPrefixesResponse) -> ToldPrefixes:
    """A message of a node. Spans that are no cut of a model, each behind the one before it, or too many, are as if it had told nothing."""
    marks = frozenset(split_bytes(said.marks[: MOST_TOLD * MARK_BYTES], MARK_BYTES))
    spans = tuple(LayerSpan(NodeId(span.node_id), LayerRange(span.first_layer, span.stop_layer)) for span in said.spans[: MOST_SPANS + 1])
    stops = [0, *(span.layers.stop for span in spans)]
    if len(spans) > MOST_SPANS or any(
        span.layers.start != stop or span.layers.stop <= stop for span, stop in zip(spans, stops, strict=False)
    ):
        return ToldPrefixes(said.version, said.block_tokens, said.layout, frozenset(), prefills=False)
    rate = sensible(said.prompts_per_s, 1e-6, 1e9) or 0.0
    return ToldPrefixes(said.version, said.block_tokens, said.layout, marks, said.prefills, spans, said.prefills_in_parts, rate)
