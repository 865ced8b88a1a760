"""Leases belong to spans: those of a machine that is lost are void, the others are as good as before."""

from __future__ import annotations

from paceline.core.errors import LostSpan
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.ways.pipeline.executor.route import SpanLease, SpanLeases

A, B = NodeId("a"), NodeId("b")


def leases() -> SpanLeases:
    held = SpanLeases()
    held.take([SpanLease(B, LayerRange(4, 9), 64), SpanLease(A, LayerRange(2, 4), 96), SpanLease(A, LayerRange(9, 12), 80)])
    return held


def test_sequences_have_the_room_that_every_span_has() -> None:
    held = leases()
    assert [lease.layers.start for lease in held.held] == [2, 4, 9]
    assert held.kv_tokens == 64
    assert SpanLeases().kv_tokens == 0


def test_what_a_lost_machine_held_is_void_and_nothing_else() -> None:
    held = leases()
    assert held.void(A) == (LostSpan(2, 4, "a"), LostSpan(9, 12, "a"))
    assert held.held == (SpanLease(B, LayerRange(4, 9), 64),)
    assert held.void(A) == ()
    held.take([SpanLease(NodeId("c"), LayerRange(2, 4), 32)])
    assert held.kv_tokens == 32
    assert [span.holder for span in held.void(None)] == ["c", "b"]
    assert not held.held
