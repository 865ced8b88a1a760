"""Ollama. Never run: written from its documents and source, version 0.33.

- It drops the beginning of a prompt that is longer than the context, unless `truncate` and `shift` are false. Its chat completions always may.
- A model's digest in lists is that of its manifest; the file's is in the line FROM of its modelfile.
- Other values of `num_ctx` and `keep_alive` would make it load a model again, or keep it longer, so that neither is sent.
- Models of its cloud leave the network; they are not listed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Hashable, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core.generation import FinishReason
from paceline.engines.adapter import TEXT_AND_MESSAGES, Adapter, needs, schema_of, vectors_of
from paceline.engines.contract import AnswerPiece, Ask, Capability, EngineIdentity, EngineModel, Vectors
from paceline.engines.openai import MAX_SEED
from paceline.engines.shapes import MAX_BYTES, entries, number, sensible, text_of

CAPABILITIES: Final = {
    "completion": Capability.SCHEMAS,
    "vision": Capability.IMAGES,
    "tools": Capability.TOOLS,
    "embedding": Capability.EMBEDDINGS,
}
FINISHES: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_FILE = re.compile(r"^FROM (.*sha256[-:]([0-9a-f]{64}))\s*$", re.MULTILINE)
_CONTEXT = re.compile(r"^num_ctx\s+(\d+)\s*$", re.MULTILINE)


class Ollama(Adapter):
    name = "ollama"
    alive_path = "/api/version"
    verifies = True

    async def identify(self) -> EngineIdentity | None:
        front = await self.http.ask("GET", "/")
        if front.body.strip() != b"Ollama is running":  # others answer as its API does, and not so
            return None
        found = (await self.http.ask("GET", "/api/version")).json
        return EngineIdentity(self.name, text_of(found, "version")) if isinstance(found, dict) else None

    async def is_ready(self) -> bool:
        return (await self.http.ask("GET", "/api/version")).status == 200

    async def models(self) -> tuple[EngineModel, ...]:
        listed = sensible(self.http, entries, await self.http.get("/api/tags"), "models")
        running = sensible(self.http, entries, await self.http.get("/api/ps"), "models")
        loaded = {text_of(each, "name"): number(each, "context_length") for each in running}
        own = [each for each in listed if not text_of(each, "remote_model") and not text_of(each, "remote_host")]
        shown = await asyncio.gather(*(self.http.post("/api/show", {"model": text_of(each, "name")}) for each in own))
        found = tuple(sensible(self.http, _model, each, more, loaded) for each, more in zip(own, shown, strict=True))
        self._marks = {model.name: text_of(each, "digest") for model, each in zip(found, own, strict=True)}
        return found

    async def mark(self, model: str) -> Hashable:
        listed = entries(await self.http.get("/api/tags"), "models")
        return next((text_of(each, "digest") for each in listed if each.get("name") == model), None)

    async def load(self, model: str) -> None:
        await self.http.post("/api/generate", {"model": model, "stream": False}, wait_s=self.http.patience.load_s)

    async def unload(self, model: str) -> None:
        await self.http.post("/api/generate", {"model": model, "keep_alive": 0, "stream": False})

    async def embed(self, model: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Vectors:
        found = await self.work("/api/embed", {"model": model, "input": list(texts), "truncate": False}, len(texts), via)
        vectors = sensible(self.http, lambda: list(found["embeddings"]))
        if len(vectors) != len(texts):
            raise self.http.gone(f"returned {len(vectors)} vectors for {len(texts)} texts")
        return Vectors(vectors_of(self.http, vectors), number(found, "prompt_eval_count"))

    async def write(self, ask: Ask) -> AsyncGenerator[AnswerPiece]:
        async with self.stream("/api/generate", generate_body(ask), ask.model, lines=True, via=ask.via) as stream:
            counted = 0
            async for event in stream:
                assert not isinstance(event, bytes), "streams of lines have no comments"
                text = event.get("response")
                if text:
                    stream.moved()
                    if not stream.began:
                        await stream.begin()
                    counted += 1
                    yield sensible(self.http, lambda text=text: AnswerPiece(text + "", n_tokens=1))
                if event.get("done"):
                    stream.settle()
                    yield sensible(self.http, _last, event, counted)
                    return


def _last(event: Mapping[str, Any], counted: int) -> AnswerPiece:
    tokens = max(0, number(event, "eval_count") - counted)
    return AnswerPiece(n_tokens=tokens, prompt_tokens=number(event, "prompt_eval_count"), finish=FINISHES[event["done_reason"]])


def _model(listed: Mapping[str, Any], shown: Mapping[str, Any], loaded: Mapping[str, int]) -> EngineModel:
    name = str(listed["name"])
    file, context = _FILE.search(text_of(shown, "modelfile")), _CONTEXT.search(text_of(shown, "parameters"))
    can = shown.get("capabilities") or ["completion"]
    return EngineModel(
        name,
        TEXT_AND_MESSAGES if "completion" in can else frozenset(),
        digest=file[2] if file else "",
        path=Path(file[1]) if file and file[1].startswith("/") else None,
        quantisation=text_of(listed.get("details") or {}, "quantization_level"),
        context=loaded.get(name, 0) or (int(context[1]) if context else 0),
        size_bytes=number(listed, "size", most=MAX_BYTES),
        loaded=name in loaded,
        capabilities=frozenset(CAPABILITIES[each] for each in can if each in CAPABILITIES),
    )


def generate_body(ask: Ask) -> dict[str, Any]:
    """Return the body of `/api/generate` for a rendered prompt.

    Raises:
        InvalidRequest, NotServed: a part that Ollama can't do.
    """
    sampling = ask.sampling
    needs(
        "Ollama",
        logprobs=sampling.logprobs is not None,
        logit_bias=bool(sampling.logit_bias),
        ignore_eos=ask.ignore_eos,
        stop_token_ids=bool(ask.stop_ids),
    )
    options: dict[str, Any] = {
        "num_predict": -1 if ask.max_tokens is None else ask.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": 1.0,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": [],
    }
    if sampling.seed is not None:
        options["seed"] = sampling.seed % MAX_SEED
    body = {"model": ask.model, "prompt": ask.prompt, "raw": True, "stream": True, "truncate": False, "shift": False, "options": options}
    if ask.grammar is not None:
        body["format"] = schema_of("Ollama", ask.grammar)
    return body
