"""/v1/rerank, in the form that Jina, Cohere, llama-server and vLLM share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from tests.fakes.scripted_encoder import ScriptedEncoders
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.via import VIA_HEADER
from paceline.server.embeddings import MOST_INPUTS

Live = Served[ScriptedInference]
ASK: dict[str, Any] = {"model": "judge", "query": "a", "documents": ["b", "aa", {"text": "aba a"}, "a"]}


@pytest.fixture(scope="module")
def encoders() -> Generator[ScriptedEncoders]:
    made = ScriptedEncoders()
    yield made
    made.close()


@pytest.fixture(scope="module")
def live(encoders: ScriptedEncoders) -> Generator[Live]:
    served = Served(ScriptedInference(), encoders=encoders)
    yield served
    served.close()


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_results_are_in_order_of_their_scores(live: Live, path: str) -> None:
    answer = live.http.post(path, json=ASK).json()
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [(2, 3.0), (1, 2.0), (3, 1.0), (0, 0.0)]
    assert (answer["model"], answer["usage"]) == ("judge", {"prompt_tokens": 9, "total_tokens": 9})
    assert all("document" not in one for one in answer["results"])


@pytest.mark.parametrize(("top_n", "indices"), [(1, [2]), (3, [2, 1, 3]), (99, [2, 1, 3, 0])])
def test_only_the_best_come_with_their_documents_if_wanted(live: Live, top_n: int, indices: list[int]) -> None:
    answer = live.http.post("/v1/rerank", json={**ASK, "top_n": top_n, "return_documents": True}).json()
    texts = ["b", "aa", "aba a", "a"]
    assert [(one["index"], one["document"]) for one in answer["results"]] == [(index, {"text": texts[index]}) for index in indices]


def test_equal_texts_stay_in_the_order_of_the_request(live: Live) -> None:
    answer = live.http.post("/v1/rerank", json={**ASK, "documents": ["a"] * MOST_INPUTS}).json()
    assert [one["index"] for one in answer["results"]] == list(range(MOST_INPUTS))


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"documents": []}, 400, "documents"),
        ({"documents": ["a"] * (MOST_INPUTS + 1)}, 400, "documents"),
        ({"documents": ["a", ""]}, 400, "documents[1]"),
        ({"documents": ["a", 7]}, 400, "documents[1]"),
        ({"documents": [{"text": "a", "title": "b"}]}, 400, "documents[0].title"),
        ({"documents": [{"body": "a"}]}, 400, "documents[0].text"),
        ({"documents": "a"}, 400, "documents"),
        ({"query": ""}, 400, "query"),
        ({"query": None}, 400, "query"),
        ({"top_n": 0}, 400, "top_n"),
        ({"model": "echo"}, 400, "model"),
        ({"model": "counts"}, 400, "model"),
        ({"model": "none"}, 404, "model"),
    ],
)
def test_what_cannot_be_is_refused_by_name(live: Live, changed: dict[str, Any], status: int, param: str | None) -> None:
    answer = live.http.post("/v1/rerank", json={**ASK, **changed})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    if param == "model":
        assert "judge" in error["message"]


def test_a_model_that_ranks_makes_no_vectors_and_answers_no_chat(live: Live) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/api/embed", {"input": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = live.http.post(path, json={"model": "judge", **body})
        assert answer.status_code == 400, path
    listed = {one["id"]: one.get("tasks") for one in live.http.get("/v1/models").json()["data"]}
    assert listed == {"echo": None, "counts": ["embeddings"], "judge": ["rerank"]}
    assert live.http.get("/v1/models/Judge:latest").json()["tasks"] == ["rerank"]
    assert live.http.post("/api/show", json={"model": "judge"}).json()["capabilities"] == ["rerank"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/rerank", ASK), ("/v1/embeddings", {"model": "counts", "input": "a"}), ("/api/embed", {"model": "counts", "input": "a"})],
)
def test_marks_of_nodes_are_passed_on_and_checked(live: Live, encoders: ScriptedEncoders, path: str, body: dict[str, Any]) -> None:
    marks = "one~" + "1" * 16
    assert live.http.post(path, json=body, headers={VIA_HEADER: marks}).status_code == 200
    assert encoders.asked[-1].via == (marks,)
    for header, status in ((", ".join(f"{place:016d}" for place in range(5)), 508), ("no mark", 400)):
        assert live.http.post(path, json=body, headers={VIA_HEADER: header}).status_code == status
