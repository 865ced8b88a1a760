"""Turns that are taken only where nobody wants them hold nobody up, and give back nothing that is another's."""

from __future__ import annotations

import threading

import pytest

from paceline.core.errors import PipelineStalled
from paceline.ways.pipeline.host.session import FairLock


def test_a_free_turn_is_held_and_given_back() -> None:
    lock = FairLock()
    with lock.hold_if_free() as mine:
        assert mine
        with pytest.raises(PipelineStalled), lock.hold(0.001):
            pass
    with lock.hold(0.001):
        pass


def test_a_turn_that_another_has_is_left_alone() -> None:
    lock = FairLock()
    with lock.hold(1.0):
        with lock.hold_if_free() as mine:
            assert not mine
        with pytest.raises(PipelineStalled), lock.hold(0.001):
            pass


def test_whoever_waits_for_a_free_turn_s_end_comes_next() -> None:
    lock, came = FairLock(), threading.Event()

    def wait() -> None:
        with lock.hold(20.0):
            came.set()

    thread = threading.Thread(target=wait)
    with lock.hold_if_free() as mine:
        assert mine
        thread.start()
        while not lock.waiting:
            threading.Event().wait(0.001)
        assert not came.is_set()
    assert came.wait(20.0)
    thread.join()
