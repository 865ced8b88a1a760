from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.core.errors import Overloaded
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine import grammar_trial
from paceline.engine.grammar_trial import AT_ONCE, MOST_WAITING, GrammarTrial, trial

FORM = Grammar(GrammarKind.JSON_SCHEMA, "{}")


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_only_so_many_forms_wait_to_be_tried_and_each_gives_its_place_back(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, go, waits = AT_ONCE + MOST_WAITING, threading.Event(), threading.Semaphore(0)

    def survives(_: GrammarTrial, __: Grammar) -> bool:
        go.wait(60)
        if ends == "badly":
            raise OSError("no process can be started")
        return True

    class Room(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            got = super().acquire(blocking, timeout)
            waits.release()
            return got

    monkeypatch.setattr(GrammarTrial, "survives", survives)
    monkeypatch.setattr(grammar_trial, "_ROOM", Room(most))
    for _ in range(2):
        go.clear()
        with ThreadPoolExecutor(most) as pool:
            tried = [pool.submit(trial, FORM) for _ in range(most)]
            for _ in range(most):
                assert waits.acquire(timeout=60)
            with pytest.raises(Overloaded) as refused:
                trial(FORM)
            assert waits.acquire(timeout=60)
            go.set()
        assert refused.value.retry_after_s
        assert [one.exception() is None for one in tried] == [ends == "well"] * most
