"""Cards of machines that draft for `A`'s model."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.ids import NodeId
from paceline.core.model import ModelRef
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.ways.draft.finding import Verifier

SHAPE = ModelShape(12, 512, 1 << 22, 1 << 24, 512, 8192)
VERIFIER = ModelOffer("big", Role.VERIFIER, "int4", 50.0, 400.0, "d" * 64, warm=True, shape=SHAPE, vocabulary="v")
SMALL = replace(VERIFIER, model_id="small", role=Role.PROPOSER, tokens_per_second=200.0, digest="e" * 64)
LOOKUP = ModelOffer("ngram", Role.PROPOSER, "")
"""What older nodes offer: each looks its own prompts up."""
A = Verifier(NodeId("a"), ModelRef("d" * 64, "int4"), "v")


def card(name: str, *offers: ModelOffer, rtt_s: float = 0.001) -> NodeCard:
    links = () if name == "a" else (Link(NodeId("a"), "127.0.0.1:1", rtt_s, 1e8),)
    return NodeCard(
        NodeId(name),
        1,
        ("127.0.0.1:1",),
        name.encode(),
        60,
        0,
        memory_total_bytes=1 << 34,
        memory_free_bytes=1 << 33,
        models=offers,
        links=links,
    )
