"""Turns that are taken only where nobody wants them hold nobody up, and give back nothing that is another's."""

from __future__ import annotations

import threading

import pytest

from paceline.core.errors import PipelineStalled
from paceline.ways.pipeline.host.session import Turns


def test_a_free_turn_is_held_and_given_back() -> None:
    turns = Turns()
    with turns.take_free() as mine:
        assert mine
        with pytest.raises(PipelineStalled), turns.take(0.001):
            pass
    with turns.take(0.001):
        pass


def test_a_turn_that_another_has_is_left_alone() -> None:
    turns = Turns()
    with turns.take(1.0):
        with turns.take_free() as mine:
            assert not mine
        with pytest.raises(PipelineStalled), turns.take(0.001):
            pass


def test_whoever_waits_for_a_free_turn_s_end_comes_next() -> None:
    turns, came = Turns(), threading.Event()

    def wait() -> None:
        with turns.take(20.0):
            came.set()

    thread = threading.Thread(target=wait)
    with turns.take_free() as mine:
        assert mine
        thread.start()
        while not turns.waiting:
            threading.Event().wait(0.001)
        assert not came.is_set()
    assert came.wait(20.0)
    thread.join()
