"""Forms of answers over HTTP, in every API: what is asked for, what is refused, and how an answer fails that leaves its form."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.scripted_inference import ScriptedInference

from paceline.core.errors import FORM_NOT_FOLLOWED

from .conftest import Serve

SAID = [{"role": "user", "content": "hello"}]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID}),
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "anthropic": ("/v1/messages", {"messages": SAID, "max_tokens": 20}),
    "ollama": ("/api/chat", {"messages": SAID}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_leaves_its_form_ends_with_an_error_that_carries_its_text(serve_with: Serve, api: str, *, stream: bool) -> None:
    served = serve_with(ScriptedInference(fail_after=3, fail_code=FORM_NOT_FOLLOWED))
    path, body = APIS[api]
    answer = served.http.post(path, json={"model": "echo", "stream": stream, **body})
    assert answer.status_code == (200 if stream else 400)
    assert "error" in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert '"done":true' not in answer.text
    if not stream:
        error = answer.json() if api == "ollama" else answer.json()["error"]
        assert error["partial_text"] == "hel"
        assert api in ("anthropic", "ollama") or error["code"] == FORM_NOT_FOLLOWED
