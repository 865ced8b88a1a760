"""Turns at computing pass from one thread to the next."""

from __future__ import annotations

import threading

import pytest

from paceline.core.errors import PipelineStalled
from paceline.ways.pipeline.host.session import FairLock


def test_a_turn_that_another_thread_has_is_waited_for_within_the_bound() -> None:
    lock = FairLock()
    with lock.hold(1.0), pytest.raises(PipelineStalled), lock.hold(0.001):
        pass
    with lock.hold(0.001):
        pass


def test_a_waiting_thread_gets_the_next_turn() -> None:
    lock, came = FairLock(), threading.Event()

    def wait() -> None:
        with lock.hold(20.0):
            came.set()

    thread = threading.Thread(target=wait)
    with lock.hold(1.0):
        thread.start()
        while not lock.waiting:
            threading.Event().wait(0.001)
        assert not came.is_set()
    assert came.wait(20.0)
    thread.join()
