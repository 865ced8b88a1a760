"""mlx-lm's `mlx_lm.server`. Run: 0.32.2 (on processors).

What it does that its API does not say, as seen with that version:
- It says that it is ready while it loads its model, and the first answer waits.
- A name that it does not have makes it look in the hub, and download. Only listed names are sent.
- A local model answers as `default_model`; by its path it would be loaded again.
- Refusals of any kind have status 404.
- Without `max_tokens` an answer ends after 512.
- A tokenizer that puts a begin token before each text does so for text prompts too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from paceline.core.errors import EngineGone, PacelineError, UnknownModel
from paceline.engines.adapter import TEXT_AND_MESSAGES, Adapter, needs
from paceline.engines.contract import Ask, Capability, EngineIdentity, EngineModel
from paceline.engines.openai import more_sampling, openai_text
from paceline.engines.shapes import entries, sensible

DEFAULT: Final = "default_model"
"""The name of the model that the server was started with."""
NO_LIMIT: Final = 1 << 20
"""Tokens of an answer without a limit. Raising it: an answer that never ends takes more of the owner's memory."""
LOOK_BACK: Final = 1 << 20
"""Tokens that penalties count: all."""


class MlxServer(Adapter):
    name = "mlx_lm.server"
    alive_path = "/health"

    async def identify(self) -> EngineIdentity | None:
        health = await self.http.ask("GET", "/health")
        if health.json not in ({"status": "ok"}, {"status": "unavailable"}):
            return None
        # Others answer so too. Python's own server, and no page with properties, is this engine.
        if not health.headers.get("Server", "").startswith("BaseHTTP/"):
            return None
        listed = (await self.http.ask("GET", "/v1/models")).json
        props = await self.http.ask("GET", "/props")
        return EngineIdentity(self.name) if isinstance(listed, dict) and props.status == 404 else None

    async def is_ready(self) -> bool:
        return (await self.http.ask("GET", "/health")).status == 200

    async def models(self) -> tuple[EngineModel, ...]:
        """Return the model of the start if it is a folder, and those of the hub's cache. Which of these is loaded it does not say."""
        listed = sensible(self.http, entries, await self.http.get("/v1/models"))
        names = sensible(self.http, lambda: [str(each["id"]) for each in listed])
        self._marks = {name: name for name in names}
        return tuple(_model(name) for name in names)

    async def prepare(self, ask: Ask) -> None:
        if ask.model not in self._marks:
            await self.models()
        if ask.model not in self._marks:
            raise UnknownModel(f"{self.name} at {self.http.place} has no model {ask.model}", "Ask for its list of models.")

    def chat_body(self, ask: Ask) -> dict[str, Any]:
        body = super().chat_body(ask) | {"model": _sent(ask.model)}
        return body if "max_tokens" in body or "max_completion_tokens" in body else body | {"max_tokens": NO_LIMIT}

    def text_body(self, ask: Ask) -> dict[str, Any]:
        needs(
            self.name,
            logprobs=ask.sampling.logprobs is not None,
            response_format=ask.grammar is not None,
            ignore_eos=ask.ignore_eos,
            stop_token_ids=bool(ask.stop_ids),
        )
        look_back = dict.fromkeys(("repetition_context_size", "presence_context_size", "frequency_context_size"), LOOK_BACK)
        return {"max_tokens": NO_LIMIT} | openai_text(ask) | more_sampling(ask) | look_back | {"model": _sent(ask.model)}

    def refusal(self, status: int, message: str) -> PacelineError | None:
        if status == 404 and message:  # whatever went wrong before the first token; without words, a page that it does not have
            return EngineGone(f"{self.name} at {self.http.place}: {message}", "See its own log for the cause.")
        return None


def _sent(name: str) -> str:
    return DEFAULT if name.startswith("/") else name


def _model(name: str) -> EngineModel:
    is_local = name.startswith("/")
    return EngineModel(
        name, TEXT_AND_MESSAGES, path=Path(name) if is_local else None, loaded=is_local, capabilities=frozenset({Capability.TOOLS})
    )
