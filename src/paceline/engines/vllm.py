"""vLLM's server. Never run: written from its documents and source, version 0.32, and from a trial of its token ids that others made with 0.32.

- Text completions take token ids, and `return_token_ids` names those of the answer.
- The end token is among the ids of the last event, without text.
- Requests without a length get 16 tokens; `null` gives them the rest of the context.
- `/version`, `/health` and `/metrics` need no key.
- A server of a pooling model has no `/v1/completions`, and others have no `/v1/embeddings` and no `/v1/rerank`. A page that it has answers GET with 405.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

from paceline.core.errors import NotServed
from paceline.core.generation import GrammarKind
from paceline.engines.adapter import Adapter, schema_of
from paceline.engines.contract import Ask, Busy, Capability, EngineIdentity, EngineModel, Takes
from paceline.engines.openai import more_sampling, openai_text
from paceline.engines.shapes import entries, number, sensible, text_of

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
KV_USED: Final = "vllm:kv_cache_usage_perc"
CAPABILITIES: Final = frozenset({Capability.SCHEMAS})
"""Tools and images depend on how the server was started, and on the model; it does not say."""


class Vllm(Adapter):
    name = "vllm"
    alive_path = "/health"
    verifies = True

    async def identify(self) -> EngineIdentity | None:
        version = (await self.http.ask("GET", "/version")).json
        if not isinstance(version, dict) or not text_of(version, "version"):
            return None
        metrics = await self.http.ask("GET", "/metrics")
        return EngineIdentity(self.name, text_of(version, "version")) if b"\nvllm:" in metrics.body else None

    async def is_ready(self) -> bool:
        return (await self.http.ask("GET", "/health")).status == 200

    _tasks: tuple[Hashable, frozenset[Capability]] | None = None
    """Marks of the models that are listed, and their work besides writing. None: not asked yet."""

    async def models(self) -> tuple[EngineModel, ...]:
        listed = sensible(self.http, entries, await self.http.get("/v1/models"))
        marks = tuple((text_of(each, "id"), self.mark_of(each)) for each in listed)
        if self._tasks is None or self._tasks[0] != marks:
            self._tasks = marks, await self._pooling()
        found = tuple(sensible(self.http, _model, each, self._tasks[1]) for each in listed)
        self._marks = {model.name: self.mark_of(each) for model, each in zip(found, listed, strict=True)}
        return found

    async def _pooling(self) -> frozenset[Capability]:
        """Return the work of a pooling model; nothing for a model that writes."""
        pages = (("/v1/embeddings", Capability.EMBEDDINGS), ("/v1/rerank", Capability.RERANK))
        found = frozenset([capability for path, capability in pages if await self._has(path)])
        return frozenset() if found and await self._has("/v1/completions") else found

    async def _has(self, path: str) -> bool:
        return (await self.http.ask("GET", path)).status == 405

    async def busy(self) -> Busy:
        figures = gauges((await self.http.ask("GET", "/metrics")).body.decode("utf-8", "replace"))
        if RUNNING not in figures:
            return Busy()
        return Busy(int(figures[RUNNING]), int(figures.get(WAITING, 0)), figures.get(KV_USED))

    def text_body(self, ask: Ask) -> dict[str, Any]:
        sampling = ask.sampling
        body = openai_text(ask) | more_sampling(ask)
        body |= {
            "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "add_special_tokens": False,
            "ignore_eos": ask.ignore_eos,
            "stop_token_ids": sorted(ask.stop_ids),
        }
        if not isinstance(ask.prompt, str):
            body["return_token_ids"] = True
        if sampling.logprobs is not None:
            if isinstance(ask.prompt, str):
                raise NotServed("vLLM's log probabilities need a prompt of token ids", "Ask without them.", field="logprobs")
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        if ask.cache_salt:
            body["cache_salt"] = ask.cache_salt
        if ask.grammar is not None:
            is_regex = ask.grammar.kind is GrammarKind.REGEX
            body["structured_outputs"] = {"regex": ask.grammar.text} if is_regex else {"json": schema_of(self.name, ask.grammar)}
        return body


def _model(listed: Mapping[str, Any], tasks: frozenset[Capability]) -> EngineModel:
    takes = frozenset[Takes]() if tasks else frozenset(Takes)
    return EngineModel(str(listed["id"]), takes, context=number(listed, "max_model_len"), capabilities=tasks or CAPABILITIES)


def gauges(metrics: str) -> dict[str, float]:
    """Return the values in a Prometheus page by name. Values that differ in labels are added."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
    return found
