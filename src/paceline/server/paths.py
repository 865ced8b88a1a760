"""Paths of the APIs that are not OpenAI's."""

from __future__ import annotations

OLLAMA_PATHS = frozenset({f"/api/{name}" for name in ("chat", "generate", "tags", "ps", "show", "version", "embed", "embeddings")})
ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
