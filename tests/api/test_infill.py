"""Texts filled in between two others."""

from __future__ import annotations

from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference
from tests.fakes.served import Served

from .conftest import Serve

MARKS = {"<fim_prefix>": ord("{"), "<fim_suffix>": ord("|"), "<fim_middle>": ord("}")}


class Filling(ByteTokenizer):
    """One whose bytes mark the parts, and that wants `^` before a text."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids = [MARKS[text]] if text in MARKS else super().encode(text)
        return [ord("^"), *ids] if add_special else ids


def test_the_marks_stand_where_the_model_wants_them(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(tokenizer=Filling()))
    body = {"model": "echo", "prompt": ["ab", "c"], "suffix": "yz", "max_tokens": 8}
    answer = served.http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["^{ab|yz}", "^{c|yz}^"]
    assert served.http.post("/v1/completions", json=body | {"echo": True}).json()["error"]["param"] == "echo"


def test_a_model_without_them_refuses_by_name(shared: Served[ScriptedInference]) -> None:
    error = shared.http.post("/v1/completions", json={"model": "echo", "prompt": "a", "suffix": "b"}).json()["error"]
    assert error["param"] == "suffix"
    assert shared.http.post("/v1/completions", json={"model": "echo", "prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200
