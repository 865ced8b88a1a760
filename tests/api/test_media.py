"""Images and their like: refused in the user's last message, a note anywhere else, by every API."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

ASK = {"role": "user", "content": "And now?"}
OPENAI = {"type": "image_url", "image_url": {"url": "data:,"}}
PATHS: dict[str, Any] = {
    "/v1/chat/completions": lambda last: {"messages": [{"role": "user", "content": [OPENAI]}, *last]},
    "/v1/messages": lambda last: {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}, *last], "max_tokens": 8},
    "/v1/responses": lambda last: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}, *last]},
    "/api/chat": lambda last: {"messages": [{"role": "user", "content": "", "images": ["aGk="]}, *last], "stream": False},
}
PATHS["/v1/responses/input_tokens"] = PATHS["/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
def test_an_old_image_is_a_note(shared: Served[ScriptedInference], path: str) -> None:
    answer = shared.http.post(path, json=PATHS[path]([{"role": "assistant", "content": "Hm."}, ASK]))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-paceline-fitted"] == "media"
    refused = shared.http.post(path, json=PATHS[path]([]))
    assert refused.status_code == 400
    assert "image" in refused.text
