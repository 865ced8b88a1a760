"""vLLM, Ollama and LM Studio as their documents and sources describe them: scripts for `scripted_http.served`. They write the alphabet, a letter a token."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from itertools import cycle, islice
from typing import Any

from tests.fakes.scripted_http import Asked, Said, events, said

CONTEXT = 64
LETTERS = "a bé😊cdefghijklmnopqrstuvwxyz"
DIGEST = "8f5b" * 16


def spell(ids: Sequence[int]) -> str:
    """Return the text of token ids, which are bytes."""
    return bytes(ids).decode("utf-8", "ignore")


def answer(prompt: str | Sequence[int], length: int) -> list[str]:
    """Return the letters that follow a prompt. It depends on its length."""
    return list(islice(cycle(LETTERS), len(prompt) % 3, len(prompt) % 3 + length))


def too_long(prompt: str | Sequence[int]) -> bool:
    return len(prompt.split() if isinstance(prompt, str) else prompt) >= CONTEXT


def chat(body: Any, name: str, prompt: str) -> Said:
    """A chat completion of any of them."""
    words = answer(prompt, body.get("max_tokens", 8))
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": name}
    choices: list[dict[str, Any]] = [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    choices += [{"index": 0, "delta": {"content": word}, "finish_reason": None} for word in words]
    choices += [{"index": 0, "delta": {}, "finish_reason": "length"}]
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words), "total_tokens": 0}
    return Said(
        events(*({**head, "choices": [choice]} for choice in choices), {**head, "choices": [], "usage": usage}), kind="text/event-stream"
    )


def prompt_of(body: Any) -> Any:
    return body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])


# ------------------------------------------------------------------------------------------------------------------- vLLM

VLLM_MODEL = "qwen/qwen3-8b"
VLLM_METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen/qwen3-8b"} 0.0
vllm:num_requests_waiting{engine="0",model_name="qwen/qwen3-8b"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="qwen/qwen3-8b"} 0.25
"""


def vllm(asked: Asked) -> Said:
    match asked.path:
        case "/version":
            return said({"version": "0.32.0"})
        case "/health":
            return Said(length=0)
        case "/metrics":
            return Said((VLLM_METRICS,), kind="text/plain", length=len(VLLM_METRICS))
        case "/v1/models":
            model = {"id": VLLM_MODEL, "object": "model", "owned_by": "vllm", "root": VLLM_MODEL, "parent": None, "max_model_len": CONTEXT}
            return said({"object": "list", "data": [model]})
        case "/v1/completions" | "/v1/chat/completions":
            return _vllm_answer(asked)
    return said({"detail": "Not Found"}, 404)


def _vllm_answer(asked: Asked) -> Said:
    body = asked.body
    prompt = prompt_of(body)
    if body["model"] != VLLM_MODEL:
        return said({"error": {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}}, 404)
    if too_long(prompt):
        words = f"This model's maximum context length is {CONTEXT} tokens. However, your request has more input tokens."
        return said({"error": {"message": words, "type": "BadRequestError", "param": "input_tokens", "code": 400}}, 400)
    if asked.path == "/v1/chat/completions":
        return chat(body, VLLM_MODEL, prompt)
    form = body.get("structured_outputs")
    words = list(f"{json.dumps(form['json']['enum'][0])}") if form else answer(prompt, body["max_tokens"])
    return Said(events(*_vllm_events(body, words, len(prompt), ended=bool(form))), kind="text/event-stream")


def _vllm_events(body: Any, words: Sequence[str], n_prompt: int, *, ended: bool) -> Generator[dict[str, Any]]:
    """Yield the events of a text completion: a byte a token, and text once a character is whole."""
    gained, length = 0, len(words) if ended else body["max_tokens"]
    for word in words:
        for place, byte in enumerate(parts := word.encode()):
            if gained == length:
                return
            gained += 1
            is_last = gained == length
            choice: dict[str, Any] = {
                "index": 0,
                "text": word if place == len(parts) - 1 else "",
                "logprobs": None,
                "finish_reason": ("stop" if ended else "length") if is_last and not ended else None,
                "stop_reason": None,
            }
            if body.get("return_token_ids"):
                choice |= {"token_ids": [byte], "prompt_token_ids": list(body["prompt"]) if gained == 1 else None}
            if body.get("logprobs") is not None:
                token = f"token_id:{byte}"
                choice["logprobs"] = {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5, "token_id:0": -1.5}]}
            usage = {"prompt_tokens": n_prompt, "completion_tokens": gained, "total_tokens": n_prompt + gained}
            yield {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice], "usage": usage}
    if ended:
        ids = {"token_ids": [0]} if body.get("return_token_ids") else {}
        choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": None, **ids}
        yield {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice]}


# ----------------------------------------------------------------------------------------------------------------- Ollama

OLLAMA_MODEL = "qwen3:8b"
OLLAMA_TAGS: list[dict[str, Any]] = [
    {
        "name": OLLAMA_MODEL, "model": OLLAMA_MODEL, "modified_at": "2026-08-01T10:00:00Z", "size": 5225388164, "digest": "500a" * 16,
        "details": {"parent_model": "", "format": "gguf", "family": "qwen3", "families": ["qwen3"], "parameter_size": "8.2B", "quantization_level": "Q4_K_M"},
    },
    {
        "name": "all-minilm:latest", "model": "all-minilm:latest", "modified_at": "2026-08-01T10:00:00Z", "size": 45960996, "digest": "1b22" * 16,
        "details": {"format": "gguf", "family": "bert", "quantization_level": "F16"},
    },
    {
        "name": "gpt-oss:120b-cloud", "model": "gpt-oss:120b-cloud", "remote_model": "gpt-oss:120b", "remote_host": "https://ollama.com:443",
        "size": 384, "digest": "d7b2" * 16, "details": {},
    },
]  # fmt: skip
OLLAMA_SHOWN: dict[str, dict[str, Any]] = {
    OLLAMA_MODEL: {
        "modelfile": f"# Modelfile\n# FROM qwen3:8b\n\nFROM /home/ann/.ollama/models/blobs/sha256-{DIGEST}\nTEMPLATE x\nPARAMETER top_k 20\n",
        "parameters": 'stop                           "<|im_end|>"\nnum_ctx                        64\ntop_k                          20',
        "capabilities": ["completion", "tools", "thinking"],
    },
    "all-minilm:latest": {"modelfile": "FROM x", "parameters": "", "capabilities": ["embedding"]},
}


def ollama(asked: Asked) -> Said:
    body = asked.body
    match asked.path:
        case "/":
            return Said((b"Ollama is running",), kind="text/plain", length=17)
        case "/api/version":
            return said({"version": "0.33.0"})
        case "/api/tags":
            return said({"models": OLLAMA_TAGS})
        case "/api/ps":
            loaded = OLLAMA_TAGS[0] | {"expires_at": "2026-08-01T10:05:00Z", "size_vram": 6e9, "context_length": CONTEXT}
            return said({"models": [loaded]})
        case "/api/show":
            return said(OLLAMA_SHOWN[body["model"]])
        case "/api/embed" if body["model"] == OLLAMA_MODEL:
            return said({"error": f'"{OLLAMA_MODEL}" does not support embed'}, 400)
        case "/api/embed":
            return said({"model": body["model"], "embeddings": [[0.1, 0.2] for _ in body["input"]]})
        case "/api/generate" | "/v1/chat/completions":
            return _ollama_answer(asked)
    return Said((b"404 page not found",), 404, "text/plain", 18)


def _ollama_answer(asked: Asked) -> Said:
    body = asked.body
    name = body["model"]
    if name not in OLLAMA_SHOWN:
        return said({"error": f"model '{name}' not found"}, 404)
    if "prompt" not in body and "messages" not in body:
        reason = "unload" if body.get("keep_alive") == 0 else "load"
        return said({"model": name, "created_at": "2026-08-01T10:00:00Z", "response": "", "done": True, "done_reason": reason})
    prompt = prompt_of(body)
    if too_long(prompt):
        return said({"error": "the input length exceeds the context length"}, 400)
    if asked.path == "/v1/chat/completions":
        return chat(body, name, prompt)
    assert body["raw"]
    assert body["truncate"] is False
    form = body.get("format")
    words = list(json.dumps(form["enum"][0])) if form else answer(prompt, body["options"]["num_predict"])
    lines = [{"model": name, "created_at": "2026-08-01T10:00:00Z", "response": word, "done": False} for word in words]
    end = {
        "done_reason": "stop" if form else "length",
        "prompt_eval_count": len(prompt.split()),
        "eval_count": len(words),
        "eval_duration": 5,
    }
    lines.append({"model": name, "created_at": "2026-08-01T10:00:00Z", "response": "", "done": True, **end})
    return Said((json.dumps(line).encode() + b"\n" for line in lines), kind="application/x-ndjson")


# -------------------------------------------------------------------------------------------------------------- LM Studio

LMSTUDIO_MODEL = "google/gemma-4-26b-a4b"
LMSTUDIO_MODELS: list[dict[str, Any]] = [
    {
        "type": "llm", "publisher": "google", "key": LMSTUDIO_MODEL, "display_name": "Gemma 4 26B A4B", "architecture": "gemma4",
        "quantization": {"name": "Q4_K_M", "bits_per_weight": 4}, "size_bytes": 17990911801, "params_string": "26B-A4B",
        "loaded_instances": [{"id": f"{LMSTUDIO_MODEL}:2", "config": {"context_length": CONTEXT, "parallel": 4, "flash_attention": True}}],
        "max_context_length": 262144, "format": "gguf", "capabilities": {"vision": True, "trained_for_tool_use": True},
    },
    {
        "type": "embedding", "publisher": "nomic", "key": "text-embedding-nomic-embed-text-v1.5", "display_name": "Nomic",
        "quantization": {"name": "F16", "bits_per_weight": 16}, "size_bytes": 274290560, "params_string": None, "loaded_instances": [],
        "max_context_length": 2048, "format": "gguf",
    },
]  # fmt: skip
LMSTUDIO_OLDER: list[dict[str, Any]] = [
    {
        "id": LMSTUDIO_MODEL, "object": "model", "type": "vlm", "publisher": "google", "arch": "gemma4", "compatibility_type": "gguf",
        "quantization": "Q4_K_M", "state": "loaded", "max_context_length": 262144, "loaded_context_length": CONTEXT,
    },
]  # fmt: skip


def lmstudio(asked: Asked) -> Said:
    match asked.path:
        case "/api/v1/models":
            return said({"models": LMSTUDIO_MODELS})
        case "/api/v1/models/load":
            return said({"type": "llm", "instance_id": asked.body["model"], "load_time_seconds": 9.1, "status": "loaded"})
        case "/api/v1/models/unload":
            return said({"instance_id": asked.body["instance_id"]})
        case _:
            return lmstudio_older(asked)


def lmstudio_older(asked: Asked) -> Said:
    """LM Studio before its API v1."""
    body = asked.body
    match asked.path:
        case "/api/v0/models":
            return said({"object": "list", "data": LMSTUDIO_OLDER})
        case "/v1/models":
            return said({"object": "list", "data": [{"id": LMSTUDIO_MODEL, "object": "model", "owned_by": "organization_owner"}]})
        case "/v1/completions" | "/v1/chat/completions" if body["model"] != LMSTUDIO_MODEL:
            error = {"message": "Model not found", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
            return said({"error": error}, 404)
        case "/v1/completions" | "/v1/chat/completions" if too_long(prompt_of(body)):
            return said({"error": "The number of tokens to keep from the initial prompt is greater than the context length."}, 400)
        case "/v1/chat/completions":
            return chat(body, f"{LMSTUDIO_MODEL}:2", prompt_of(body))
        case "/v1/completions":
            words = answer(body["prompt"], body["max_tokens"])
            ends = [None] * (len(words) - 1) + ["length"]
            head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": f"{LMSTUDIO_MODEL}:2"}
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": len(words)}
            found = [{**head, "choices": [{"index": 0, "text": word, "finish_reason": end}]} for word, end in zip(words, ends, strict=True)]
            return Said(events(*found, {**head, "choices": [], "usage": usage}), kind="text/event-stream")
    return said({"error": f"Unexpected endpoint or method. ({asked.method} {asked.path})"})
