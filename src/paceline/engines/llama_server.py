"""llama.cpp's `llama-server`, with one model or as a router of several. Run: build 11549 (October 2026). The router's part was written from its source.

What it does that its API does not say, as seen with that build:
- A single model answers to any name.
- A character of several tokens comes as one event, which names the last token only.
- Text that may begin a stop text is held back, and lost if the answer ends there by its length.
- A report of progress names token 0, and the end token is named in an event of its own.
- `/slots` waits for the running computation, `/health`, `/props` and `/v1/models` don't. Asking `/slots` wakes a model that sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import orjson

from paceline.core.errors import EngineGone, InvalidRequest, NotServed, Overloaded, PacelineError
from paceline.core.generation import FinishReason, GrammarKind, TokenLogprob
from paceline.engines.adapter import Adapter
from paceline.engines.contract import Ask, Busy, Capability, Door, EngineIdentity, EngineModel, Piece, Takes
from paceline.engines.http import Http, Patience, Stream
from paceline.engines.shapes import entries, number, sensible, text_of

FIELDS: Final = ["stop", "stop_type", "tokens", "content", "model", "tokens_evaluated", "timings"]
"""Fields of the last event. Without the list it repeats the whole prompt."""
ANY_SEED: Final = 0xFFFFFFFF
"""The seed that means "any"."""
LOOK_BACK: Final = 8192
"""Tokens that penalties count where the context is not known. Raising it: more memory for each slot."""
MAX_SPELLINGS: Final = 4096
"""Characters of several tokens whose ids are remembered. Raising it: more memory; lowering it: more questions in texts of many such characters."""
LOAD_LOOK_S: Final = 0.5
"""Pause between two looks at a model that loads. Raising it: the end of a load is seen later."""


class LlamaServer(Adapter):
    name = "llama-server"
    alive_path = "/health"
    verifies = True

    def __init__(self, door: Door, patience: Patience | None = None) -> None:
        super().__init__(door, patience)
        self._is_router = False
        self._bos = ""
        self._more: dict[str, frozenset[Capability]] = {}
        """What a model was found to do by asking for it, by name."""
        self._spelled: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
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
        self._bos = text_of(props, "bos_token")
        self._contexts[name] = context = number(props["default_generation_settings"], "n_ctx")
        return EngineModel(
            name,
            frozenset() if Capability.RERANK in more else frozenset(Takes),
            path=Path(path) if path and path != "none" else None,
            quantisation=text_of(props, "model_ftype") or text_of(meta, "ftype"),
            context=context,
            slots=number(props, "total_slots"),
            size_bytes=number(meta, "size"),
            capabilities=frozenset(can),
        )

    async def _embeds(self, name: str) -> frozenset[Capability]:
        """Find out whether the server was started for embeddings or rerank. Requests without a text are refused in either case, in different ways."""
        if name not in self._more:
            found = set[Capability]()
            for path, capability in (("/v1/embeddings", Capability.EMBEDDINGS), ("/v1/rerank", Capability.RERANK)):
                reply = await self.http.ask("POST", path, {"model": name})
                if reply.status == 400:
                    found.add(capability)
            self._more[name] = frozenset(found)
        return self._more[name]

    def _of(self, name: str) -> str:
        """Return the query that names a router's model and does not make it load."""
        return f"?model={quote(name, safe='')}&autoload=false" if self._is_router else ""

    def mark_of(self, listed: Mapping[str, Any]) -> Hashable:
        meta = listed.get("meta") or {}
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
        if await self._state(model) == wanted:
            return
        await self.http.post(f"/models/{verb}", {"model": model})
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
        return None

    async def explain(self) -> None:
        if not await self.is_ready():
            raise self.http.gone("is loading a model, and the answer is lost")
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

    def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        return super().generate(ask) if isinstance(ask.prompt, Mapping) else self._complete(ask)

    async def _complete(self, ask: Ask) -> AsyncGenerator[Piece]:
        body = completion_body(ask, self._contexts.get(ask.model, LOOK_BACK)) | {"prompt": await self._prompt(ask)}
        async with self.http.stream(
            "/completion", body, self.explain, verify=lambda: self._verify(ask.model), refusal=self.refusal
        ) as stream:
            answer = _Answer(self.http, stream, ask.stop_ids)
            async for event in stream:
                if isinstance(event, bytes):
                    continue
                piece = sensible(self.http, answer.take, event)
                if answer.text:
                    piece = answer.piece(await self._ids(ask.model, answer.text, tuple(answer.ids)))
                elif answer.is_cut:
                    answer.text = await self._spelled_by(ask.model, answer.ids)
                    piece = answer.piece(tuple(answer.ids))
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
        if not self._bos or not ask.prompt.startswith(self._bos):
            return ask.prompt
        return await self._tokens(ask.model, ask.prompt)

    async def _ids(self, model: str, text: str, named: tuple[int, ...]) -> tuple[int, ...]:
        """Return tokens that spell a text, if those that events named may not be all of it, or more."""
        key = text, named
        if key not in self._spelled:
            if len(self._spelled) >= MAX_SPELLINGS:
                self._spelled.clear()
            self._spelled[key] = await self._spelling(model, text, named)
        return self._spelled[key]

    async def _spelling(self, model: str, text: str, named: tuple[int, ...]) -> tuple[int, ...]:
        if await self._spelled_by(model, named) == text:
            return named
        plain = tuple(await self._tokens(model, text))
        if await self._spelled_by(model, plain) == text:
            return plain
        # The tokenizer puts a space before each text, but not inside of one.
        newline, after = await self._tokens(model, "\n"), await self._tokens(model, "\n" + text)
        rest = tuple(after[len(newline) :])
        return rest if await self._spelled_by(model, rest) == text else plain

    async def _tokens(self, model: str, text: str) -> list[int]:
        found = await self.http.post("/tokenize", {"model": model, "content": text, "add_special": False, "parse_special": True})
        return sensible(self.http, lambda: [int(token) for token in found["tokens"]])

    async def _spelled_by(self, model: str, tokens: Sequence[int]) -> str:
        return text_of(await self.http.post("/detokenize", {"model": model, "tokens": list(tokens)}), "content")


def completion_body(ask: Ask, look_back: int) -> dict[str, Any]:
    """Return the body of `/completion`, without the prompt.

    Args:
        look_back: number of last tokens, of prompt and answer, that penalties count. The server sets memory aside for them.

    Raises:
        InvalidRequest, NotServed: the grammar is not a JSON schema.
    """
    sampling = ask.sampling
    penalised = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)
    body: dict[str, Any] = {
        "model": ask.model,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "response_fields": FIELDS,
        "cache_prompt": not ask.cache_salt,
        "n_predict": -1 if ask.max_tokens is None else ask.max_tokens,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "temperature": sampling.temperature,
        "dynatemp_range": 0,
        "mirostat": 0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": look_back if penalised else 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": ANY_SEED if sampling.seed is None else sampling.seed % ANY_SEED,
        "stop": list(ask.stop),
        "ignore_eos": ask.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
        "n_probs": 0 if sampling.logprobs is None else max(1, sampling.logprobs),
    }
    if ask.grammar is not None:
        if ask.grammar.kind is not GrammarKind.JSON_SCHEMA:
            raise NotServed("llama-server follows JSON schemas only", "Ask for a JSON schema, or another engine.", field="response_format")
        try:
            body["json_schema"] = orjson.loads(ask.grammar.text)
        except orjson.JSONDecodeError:
            raise InvalidRequest("The JSON schema is not JSON", "Send a JSON schema.", field="response_format") from None
    return body


@dataclass(slots=True)
class _Answer:
    """Reads the events of `/completion`."""

    http: Http
    stream: Stream
    stop_ids: frozenset[int]
    text: str = ""
    """Text whose tokens are not known for certain."""
    ids: list[int] = field(default_factory=list[int])
    """Tokens without text so far: a part of what may become a stop text, or the end token."""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    doubtful: bool = False
    """Events may not have named all tokens since the last piece, or one too many."""
    counted: int = 0
    finish: FinishReason | None = None
    is_cut: bool = False
    """The answer ended before the text of `ids` was sent."""
    stopped_by_text: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def take(self, event: Mapping[str, Any]) -> Piece | None:
        """Read an event. Return a piece if one is whole, or leave its `text` to `piece` if its tokens are not known for certain."""
        if event.get("stop"):
            self._end(event)
            return None
        progress = event.get("prompt_progress")
        if progress is not None:
            self.prompt_tokens, self.cached_tokens = progress["total"], progress["cache"]
            return Piece(tokens_read=progress["processed"], prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens)
        (token,) = event["tokens"]
        if type(token) is not int:
            raise TypeError(token)
        if token in self.stop_ids:
            self.finish, self.is_cut, self.stream.settled = FinishReason.STOP, bool(self.ids), True
            return None
        counted = event["tokens_predicted"]
        # More than one: a character of several tokens. None: a draft's tokens are counted together.
        self.doubtful = self.doubtful or counted != self.counted + 1 or bool(self.ids)
        self.counted = counted
        self.ids.append(token)
        if "completion_probabilities" in event:
            self.logprobs += [_logprob(each) for each in event["completion_probabilities"]]
        self.text = event["content"]
        if not self.text or (self.doubtful and not (len(self.ids) == 1 and self.text.isascii())):
            return None
        return self.piece(tuple(self.ids))

    def piece(self, ids: tuple[int, ...]) -> Piece:
        """Return the piece of the text so far."""
        piece = Piece(self.text, ids, tuple(self.logprobs), len(ids))
        self.text, self.doubtful, self.is_cut = "", False, False
        self.ids.clear()
        self.logprobs.clear()
        return piece

    def _end(self, event: Mapping[str, Any]) -> None:
        kind = event["stop_type"]
        self.finish = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}[kind]
        self.is_cut = kind == "limit" and bool(self.ids)
        self.stopped_by_text, self.stream.settled = kind == "word", True
        self.prompt_tokens, self.cached_tokens = event["tokens_evaluated"], (event.get("timings") or {}).get("cache_n", self.cached_tokens)

    def last(self) -> Piece:
        return Piece(
            prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens, finish=self.finish, stopped_by_text=self.stopped_by_text
        )


def _logprob(found: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(found["id"], found["logprob"], tuple((each["id"], each["logprob"]) for each in found["top_logprobs"]))
