"""llama.cpp's `llama-server`, with one model or as a router of several. Run: build 11549 (October 2026). The router's part was written from its source.

What it does that its API does not say, as seen with that build:
- A single model answers to any name.
- A character of several tokens comes as one event, which names the last token only.
- Text that may begin a stop text is held back, and lost if the answer ends there. So stop texts are not sent.
- A reranker answers `/v1/embeddings` too, with zeros.
- A report of progress names token 0, and the end token is named in an event of its own.
- `/slots` waits for the running computation, `/health`, `/props` and `/v1/models` don't. Asking `/slots` wakes a model that sleeps,
  and counts as use of one that would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

from paceline.core.errors import EngineGone, ModelAway, NotServed, Overloaded, PacelineError, UnknownModel
from paceline.engines.adapter import Adapter
from paceline.engines.contract import AnswerPiece, Ask, Busy, Capability, Door, EngineIdentity, EngineModel, Takes
from paceline.engines.llama_completion import LlamaCompletion, Speller, completion_body
from paceline.engines.patience import EnginePatience
from paceline.engines.shapes import MAX_BYTES, entries, number, sensible, text_of

LOOK_BACK: Final = 8192
"""Tokens that penalties count where the context is not known. Raising it: more memory for each slot."""
WORD_PIECES: Final = 3
"""llama.cpp's number for the vocabulary of a BERT, which writes no text."""
LOAD_LOOK_S: Final = 0.5
"""Pause between two looks at a model that loads. Raising it: the end of a load is seen later."""


class LlamaServer(Adapter):
    name = "llama-server"
    alive_path = "/health"
    verifies = True

    def __init__(self, door: Door, patience: EnginePatience | None = None) -> None:
        super().__init__(door, patience)
        self._is_router = False
        self._bos: dict[str, str] = {}
        """Begin tokens as text, by model."""
        self._aliases: dict[str, frozenset[str]] = {}
        self._more: dict[str, frozenset[Capability]] = {}
        """Capabilities that were found by asking for them, by model."""
        self._speller = Speller(self.http)
        self._contexts: dict[str, int] = {}
        self._idle = 0

    async def identify(self) -> EngineIdentity | None:
        reply = await self.http.ask("GET", "/props")
        props = reply.json if reply.status == 200 else None
        is_own = reply.headers.get("Server") == "llama.cpp"
        if isinstance(props, dict):
            self._is_router = props.get("role") == "router"
            if is_own or ("build_info" in props and "default_generation_settings" in props):
                return EngineIdentity(self.name, text_of(props, "build_info"))
        return EngineIdentity(self.name) if is_own else None

    async def is_ready(self) -> bool:
        reply = await self.http.ask("GET", "/health")
        if reply.status == 503:
            return False
        if reply.status != 200 or not isinstance(reply.json, dict):
            raise self.http.gone(f"answers /health with status {reply.status}")
        return True

    async def models(self) -> tuple[EngineModel, ...]:
        """Return the models. Empty while a server loads its only one."""
        if not await self.is_ready():
            return ()
        listed = sensible(self.http, entries, await self.http.get("/v1/models"))
        found = tuple([await self._model(each) for each in listed])
        self._marks = {model.name: self.mark_of(each) for model, each in zip(found, listed, strict=True)}
        return found

    async def _model(self, listed: Mapping[str, Any]) -> EngineModel:
        name = sensible(self.http, lambda: str(listed["id"]))
        self._aliases[name] = frozenset(listed.get("aliases") or ())
        status = listed.get("status")
        state = text_of(status, "value") if isinstance(status, dict) else "loaded"
        self._is_router = self._is_router or status is not None
        if state != "loaded":
            return EngineModel(name, frozenset(Takes), loaded=state == "sleeping", capabilities=frozenset({Capability.SCHEMAS}))
        props = await self.http.get("/props" + self._of(name))
        return sensible(self.http, self._described, name, listed, props, await self._embeds(name))

    def _described(self, name: str, listed: Mapping[str, Any], props: Mapping[str, Any], more: frozenset[Capability]) -> EngineModel:
        meta = listed.get("meta") or {}
        path = text_of(props, "model_path")
        can = {Capability.SCHEMAS} | more
        if props.get("modalities", {}).get("vision"):
            can.add(Capability.IMAGES)
        if props.get("chat_template_caps", {}).get("supports_tools"):
            can.add(Capability.TOOLS)
        self._bos[name] = text_of(props, "bos_token")
        self._contexts[name] = context = number(props["default_generation_settings"], "n_ctx")
        return EngineModel(
            name,
            frozenset() if Capability.RERANK in more or number(meta, "vocab_type") == WORD_PIECES else frozenset(Takes),
            path=Path(path) if path and path != "none" else None,
            quantisation=text_of(props, "model_ftype") or text_of(meta, "ftype"),
            context=context,
            slots=number(props, "total_slots"),
            size_bytes=number(meta, "size", most=MAX_BYTES),
            capabilities=frozenset(can),
        )

    async def _embeds(self, name: str) -> frozenset[Capability]:
        """Find out whether the server was started for embeddings or rerank. Requests without a text are refused in either case, in different ways."""
        if name not in self._more:
            found = set[Capability]()
            for path, capability in (("/v1/embeddings", Capability.EMBEDDINGS), ("/v1/rerank", Capability.RERANK)):
                reply = await self.http.ask("POST", path, {"model": name})
                if reply.status == 400 and b"ooling type" not in reply.body:  # a server without pooling makes none of OpenAI's
                    found.add(capability)
            if Capability.RERANK in found:  # its vectors are zeros
                found.discard(Capability.EMBEDDINGS)
            self._more[name] = frozenset(found)
        return self._more[name]

    def _of(self, name: str) -> str:
        """Return the query that names a router's model and does not make it load."""
        return f"?model={quote(name, safe='')}&autoload=false" if self._is_router else ""

    def mark_of(self, listed: Mapping[str, Any]) -> Hashable:
        meta = listed.get("meta")
        if not meta:  # a router's model that is not loaded
            return None
        return tuple(meta.get(name) for name in ("n_vocab", "n_params", "size", "ftype", "n_embd"))

    async def busy(self) -> Busy:
        running, is_full, names = 0, False, [""]
        if self._is_router:
            names = [model.name for model in await self.models() if model.loaded]
        for name in names:
            props = await self.http.get("/props" + self._of(name))
            if props.get("is_sleeping"):
                continue
            slots = await self._slots(name)
            if slots is None:
                return Busy()
            at_work = sum(bool(slot.get("is_processing")) for slot in slots)
            running += at_work
            is_full = is_full or at_work == len(slots)
        return Busy(running=running, waiting=None if is_full else 0)

    async def _slots(self, name: str) -> list[dict[str, Any]] | None:
        """Return the slots of a model. None: the server does not show them."""
        reply = await self.http.ask("GET", "/slots" + self._of(name))
        slots = reply.json
        return [each for each in slots if isinstance(each, dict)] if reply.status == 200 and isinstance(slots, list) else None

    async def load(self, model: str) -> None:
        await self._switch("load", model, "loaded")

    async def unload(self, model: str) -> None:
        await self._switch("unload", model, "unloaded")

    async def _switch(self, verb: str, model: str, wanted: str) -> None:
        if not self._is_router and (await self.identify() is None or not self._is_router):
            await (super().load(model) if verb == "load" else super().unload(model))
        state = await self._state(model)
        if not state:
            raise UnknownModel(f"{self.name} at {self.http.place} has no model {model}", "Ask for its list of models.")
        if state == wanted or (state == "sleeping" and wanted == "loaded"):
            return
        await self.http.post(f"/models/{verb}", {"model": model}, refusal=self.refusal)
        try:
            async with asyncio.timeout(self.http.patience.load_s):
                while (state := await self._state(model)) != wanted:
                    if verb == "load" and state not in {"loading", "downloading"}:
                        raise self.http.gone(f"failed to load {model}", "See its own log for the cause.")
                    await asyncio.sleep(LOAD_LOOK_S)
        except TimeoutError:
            raise self.http.gone(f"did not {verb} {model} within {self.http.patience.load_s:g} s") from None

    async def _state(self, model: str) -> str:
        listed = sensible(self.http, entries, await self.http.get("/v1/models"))
        return next((text_of(each.get("status") or {}, "value") for each in listed if each.get("id") == model), "")

    def refusal(self, status: int, message: str) -> PacelineError | None:
        if status == 500 and "input is not supported" in message:  # images, sent to a text model
            return NotServed(f"{self.http.place}: {message}", "Send text only, or choose a model that takes images.")
        if "Context size has been exceeded" in message:  # slots share one KV memory, and it is full
            return Overloaded(f"{self.http.place}: {message}", "Retry when other requests have ended.", retry_after_s=2)
        if "model limit reached" in message:  # a router, and its loaded models are all at work
            return Overloaded(f"{self.http.place}: {message}", "Retry when another model is free.", retry_after_s=5)
        return None

    def is_other(self, asked: str, said: str) -> bool:
        return said != asked and said not in self._aliases.get(asked, ())

    async def explain(self) -> None:
        if not await self.is_ready():
            raise ModelAway(f"{self.name} at {self.http.place} is loading its model", "Retry in a few seconds.")
        if self._is_router:
            return
        try:
            slots = await self._slots("")
        except EngineGone:  # the page waits for the running computation
            return
        # Between two requests all slots may be idle for a moment.
        self._idle = 0 if slots is None or any(slot.get("is_processing") for slot in slots) else self._idle + 1
        if self._idle > 1:
            self._idle = 0
            raise self.http.gone("does not work on the request any more")

    async def write(self, ask: Ask) -> AsyncGenerator[AnswerPiece]:
        body = completion_body(ask, self._contexts.get(ask.model, LOOK_BACK)) | {"prompt": await self._prompt(ask)}
        async with self.stream("/completion", body, ask.model, via=ask.via) as stream:
            answer = LlamaCompletion(stream, ask.stop_ids)
            async for event in stream:
                if isinstance(event, bytes):
                    continue
                piece = sensible(self.http, answer.take, event)
                if answer.text:
                    piece = answer.piece(await self._speller.ids(ask.model, answer.text, tuple(answer.ids)))
                if piece is not None:
                    if piece.tokens_read is None and not stream.began:
                        await stream.begin()
                    yield piece
                if answer.finish is not None:
                    yield answer.last()
                    return

    async def _prompt(self, ask: Ask) -> list[int] | str:
        """Return the prompt as the server takes it. It would put a second begin token before a text that spells one."""
        if not isinstance(ask.prompt, str):
            return [*cast("tuple[int, ...]", ask.prompt)]
        bos = self._bos.get(ask.model)
        if not bos or not ask.prompt.startswith(bos):
            return ask.prompt
        return await self._speller.tokens(ask.model, ask.prompt)
