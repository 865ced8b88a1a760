"""Peers that are asked for nothing for a while."""

from paceline.core.ids import NodeId
from paceline.ways.kv.rests import Rests

P, Q = NodeId("p"), NodeId("q")


def test_a_process_rests_and_not_the_one_that_its_node_starts_next() -> None:
    rests = Rests()
    rests.begin(P, b"first", 10.0)
    assert rests.has(P, b"first", 9.9)
    assert not rests.has(P, b"second", 9.9)
    assert not rests.has(Q, b"first", 9.9)
    assert not rests.has(P, b"first", 10.0)


def test_a_node_that_rests_does_so_whatever_it_starts() -> None:
    rests = Rests()
    rests.begin(P, None, 600.0)
    assert rests.has(P, b"first", 10.0)
    assert rests.has(P, b"second", 599.0)
    assert not rests.has(P, b"second", 600.0)
