"""How long blocks are waited for: as long as they come sooner than they are computed, and no longer."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from tests.fakes.clock import FakeClock

from paceline.core.ids import BlockId, NodeId
from paceline.core.model import LayerRange
from paceline.machine.kv_spans import KvPart
from paceline.ways.kv.fetching import KvPeer, PeerFetch
from paceline.ways.kv.patience import BESIDE, LEAST_S, MOST_SILENCE_S, SILENCE_S, Patience, by_silence
from paceline.ways.kv.price import UNPRICED

HERE_S = 0.8
"""One block of 16 tokens, as a processor computes them of a model of 8B parameters."""
MANY = 512
"""Blocks of 8,192 tokens."""


def waited_s(patience: Patience, comes_at: list[float]) -> float:
    """Until all blocks are here, or it is over."""
    for last, now in pairwise([0.0, *comes_at]):
        assert patience.until > last
        if now >= patience.until:
            return patience.until
        patience.came(now)
    return comes_at[-1]


def test_a_prompt_that_takes_minutes_is_waited_for_while_its_blocks_come() -> None:
    in_bursts = [20.0 * (1 + block // 32) for block in range(MANY)]  # 32 blocks every 20 s, where here they take 25.6
    assert in_bursts[-1] == 320 > 7 * MOST_SILENCE_S
    assert waited_s(Patience(0.0, HERE_S, MANY, at_once=32), in_bursts) == 320
    evenly = [0.7 * (1 + block) for block in range(MANY)]
    assert waited_s(Patience(0.0, HERE_S, MANY), evenly) == evenly[-1]


@pytest.mark.parametrize("after", [0, 1, 100, MANY - 33])
def test_one_that_goes_silent_is_left_after_one_silence_however_fast_it_was(after: int) -> None:
    patience = Patience(0.0, HERE_S, MANY, at_once=32)
    comes = [0.01 * (1 + block) for block in range(after)]
    over = waited_s(patience, [*comes, 1e6])
    assert over - (comes[-1] if comes else 0) == pytest.approx(BESIDE * HERE_S * 32)


@pytest.mark.parametrize("slower", [1.5, 2.0, 10.0])
@pytest.mark.parametrize("fast", [0, 400])
def test_one_that_is_slower_than_this_machine_is_left_with_what_it_sent(fast: int, slower: float) -> None:
    patience = Patience(0.0, HERE_S, MANY)
    comes = [0.01 * (1 + block) for block in range(fast)]
    comes += [fast * 0.01 + slower * HERE_S * (1 + block) for block in range(MANY - fast)]
    over = waited_s(patience, comes)
    assert over < comes[-1]
    # What was saved up is one silence; beyond it, each block had its time.
    sent = sum(at < over for at in comes) - fast
    assert over - fast * 0.01 <= SILENCE_S + BESIDE * HERE_S * sent + 0.01


def test_no_wait_is_longer_than_computing_what_is_left() -> None:
    for left in (1, 3, 8, 30):
        patience = Patience(0.0, HERE_S, left, at_once=32)
        assert patience.until == pytest.approx(min(MOST_SILENCE_S, BESIDE * max(LEAST_S, HERE_S * left)))
    patience = Patience(0.0, HERE_S, 30, at_once=32)
    for left in range(29, 0, -1):
        patience.came(now := 0.1 * (30 - left))
        assert patience.until - now <= BESIDE * max(LEAST_S, HERE_S * left) + 1e-9


def test_what_comes_behind_those_that_were_likely_is_waited_for_a_moment_each() -> None:
    patience = Patience(0.0, HERE_S, 1)
    assert waited_s(patience, [0.5, 1.0, 1.5, 1e6]) == pytest.approx(1.5 + BESIDE * LEAST_S)


def test_a_fetch_is_ended_by_its_watchdog_once_no_block_came_for_too_long() -> None:
    clock, filled = FakeClock(), list[BlockId]()
    blocks = [BlockId(block) for block in range(MANY)]
    part = KvPart("d", "n", b"", LayerRange(0, 1), 4)
    peer = KvPeer(NodeId("p"), b"", (), frozenset(), UNPRICED)
    patience = Patience(clock.monotonic(), HERE_S, MANY, at_once=32)
    keys = [bytes(16)] * MANY
    fetch = PeerFetch(peer, part, keys, blocks, MANY, lambda block, _: filled.append(block), int, patience, now=clock.monotonic)
    for block in range(300):
        clock.advance(0.9)
        assert fetch.fill(memoryview(b"data"))
        assert fetch.look() > 0, block
    assert not fetch.is_over, "four and a half minutes, and blocks come"
    clock.advance(fetch.look())
    assert fetch.look() <= 0
    assert (fetch.is_over, fetch.is_late, fetch.filled) == (True, True, 300)
    assert not fetch.fill(memoryview(b"late"))
    assert filled == blocks[:300]


def test_where_a_router_decided_silence_alone_is_bounded() -> None:
    comes = [44.0 * (1 + block) for block in range(10)]
    assert waited_s(by_silence(0.0), comes) == comes[-1]
    assert waited_s(by_silence(0.0), [44.0, 44.0 + MOST_SILENCE_S]) == 44.0 + MOST_SILENCE_S


def test_who_must_hear_in_time_hears_in_time() -> None:
    patience = Patience(0.0, inf, 100, within_s=30.0)
    assert waited_s(patience, [1.0 * (1 + block) for block in range(100)]) == 30.0
