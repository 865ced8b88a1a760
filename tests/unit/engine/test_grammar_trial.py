from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.fakes.null_backend import ByteVocabulary

from paceline.core.errors import InvalidRequest, Overloaded
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine import grammar_trial
from paceline.engine.grammar import Grammars
from paceline.engine.grammar_trial import AT_ONCE, MOST_WAITING, GrammarTrial, trial
from paceline.engine.refusals import GrammarRefusal

FORM = Grammar(GrammarKind.JSON_SCHEMA, "{}")


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_only_so_many_forms_wait_to_be_tried_and_each_gives_its_place_back(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, go, waits = AT_ONCE + MOST_WAITING, threading.Event(), threading.Semaphore(0)

    def refusal(_: GrammarTrial, __: Grammar) -> GrammarRefusal | None:
        go.wait(60)
        if ends == "badly":
            raise OSError("no process can be started")
        return None

    class Room(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            got = super().acquire(blocking, timeout)
            waits.release()
            return got

    monkeypatch.setattr(GrammarTrial, "refusal", refusal)
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


MINUTES = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}
BAD = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}
AT = "response_format"


def schema(**properties: Any) -> dict[str, Any]:
    return {"$comment": AT, "type": "object", "properties": properties}


def in_calls(schema: Any, begin: str = "") -> Grammar:
    return Grammar(GrammarKind.TOOLS, f"start: {begin} r0\nr0: %json {json.dumps(schema)}")


@pytest.mark.parametrize(
    ("form", "at"),
    [
        (schema(bad=BAD), f"{AT}.properties.bad.minProperties"),
        (schema(evil=MINUTES, bad=BAD), AT),
        (in_calls(schema(bad=BAD)), f"{AT}.properties.bad.minProperties"),
        (in_calls(schema(bad=BAD), "<[151645]>"), f"{AT}.properties.bad.minProperties"),
        (in_calls(schema(evil=MINUTES, bad=BAD), "<[^151645,200000]>"), AT),
    ],
)
def test_the_server_compiles_no_part_of_a_refused_form(form: Any, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts cost minutes where the whole is refused at once. Behind a timeout the refusal has no path within the schema."""
    monkeypatch.setattr("paceline.engine.grammar._compiled", lambda *_: pytest.fail("compiled in the process that serves"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    if not isinstance(form, Grammar):
        form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(form))
    with pytest.raises(InvalidRequest) as refused:
        Grammars(ByteVocabulary(300)).prepare(form)
    assert refused.value.field == at
    assert "minProperties" in refused.value.message


@pytest.mark.parametrize("named", ["<[299]>", "<[^299]>", "<[280-299]>", "<[280,299]>"])
def test_tokens_of_the_model_are_tried_as_tokens(named: str) -> None:
    assert trial(Grammar(GrammarKind.LARK, f'start: {named} "<[7]>"')) is None


def test_a_child_serves_on_behind_a_refusal() -> None:
    child = GrammarTrial()
    refused = child.refusal(Grammar(GrammarKind.REGEX, "("))
    assert refused
    assert child.refusal(FORM) is None
