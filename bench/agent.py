"""An agent's turn: 36 tools and a growing transcript, as the first token of turn 10 through the chat API against prefilling only what is new.

Both sides have the same KV cached, the transcript up to turn 9, and as many new tokens. The floor sends them as token ids to /v1/completions: no template, no
tokenizer, no text. They take turns, each round with a tool's result of its own; `cached` is what the server says it had.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import orjson

from endpoint import Endpoint
from paceline.core.text import Tokenizer
from paceline.server.fitting import fit_chat
from paceline.server.requests import ChatCompletionRequest
from paceline.server.tools import Tools, chat_of
from paceline.store.catalog import open_model

TOOLS, TURNS = 36, 10
NOW = "2026-03-01T09:00:00+00:00"
WORDS = "The file has two functions that call each other and one that nothing calls. "


def tool(place: int) -> dict[str, Any]:
    properties = {
        "path": {"type": "string", "description": "The file to work on, from the project's root."},
        "lines": {"type": "integer", "description": "How many lines at most.", "minimum": 1},
        "mode": {"type": "string", "enum": ["read", "write", "append"], "description": "What is done with it."},
    }
    described = f"Tool {place} of the agent: works on one file of the project and says what it found there."
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": {"name": f"tool_{place}", "description": described, "parameters": parameters}}


def transcript(turns: int, last: str) -> list[dict[str, Any]]:
    """Up to the result that turn `turns` answers; the last one says `last`."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Tidy up the project."},
    ]
    for turn in range(1, turns):
        arguments = json.dumps({"path": f"src/part_{turn}.py", "mode": "read"})
        call = {"id": f"call{turn:05}", "type": "function", "function": {"name": f"tool_{turn}", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        told = f"{turn}: " + WORDS * 5 if turn < turns - 1 else last
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
    return messages


def first_token_s(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the first text, and how many of the prompt's tokens were cached."""
    data = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2, "temperature": 0})
    began, first, cached = time.perf_counter(), 0.0, 0
    with client.stream("POST", path, content=data, headers={"content-type": "application/json"}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            choice = (event["choices"] or [{}])[0]
            if not first and (choice.get("text") or choice.get("delta", {}).get("content")):
                first = time.perf_counter() - began
    return first, cached


def ids_of(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    asked = ChatCompletionRequest.model_validate_json(orjson.dumps(body))
    chat = chat_of(asked, Tools.of(asked), tokenizer.chat_template or "", knows_tools=False)
    return fit_chat(chat, lambda messages, given: tokenizer.render_chat(messages, datetime.fromisoformat(NOW), given)).ids


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--model", default="smollm2-135m")
    arguments.add_argument("--context", type=int, default=8192)
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    tokenizer = open_model(options.model).tokenizer
    log = Path(tempfile.mkdtemp(prefix="paceline-bench-")) / "log"
    endpoint = Endpoint("--model", options.model, "--context", str(options.context), log=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{endpoint.port}", timeout=600) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            base = {"model": name, "tools": [tool(place) for place in range(TOOLS)], "now": NOW}
            for turn in range(1, TURNS):
                took, cached = first_token_s(client, "/v1/chat/completions", base | {"messages": transcript(turn, f"{turn}: {WORDS * 5}")})
                print(f"turn {turn}: first token after {1000 * took:.0f} ms, {cached} tokens cached")
            found: dict[str, list[float]] = {"chat": [], "floor": []}
            for turn in range(options.rounds + 1):
                for kind, times in found.items():
                    body = base | {"messages": transcript(TURNS, f"{turn} {kind}: {WORDS * 5}")}
                    ids = ids_of(tokenizer, body)
                    if kind == "floor":
                        took, cached = first_token_s(client, "/v1/completions", {"model": name, "prompt": ids})
                    else:
                        took, cached = first_token_s(client, "/v1/chat/completions", body)
                    if turn:
                        times.append(took)
                        print(f"round {turn}, {kind}: {1000 * took:.1f} ms, {cached} of {len(ids)} tokens cached")
            ratios = [one / other for one, other in zip(found["chat"], found["floor"], strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(
                f"turn {TURNS}: {1000 * median(found['chat']):.1f} ms against {1000 * median(found['floor']):.1f} ms: {median(ratios):.3f}x ({spread})"
            )
    finally:
        endpoint.close()


if __name__ == "__main__":
    main()
