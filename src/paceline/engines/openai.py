"""Any server with OpenAI's API, Paceline among them. It is the last to be tried, since it says least about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.core.errors import EngineGone
from paceline.core.via import listed_via
from paceline.engines.adapter import TEXT_AND_MESSAGES, Adapter, needs
from paceline.engines.contract import Ask, Capability, EngineIdentity, EngineModel, Takes
from paceline.engines.shapes import entries, number, sensible, text_of

NO_PROMPT: Final = {"prompt": {"no": 0}, "max_tokens": "none"}
"""A text completion that every server refuses before it works."""


class OpenAi(Adapter):
    name = "openai"
    _completes: bool | None = None
    """It has text completions. None: not asked yet."""

    async def identify(self) -> EngineIdentity | None:
        reply = await self.http.ask("GET", "/v1/models")
        found = reply.json
        if reply.status in {401, 403}:
            return EngineIdentity(self.name) if isinstance(found, dict) else None
        if reply.status != 200 or not isinstance(found, dict) or not isinstance(found.get("data"), list):
            return None
        return EngineIdentity(self.name)

    async def models(self) -> tuple[EngineModel, ...]:
        listed = sensible(self.http, entries, await self.http.get("/v1/models"))
        found = tuple([sensible(self.http, self._model, each, await self._forms(each)) for each in listed])
        self._marks = {model.name: None for model in found}
        return found

    async def _forms(self, listed: Mapping[str, Any]) -> frozenset[Takes]:
        if self._completes is None:
            try:
                reply = await self.http.ask("POST", "/v1/completions", NO_PROMPT | {"model": text_of(listed, "id")})
                self._completes = reply.status in {400, 422}
            except EngineGone:  # asked again with the next list
                return frozenset({Takes.MESSAGES})
        return TEXT_AND_MESSAGES if self._completes else frozenset({Takes.MESSAGES})

    @staticmethod
    def _model(listed: Mapping[str, Any], takes: frozenset[Takes]) -> EngineModel:
        tasks = listed.get("tasks") if listed.get("owned_by") == "paceline" else None  # other servers use the field otherwise
        tasks = tasks if isinstance(tasks, list) and tasks else ["chat"]
        return EngineModel(
            str(listed["id"]),
            takes if "chat" in tasks else frozenset(),
            context=number(listed, "max_model_len", "context_length", "context_window"),
            capabilities=frozenset(each for each in (Capability.EMBEDDINGS, Capability.RERANK) if each in tasks),
            via=listed_via(listed.get("via")),
        )

    def is_other(self, asked: str, said: str) -> bool:
        """Return whether the answer names another model of the list. Other names may be aliases, such as one with a date."""
        return said != asked and said in self._marks

    def text_body(self, ask: Ask) -> dict[str, Any]:
        needs(
            self.name,
            logprobs=ask.sampling.logprobs is not None,
            response_format=ask.grammar is not None,
            ignore_eos=ask.ignore_eos,
            stop_token_ids=bool(ask.stop_ids),
        )
        return openai_text(ask) | {name: value for name, value in more_sampling(ask).items() if value != NEUTRAL[name]}


NEUTRAL: Final = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling fields that are not OpenAI's, and their values that change nothing."""
MAX_SEED: Final = 1 << 63


def openai_text(ask: Ask) -> dict[str, Any]:
    """Return the body of a text completion, with OpenAI's own fields. Stop texts are not sent."""
    sampling = ask.sampling
    body: dict[str, Any] = {
        "model": ask.model,
        "prompt": ask.prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if ask.max_tokens is not None:
        body["max_tokens"] = ask.max_tokens
    if sampling.seed is not None:
        body["seed"] = sampling.seed % MAX_SEED
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return body


def more_sampling(ask: Ask) -> dict[str, float]:
    """Return the sampling fields that are not OpenAI's, under the names that vLLM and mlx-lm give them."""
    sampling = ask.sampling
    return {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty}
