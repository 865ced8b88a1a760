"""Write docs/reference/examples.md: one request for each endpoint with the answer that the bundled model gave.

    python -m tools.write_examples URL

URL is a running `paceline up --embeddings MODEL` with the bundled model, which shares a reranker of that name. Long lists and texts in answers are cut.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "examples.md"
HEAD = """# An example of each endpoint

Each answer below came from the bundled model, by `python -m tools.write_examples`; `…` marks what was cut. [The API](api.md) says what fields mean.
With a key, send `Authorization: Bearer KEY` too.
"""
MODEL = "smollm2-135m"
LIST, TEXT = 4, 200
"""Items of a list and letters of a text that are shown."""


class Example(NamedTuple):
    """A request. `path` may name `{id}`, the id in the answer to the example before."""

    title: str
    method: str
    path: str
    body: dict[str, Any] | None = None


QUESTION = [{"role": "user", "content": "Name a colour. One word."}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "pet",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}
GREEDY = {"temperature": 0, "max_tokens": 24}
EXAMPLES = (
    Example("Chat", "POST", "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, **GREEDY}),
    Example("Chat, streamed", "POST", "/v1/chat/completions", {"messages": QUESTION, "stream": True, "temperature": 0, "max_tokens": 3}),
    Example(
        "A call of a tool",
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": [WEATHER], "tool_choice": "required", "temperature": 0},
    ),
    Example(
        "An answer of a given form",
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "A pet as JSON."}], "response_format": FORM, "temperature": 0},
    ),
    Example("Plain text", "POST", "/v1/completions", {"prompt": "The sky is", "temperature": 0, "max_tokens": 8}),
    Example(
        "OpenAI's responses", "POST", "/v1/responses", {"input": "Name a colour. One word.", "temperature": 0, "max_output_tokens": 16}
    ),
    Example("A kept response", "GET", "/v1/responses/{id}"),
    Example("What it was asked", "GET", "/v1/responses/{id}/input_items"),
    Example("Forget it", "DELETE", "/v1/responses/{id}"),
    Example("Count the tokens of a response's input", "POST", "/v1/responses/input_tokens", {"input": "Name a colour."}),
    Example("Anthropic's messages", "POST", "/v1/messages", {"model": MODEL, "max_tokens": 16, "messages": QUESTION, "temperature": 0}),
    Example("Count their tokens", "POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": QUESTION}),
    Example("Vectors of texts", "POST", "/v1/embeddings", {"model": "all-minilm-l6-v2", "input": ["a cat", "a dog"]}),
    Example(
        "Texts in order of their relevance",
        "POST",
        "/v1/rerank",
        {"model": "tiny-reranker", "query": "the cat", "documents": ["hello world", "the cat sat on the mat."]},
    ),
    Example("Tokens of a text", "POST", "/tokenize", {"prompt": "Hello, world"}),
    Example("A text of tokens", "POST", "/detokenize", {"tokens": [19556, 28, 905]}),
    Example("The models", "GET", "/v1/models"),
    Example("One model", "GET", f"/v1/models/{MODEL}"),
    Example(
        "Ollama: a chat",
        "POST",
        "/api/chat",
        {"model": MODEL, "messages": QUESTION, "stream": False, "options": {"temperature": 0, "num_predict": 16}},
    ),
    Example(
        "Ollama: plain text",
        "POST",
        "/api/generate",
        {"model": MODEL, "prompt": "The sky is", "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 8}},
    ),
    Example("Ollama: one model", "POST", "/api/show", {"model": MODEL}),
    Example("Ollama: the models", "GET", "/api/tags"),
    Example("Ollama: the loaded models", "GET", "/api/ps"),
    Example("Ollama: its version", "GET", "/api/version"),
    Example("Ollama: vectors", "POST", "/api/embed", {"model": "all-minilm-l6-v2", "input": "a cat"}),
    Example("Ollama: a vector, the older way", "POST", "/api/embeddings", {"model": "all-minilm-l6-v2", "prompt": "a cat"}),
    Example("Health", "GET", "/health"),
    Example("Metrics", "GET", "/metrics"),
)


def cut(value: Any) -> Any:
    """Return a value with its long lists and texts cut."""
    match value:
        case dict():
            return {key: cut(each) for key, each in value.items()}
        case list() if len(value) > LIST:
            return [*map(cut, value[:LIST]), "…"]
        case list():
            return [cut(each) for each in value]
        case str() if len(value) > TEXT:
            return value[:TEXT] + "…"
        case _:
            return value


def shown(answer: httpx.Response) -> str:
    """Return an answer as the page has it, in a fence."""
    if answer.headers["content-type"].startswith("application/json"):
        return f"```json\n{json.dumps(cut(answer.json()), indent=2, ensure_ascii=False)}\n```"
    lines = answer.text.splitlines()
    text = "\n".join([*(line if len(line) <= 300 else line[:300] + "…" for line in lines[:12]), *(["…"] if len(lines) > 12 else [])])
    return f"```text\n{text}\n```"


def main() -> None:
    """Ask, and write the page."""
    url, found, parts = sys.argv[1].rstrip("/"), "", [HEAD]
    with httpx.Client(base_url=url, timeout=300) as client:
        for example in EXAMPLES:
            path = example.path.format(id=found)
            answer = client.request(example.method, path, json=example.body)
            if answer.status_code != 200:
                raise SystemExit(f"{example.method} {path}: {answer.status_code} {answer.text}")
            if example.path == "/v1/responses":
                found = answer.json()["id"]
            lines = [f"curl http://127.0.0.1:8000{path}" + ("" if example.method in {"GET", "POST"} else f" -X {example.method}")]
            if example.body is not None:
                text = json.dumps(example.body, ensure_ascii=False).replace("'", "’")
                lines = [lines[0] + " \\", "  -H 'Content-Type: application/json' \\", f"  -d '{text}'"]
            shell = "\n".join(lines)
            parts.append(
                f"## {example.title}\n\n`{example.method} {example.path}`\n\n```sh\n{shell}\n```\n\n```json\n{shown(answer)}\n```\n"
            )
    PAGE.write_text("\n".join(parts))
    print(f"{PAGE}: {len(EXAMPLES)} examples")


if __name__ == "__main__":
    main()
