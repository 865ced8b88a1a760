"""LM Studio's server. Never run: written from its documents, version 0.4.1 (API v1) and 0.3.6 (API v0).

- A request for a model that is not loaded makes it load, and its settings may make it unload another.
- Answers name the loaded instance, such as `google/gemma-3-12b:2`, where requests name the model.
- Log probabilities, schemas of text completions and stop tokens are not in its documents.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

from paceline.engines.adapter import TEXT_AND_MESSAGES, Adapter, needs
from paceline.engines.contract import Ask, Capability, EngineIdentity, EngineModel
from paceline.engines.openai import NEUTRAL, more_sampling, openai_text
from paceline.engines.shapes import MAX_BYTES, entries, number, sensible, text_of

V1: Final = "/api/v1/models"
V0: Final = "/api/v0/models"


class LmStudio(Adapter):
    name = "lmstudio"
    verifies = True

    async def identify(self) -> EngineIdentity | None:
        models = (await self.http.ask("GET", V1)).json
        if isinstance(models, dict) and isinstance(listed := models.get("models"), list):
            return EngineIdentity(self.name) if all(isinstance(each, dict) and "loaded_instances" in each for each in listed) else None
        older = (await self.http.ask("GET", V0)).json
        if isinstance(older, dict) and isinstance(listed := older.get("data"), list) and listed:
            return EngineIdentity(self.name) if all(isinstance(each, dict) and "compatibility_type" in each for each in listed) else None
        return None

    async def models(self) -> tuple[EngineModel, ...]:
        found = await self._listed()
        self._marks = {text_of(each, "key") or text_of(each, "id"): self.mark_of(each) for each in found}
        return tuple(sensible(self.http, _model if "key" in each else _older, each) for each in found)

    async def _listed(self) -> list[dict[str, Any]]:
        reply = await self.http.ask("GET", V1)
        if reply.status == 200 and isinstance(reply.json, dict) and "models" in reply.json:
            return sensible(self.http, entries, reply.json, "models")
        if reply.status in {401, 403}:
            raise self.http.refused(reply.status, reply.json)
        return sensible(self.http, entries, await self.http.get(V0))

    async def mark(self, model: str) -> Hashable:
        return next((self.mark_of(each) for each in await self._listed() if model in {each.get("key"), each.get("id")}), None)

    def mark_of(self, listed: Mapping[str, Any]) -> Hashable:
        return str([listed.get(name) for name in ("size_bytes", "quantization", "selected_variant", "arch", "architecture")])

    def is_other(self, asked: str, said: str) -> bool:
        return said.partition(":")[0] != asked.partition(":")[0]

    async def load(self, model: str) -> None:
        await self.http.post("/api/v1/models/load", {"model": model}, wait_s=self.http.patience.load_s)

    async def unload(self, model: str) -> None:
        for each in await self._listed():
            for instance in sensible(self.http, entries, each, "loaded_instances") if each.get("key") == model else ():
                await self.http.post("/api/v1/models/unload", {"instance_id": text_of(instance, "id")})

    def text_body(self, ask: Ask) -> dict[str, Any]:
        needs(
            "LM Studio",
            logprobs=ask.sampling.logprobs is not None,
            response_format=ask.grammar is not None,
            ignore_eos=ask.ignore_eos,
            stop_token_ids=bool(ask.stop_ids),
        )
        more = {name: value for name, value in more_sampling(ask).items() if value != NEUTRAL[name]}
        if "repetition_penalty" in more:
            more["repeat_penalty"] = more.pop("repetition_penalty")
        return openai_text(ask) | more | ({"max_tokens": -1} if ask.max_tokens is None else {})


def _model(listed: Mapping[str, Any]) -> EngineModel:
    """Return a model of the list of API v1."""
    instances, is_text = entries(listed, "loaded_instances"), listed["type"] != "embedding"
    config = instances[0].get("config") or {} if instances else {}
    said = listed.get("capabilities") or {}
    can = {Capability.EMBEDDINGS} if not is_text else set[Capability]()
    can |= {Capability.IMAGES} if said.get("vision") else set()
    can |= {Capability.TOOLS} if said.get("trained_for_tool_use") else set()
    return EngineModel(
        str(listed["key"]),
        TEXT_AND_MESSAGES if is_text else frozenset(),
        quantisation=text_of(listed.get("quantization") or {}, "name"),
        context=number(config, "context_length"),
        slots=number(config, "parallel"),
        size_bytes=number(listed, "size_bytes", most=MAX_BYTES),
        loaded=bool(instances),
        capabilities=frozenset(can),
    )


def _older(listed: Mapping[str, Any]) -> EngineModel:
    """Return a model of the list of API v0."""
    kind = text_of(listed, "type")
    return EngineModel(
        str(listed["id"]),
        frozenset() if kind == "embeddings" else TEXT_AND_MESSAGES,
        quantisation=text_of(listed, "quantization"),
        context=number(listed, "loaded_context_length"),
        loaded=listed.get("state") == "loaded",
        capabilities=frozenset({"vlm": {Capability.IMAGES}, "embeddings": {Capability.EMBEDDINGS}}.get(kind, set[Capability]())),
    )
