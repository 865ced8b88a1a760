"""Leases of prompts computed for others: ends are final, epochs only rise, and nothing lives longer than it may."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidRequest, Overloaded
from paceline.core.ids import NodeId
from paceline.net.trust.handlers import MOST_OPEN_STREAMS
from paceline.ways.kv.lease import LEASE_S, MOST_FENCES, MOST_LEASES, MOST_ROUTED, KvLeases, LeaseEnd

D, E, F = NodeId("d"), NodeId("e"), NodeId("f")


def test_a_lease_lives_as_long_as_heartbeats_come() -> None:
    leases = KvLeases()
    lease = leases.take_lease(D, "r", 1, LEASE_S, 0.0)
    assert lease.heartbeat("r", 1, 20.0)
    leases.expire(49.9)
    assert lease.ended is None
    assert not lease.heartbeat("r", 1, 50.0), "it came too late"
    leases.expire(50.0)
    assert lease.ended is LeaseEnd.EXPIRED
    lease.end(LeaseEnd.WHOLE)
    assert lease.ended is LeaseEnd.EXPIRED, "the first reason stands"


def test_a_heartbeat_of_another_request_or_epoch_is_none() -> None:
    lease = KvLeases().take_lease(D, "r", 5, 10.0, 0.0)
    assert not lease.heartbeat("r", 4, 1.0)
    assert not lease.heartbeat("r", 6, 1.0)
    assert not lease.heartbeat("q", 5, 1.0)
    assert lease.until_s == 10.0


def test_nobody_gets_a_longer_lease_than_there_is() -> None:
    assert KvLeases().take_lease(D, "r", 1, 1e9, 0.0).until_s == LEASE_S


def test_a_later_epoch_ends_the_earlier_and_an_earlier_one_is_refused() -> None:
    leases = KvLeases()
    first = leases.take_lease(D, "r", 1, 10.0, 0.0)
    second = leases.take_lease(D, "r", 2, 10.0, 0.0)
    assert first.ended is LeaseEnd.FENCED
    leases.give_back(first)
    assert leases.live == {(D, "r"): second}, "what ended takes nothing from what followed"
    for epoch in (1, 2):
        with pytest.raises(InvalidRequest):
            leases.take_lease(D, "r", epoch, 10.0, 0.0)
    leases.give_back(second)
    with pytest.raises(InvalidRequest):
        leases.take_lease(D, "r", 2, 10.0, 0.0)  # the fence outlives the lease
    leases.take_lease(E, "r", 1, 10.0, 0.0)  # another node's request of that name is another


def test_they_are_bounded_for_each_and_for_all_and_so_are_fences() -> None:
    leases = KvLeases()
    held = [leases.take_lease(D, str(number), 1, 10.0, 0.0) for number in range(MOST_LEASES // 2)]
    with pytest.raises(Overloaded):
        leases.take_lease(D, "more", 1, 10.0, 0.0)
    held += [leases.take_lease(E, str(number), 1, 10.0, 0.0) for number in range(MOST_LEASES // 2)]
    with pytest.raises(Overloaded):
        leases.take_lease(F, "more", 1, 10.0, 0.0)
    leases.take_lease(E, "0", 2, 10.0, 0.0)  # in place of its own
    for lease in held:
        leases.give_back(lease)
    leases.take_lease(F, "more", 1, 10.0, 0.0)
    for number in range(2 * MOST_FENCES):
        leases.give_back(leases.take_lease(D, f"r{number}", 1, 10.0, 0.0))
    assert len(leases._fences) == MOST_FENCES  # pyright: ignore[reportPrivateUsage]


def test_a_node_may_have_a_stream_open_for_each_prompt_that_it_leases() -> None:
    assert MOST_OPEN_STREAMS > MOST_ROUTED // 2 + MOST_LEASES // 2
