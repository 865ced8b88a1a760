"""Bytes of a request body in, a `Call` out: parse, check, tokenize. Synchronous, in threads: tokenizers are waited for.

A text is refused by its length before it is tokenized where even the longest tokens could not fit it into the context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar
from uuid import uuid4

from pydantic import BaseModel

from paceline.core.clock import Clock
from paceline.core.encoding import EncoderModel, Task
from paceline.core.errors import ContextOverflow, InvalidRequest, ModelAway, NotServed, UnknownModel
from paceline.core.generation import GenerationRequest, KvLeg, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.inference import Inference, PassedChats, ServedModel, default_model
from paceline.server.call import EVERY_LETTER, Call, Reading
from paceline.server.fields import ignored_fields, read_body
from paceline.server.fitting import MEDIA_WORD, fit_chat
from paceline.server.infill import infill_ids
from paceline.server.messages import check_media, check_messages, json_bytes, without_headers
from paceline.server.passing import has_notes, passed_body
from paceline.server.requests import MAX_CHOICES, ChatCompletionRequest, CompletionRequest, Parted, Sampling
from paceline.server.shapes import ChatShape, CompletionShape
from paceline.server.tools import ModelFormats, Tools, answer_grammar, chat_of, grammar_of

Body = TypeVar("Body", bound=BaseModel)

NFC_SHRINK = 3
"""Unicode composition, which some tokenizers apply first, shortens UTF-8 at most threefold. ASCII it leaves alone."""
COMMAS_PER_TOKEN = 8
"""More than any text or list of ids comes to."""
SMALL_BODY_BYTES = 64 << 10
SPECIAL_TOKEN_BYTES = 64
"""Special tokens have no bytes in the vocabulary but some in a text; none is longer than this."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as a model is given it."""

    model: ServedModel
    ids: list[int]
    tools: Tools
    reading: Reading | None
    """How its answer is read."""
    fitted: tuple[str, ...] = ()
    """Names of what was changed to fit it to the model's template."""


class Intake:
    """Turns request bodies into calls for the models served."""

    def __init__(
        self,
        inference: Inference,
        clock: Clock,
        aliases: Collection[str] = (),
        *,
        uses_model_sampling: bool = True,
        keep_client_headers: bool = False,
        ways: Collection[str] = (),
        exact: bool = False,
        encoder_named: Callable[[str], EncoderModel | None] = lambda _: None,
        open_model: Callable[[str], ServedModel | None] | None = None,
    ) -> None:
        self._inference, self._encoder_named, self._open_model = inference, encoder_named, open_model
        self._clock, self._aliases, self._ways, self._exact = clock, aliases, ways, exact
        self._uses_model_sampling, self._keep_client_headers = uses_model_sampling, keep_client_headers
        self.formats = ModelFormats()
        self._longest_token: dict[str, int] = {}
        """In bytes, by fingerprint: what a name means may change."""

    def chat(self, body: bytes) -> Call:
        """Return the call of a chat completion.

        Raises:
            Refusal: the body is malformed.
            InvalidRequest, ContextOverflow, UnknownModel: it can't be served as asked.
        """
        asked = self.parse(ChatCompletionRequest, body)
        return replace(self.chat_of(asked), ignored=ignored_fields(asked))

    def chat_of(self, asked: ChatCompletionRequest) -> Call:
        """Return the call of a chat of any API; raises as `chat` does, but not Refusal."""
        return self.passed(asked) or self.call_of(asked, self.prompt_of(asked))

    def passed(self, asked: ChatCompletionRequest) -> Call | None:
        """Return the call of a chat that reaches its engine as it is; None if its prompt is rendered here. Raises as `chat_of` does."""
        model = self.model(asked.model)
        chats = model.chats
        if chats is None or not (chats.always or (chats.images and any(message.media for message in asked.messages))):
            return None
        return self._passed(asked, model, chats)

    def takes_images(self, name: str | None) -> bool:
        """Return whether the model of a name takes images. Raises as `model` does."""
        chats = self.model(name).chats
        return chats is not None and chats.images

    def _passed(self, asked: ChatCompletionRequest, model: ServedModel, chats: PassedChats) -> Call:
        """Return the call of a chat that reaches its engine as it is."""
        if wrong := check_messages(asked.messages):
            raise InvalidRequest(wrong, field=wrong.partition(":")[0])
        if not chats.images:
            check_media(asked.messages)
        for field, is_lacking in {
            "grammar": asked.grammar is not None,
            "regex": asked.regex is not None,
            "stop_token_ids": bool(asked.stop_token_ids),
            "logprobs": bool(asked.logprobs),
            "response_format": asked.response_format is not None and asked.response_format.type != "text" and not chats.schemas,
            "tools": bool(asked.tools) and not chats.tools,
            "continue_final_message": bool(asked.continue_final_message),
            "ignore_eos": bool(asked.ignore_eos),
            "kv_transfer_params": asked.kv_transfer_params is not None,
        }.items():
            if is_lacking:
                raise NotServed(f"{field}: {model.name} runs in an engine of another maker, which does not serve it", field=field)
        if asked.exact or self._exact:
            raise NotServed(f"exact: {model.name} runs in an engine of another maker, which promises no bytes", field="exact")
        call = self._call(ChatShape, asked, model, [[]], _most_of_chat(asked), None, "messages")
        body = passed_body(asked, takes_images=chats.images)
        fitted = (MEDIA_WORD,) if has_notes(asked.messages, takes_images=chats.images) else ()
        return replace(call, requests=tuple(replace(request, chat=body) for request in call.requests), is_turn=True, fitted=fitted)

    def prompt_of(self, asked: ChatCompletionRequest, *, begins_turn: bool = True) -> ChatPrompt:
        """Return a chat's prompt, however long. Raises as `chat_of` does, but for a small context only if that is clear before tokenizing.

        Args:
            begins_turn: end with the beginning of the assistant's turn.
        """
        model = self.model(asked.model)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise InvalidRequest("top_logprobs: only together with logprobs: true", field="top_logprobs")
        tools = Tools.of(asked)
        if wrong := check_messages(asked.messages):  # before any is dropped: an error names the place that the client gave it
            raise InvalidRequest(wrong, field=wrong.partition(":")[0])
        check_media(asked.messages)
        if not self._keep_client_headers:
            asked = asked.model_copy(update={"messages": without_headers(asked.messages)})
        self._check_length(model, [text for m in asked.messages for text in m.letters], "messages")
        self._check_length(model, [json_bytes(tool).decode() for tool in tools.shown], "tools")
        template = (model.tokenizer.tool_template if tools.shown else None) or model.tokenizer.chat_template
        form = self.formats.of(model, template)
        chat = chat_of(asked, tools, template or "", knows_tools=form.described.knows_tools)
        now = asked.now or datetime.fromtimestamp(self._clock.wall()).astimezone()
        try:
            fitted = fit_chat(
                chat, lambda messages, given: model.tokenizer.render_chat(messages, now, replace(given, begins_turn=begins_turn))
            )
        except InvalidRequest as error:
            raise InvalidRequest(error.message, error.hint, field=error.field or "messages") from error
        form = form.in_words if fitted.in_words else form
        media = (MEDIA_WORD,) if any(message.media for message in asked.messages) else ()
        return ChatPrompt(model, fitted.ids, tools, form.reading(model, tools, fitted.ids), (*fitted.changes, *media))

    def call_of(self, asked: ChatCompletionRequest, prompt: ChatPrompt) -> Call:
        """Return the call of a chat with a written prompt; raises as `chat_of` does."""
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        call = self._call(ChatShape, asked, prompt.model, [prompt.ids], _most_of_chat(asked), logprobs, "messages")
        grammar = answer_grammar(asked, prompt.tools, prompt.reading, prompt.model.tokenizer.special_tokens)
        if grammar is not None and prompt.model.chats is not None:
            return self._passed(asked, prompt.model, prompt.model.chats)  # its engine follows no grammar over ids
        requests = tuple(replace(request, grammar=grammar) for request in call.requests)
        is_turn, reading = not asked.continue_final_message, prompt.reading
        if reading is not None and grammar is not None and grammar.kind in EVERY_LETTER:
            reading = replace(reading, in_reasoning=False)  # the form begins at once, also where the template opened the thoughts
        return replace(call, reading=reading, requests=requests, is_turn=is_turn, fitted=prompt.fitted)

    def completion(self, body: bytes) -> Call:
        """Return the call of a plain completion; raises as `chat` does."""
        asked = self.parse(CompletionRequest, body)
        return replace(self.completion_of(asked), ignored=ignored_fields(asked))

    def completion_of(self, asked: CompletionRequest) -> Call:
        """Return the call of a plain completion of any API; raises as `chat` does, but not Refusal."""
        model = self.model(asked.model)
        prompt = asked.prompt
        prompts: list[list[int]] = []
        special = asked.add_special_tokens is not False
        texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
        for text in texts:
            self._check_length(model, [text], "prompt")
            prompts.append(model.tokenizer.encode(text, add_special=special))
        if not texts:
            nested = [item for item in prompt if isinstance(item, list)]
            prompts.extend(nested or [[item for item in prompt if isinstance(item, int)]])
        if len(prompts) * (asked.n or 1) > MAX_CHOICES:
            raise InvalidRequest(f"n: prompts times n is {len(prompts) * (asked.n or 1)}, beyond {MAX_CHOICES}", field="n")
        for ids in prompts:
            if not ids:
                raise InvalidRequest("prompt: empty, and this model starts no text by itself", field="prompt")
            _in_vocabulary(ids, model.tokenizer.size, "prompt")
        if asked.suffix:
            if asked.echo:
                raise InvalidRequest("echo: a text that is filled in is not repeated", "Send echo or suffix.", field="echo")
            self._check_length(model, [asked.suffix], "suffix")
            prompts = infill_ids(model.tokenizer, prompts, asked.suffix)
        most = 0 if asked.echo and asked.max_tokens == 0 else _most(asked.max_tokens, "max_tokens")
        call = self._call(CompletionShape, asked, model, prompts, most, asked.logprobs, "prompt")
        grammar = grammar_of(asked)
        call = replace(call, requests=tuple(replace(request, grammar=grammar) for request in call.requests))
        if asked.echo:
            scores = asked.logprobs is not None or most == 0
            requests = tuple(replace(request, scores_prompt=scores) for request in call.requests)
            call = replace(call, requests=requests, echoed=tuple(texts or map(model.tokenizer.text_of, prompts)))
        return call

    def parse(self, kind: type[Body], body: bytes) -> Body:
        """Check the body against its model, unless it has more parts than any prompt that fits.

        Every element of a JSON document but the first needs a comma, so counting them (at memory speed) bounds the work
        that follows, which holds the interpreter: millions of small elements would stall every stream for seconds.
        """
        if len(body) > SMALL_BODY_BYTES:
            commas = body.count(b",")
            longest = max((model.max_context for model in self._inference.models()), default=0)
            if commas > COMMAS_PER_TOKEN * longest + SMALL_BODY_BYTES:
                raise ContextOverflow(f"The body has {commas} commas, more than a context of {longest} tokens can need", "Send less.")
        return read_body(kind, body)

    def ids_of(self, model: ServedModel, text: str, *, add_special: bool) -> list[int]:
        """Return a text's token ids.

        Raises:
            InvalidRequest, ContextOverflow: it can't be encoded, or fits no context.
        """
        self._check_length(model, [text], "prompt")
        return model.tokenizer.encode(text, add_special=add_special)

    def text_of(self, model: ServedModel, ids: list[int], field: str) -> str:
        """Return the text that token ids spell.

        Raises:
            InvalidRequest: an id is outside the model's vocabulary.
        """
        return model.tokenizer.text_of(_in_vocabulary(ids, model.tokenizer.size, field))

    def model(self, name: str | None) -> ServedModel:
        """Return the model of a name, see `find_model`; without a name, the first that writes text.

        Raises:
            UnknownModel, ModelAway: as there; or no name is given, and no model is served.
            InvalidRequest: the model is an encoder.
        """
        if name is None:
            models = self._inference.models()
            if (default := default_model(models)) is not None:
                return default
            if models:
                names = ", ".join(model.name for model in models)
                raise UnknownModel(
                    "The request names no model, and all that are served take one that does: prompts leave the home network for them, or an engine has "
                    "to load them first",
                    f"Name one: {names}.",
                )
            hint = "Load one: paceline load NAME." if self._open_model is None else "Name one: /v1/models lists those that would be loaded."
            raise UnknownModel("No model is served here now, and the request names none", hint)
        try:
            return find_model(name, self._inference, self._aliases)
        except (UnknownModel, ModelAway) as error:
            if self._open_model is not None and (opened := self._open_model(name)) is not None:
                return opened
            encoder = self._encoder_named(name)
            if encoder is None:
                raise
            does, path = ("makes embeddings", "/v1/embeddings") if Task.EMBED in encoder.tasks else ("ranks texts", "/v1/rerank")
            raise InvalidRequest(f"model: {name} {does} and writes no text", f"Ask it at {path}.", field="model") from error

    def _check_length(self, model: ServedModel, texts: list[str], field: str) -> None:
        """Refuse texts that can't fit, by their length alone.

        Raises:
            ContextOverflow: the fewest tokens they could make are more than the context.
        """
        fewest = 0
        for text in texts:
            size = len(text) if text.isascii() else len(text.encode()) // NFC_SHRINK
            if size <= model.max_context:
                continue  # most texts: no need to know the vocabulary
            fewest += size // self._longest(model)
        if fewest >= model.max_context:
            raise ContextOverflow(
                f"{field}: at least {fewest} tokens, and {model.name} holds {model.max_context} with the answer",
                "Send less text.",
                field=field,
            )

    def _longest(self, model: ServedModel) -> int:
        longest = self._longest_token.get(model.fingerprint)
        if longest is None:
            vocabulary = model.tokenizer
            longest = max(SPECIAL_TOKEN_BYTES, *(len(vocabulary.token_bytes(i)) for i in range(vocabulary.size)))
            self._longest_token[model.fingerprint] = longest
        return longest

    def _call(
        self,
        shape: type[ChatShape | CompletionShape],
        asked: Parted,
        model: ServedModel,
        prompts: list[list[int]],
        most: int | None,
        logprobs: int | None,
        field: str,
    ) -> Call:
        if asked.stream_options is not None and not asked.stream:
            raise InvalidRequest("stream_options: only together with stream: true", field="stream_options")
        defaults = model.tokenizer.sampling_defaults if self._uses_model_sampling else {}
        sampling = sampling_of(asked, logprobs, model.tokenizer.size, defaults)
        call_id = shape.id_prefix + uuid4().hex
        n = asked.n or 1
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        stop_ids = frozenset(_in_vocabulary(asked.stop_token_ids or (), model.tokenizer.size, "stop_token_ids"))
        return Call(
            id=call_id,
            shape=shape,
            model=model,
            created=int(self._clock.wall()),
            requests=tuple(
                GenerationRequest(
                    request_id=RequestId(f"{call_id}-{place}" if len(prompts) > 1 else call_id),
                    prompt_ids=tuple(ids),
                    max_tokens=_max_tokens(model, len(ids), most, field),
                    sampling=sampling,
                    n=n,
                    stop=stop,
                    stop_ids=stop_ids,
                    ignore_eos=bool(asked.ignore_eos),
                    draft=asked.draft,
                    ways=None if asked.ways is None else frozenset(_known(asked.ways, self._ways)),
                    exact=self._exact or bool(asked.exact),
                    cache_salt=asked.cache_salt or "",
                    leg=_leg(asked, most, "" if shape is ChatShape else f"-{place}", n_prompts=len(prompts)),
                )
                for place, ids in enumerate(prompts)
            ),
            n=n,
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            logprobs=logprobs is not None,
            include_events=bool(asked.stream_options and asked.stream_options.include_events),
        )


def _leg(asked: Parted, most: int | None, place: str, *, n_prompts: int) -> KvLeg | None:
    """Return the part of a request that a router wants from this node, as vLLM's routers ask for it; None: all of it."""
    said = asked.kv_transfer_params
    if said is None or not (said.do_remote_decode or said.do_remote_prefill):
        return None
    address = f"{said.remote_host}:{said.remote_port}" if said.remote_host and said.remote_port else ""
    for field, wrong in {
        "do_remote_prefill": (said.do_remote_decode and said.do_remote_prefill, "a prompt is computed here or elsewhere"),
        "do_remote_decode": (said.do_remote_decode and (most != 1 or asked.stream), "send max_tokens: 1, and no stream"),
        "remote_engine_id": (said.do_remote_prefill and not said.remote_engine_id and not address, "say which machine, or its address"),
    }.items():
        if wrong[0]:
            raise InvalidRequest(f"kv_transfer_params.{field}: {wrong[1]}", field=f"kv_transfer_params.{field}")
    if said.do_remote_decode:
        return KvLeg(place, is_prefill=True)
    # With several prompts the id would name all of them, so it is dropped.
    remote_id = (said.remote_request_id or "") if n_prompts == 1 else ""
    return KvLeg(place, False, said.remote_engine_id or "", address, said.tp_size or 1, remote_id)


def _known(ways: Sequence[str], known: Collection[str]) -> Sequence[str]:
    if unknown := [way for way in ways if way not in known]:
        raise InvalidRequest(f"ways: there is no way {unknown[0]!r} of running a model", f"Choose of {', '.join(known)}.", field="ways")
    return ways


def listed_models(inference: Inference, aliases: Collection[str]) -> list[ServedModel]:
    """Return the models that clients see: this machine's own first, its aliases last, each name once."""
    models = sorted(inference.models(), key=lambda model: (model.facts.leaves_network, model.facts.on_disk))  # many clients take the first
    default = default_model(models)
    named = [model for model in models if model.name not in aliases]
    return named if default is None else [*named, *(replace(default, name=name) for name in aliases)]


def find_model(name: str, inference: Inference, aliases: Collection[str]) -> ServedModel:
    """Return the model that a client means: by this machine's own alias, else by its name, else without `:latest`, else without case.

    A model outside of the home network is reached by its exact name, or with `:latest` unless a model at home by that name is away.
    Another machine's model can't take an alias. Of names that differ in case alone, this machine's own comes first, then the first by name: another machine
    that offers one keeps no client from the others.

    Raises:
        UnknownModel, ModelAway: no model fits.
    """
    models = inference.models()
    if name in aliases and (default := default_model(models)) is not None:
        return default
    plain = name.removesuffix(":latest")
    by_name = {model.name: model for model in models}
    if found := by_name.get(name):
        return found
    found = by_name.get(plain)
    if found is not None and not (found.facts.leaves_network and inference.expects(name)):
        return found
    for model in models:
        if model.name.lower() == plain.lower() and not model.facts.leaves_network:
            return model
    raise not_served(name, inference)


def not_served(name: str, inference: Inference) -> UnknownModel | ModelAway:
    """Return the error for a model that is not served here now."""
    if inference.expects(name):
        return ModelAway(f"No machine serves the model {name!r} at this moment", "Try again in a few seconds.")
    served = [model.name for model in inference.models()]
    return UnknownModel(f"The model {name!r} is not served here", f"Served: {', '.join(served) or 'none'}.")


def _most(asked: int | None, field: str) -> int | None:
    """Return how many tokens an answer may have; None, for None and -1: as many as the context leaves.

    Raises:
        InvalidRequest: 0 was asked for.
    """
    if asked == 0:
        raise InvalidRequest(
            f"{field}: an answer has one token at least", "Send 1 or more, or -1 for the rest of the context.", field=field
        )
    return None if asked == -1 else asked


def _most_of_chat(asked: ChatCompletionRequest) -> int | None:
    """Return how many tokens a chat's answer may have, by either of its two fields. Raises as `_most`, and if the fields differ."""
    most, replacing = _most(asked.max_tokens, "max_tokens"), _most(asked.max_completion_tokens, "max_completion_tokens")
    if most is not None and replacing not in (None, most):
        raise InvalidRequest("max_completion_tokens: differs from max_tokens, which it replaces", field="max_completion_tokens")
    return most if replacing is None else replacing


def _max_tokens(model: ServedModel, prompt: int, most: int | None, field: str) -> int | None:
    room = model.max_context - prompt
    if room >= 1 and most is not None:
        field = "max_tokens"  # the prompt alone would fit
    if room < 1 or (most is not None and most > room):
        asked = f" and {most} of answer" if most is not None else ""
        raise ContextOverflow(
            f"{field}: {prompt} tokens of prompt{asked} exceed the context of {model.name}, {model.max_context} tokens",
            "Shorten the prompt." if most is None else "Shorten the prompt or lower max_tokens.",
            field=field,
        )
    return most


def sampling_of(asked: Sampling, logprobs: int | None, vocabulary: int, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the client's sampling fields; missing ones come from the model's own, then from OpenAI's defaults."""

    def chosen(name: str, value: float | None, otherwise: float) -> float:
        return defaults.get(name, otherwise) if value is None else value

    return SamplingParams(
        temperature=chosen("temperature", asked.temperature, 1.0),
        top_k=max(int(chosen("top_k", asked.top_k, 0)), 0),
        # 0 means "the likeliest token only" to OpenAI's clients; any positive share keeps that one.
        top_p=max(chosen("top_p", asked.top_p, 1.0), 1e-9),
        min_p=chosen("min_p", asked.min_p, 0.0),
        repetition_penalty=chosen("repetition_penalty", asked.repetition_penalty, 1.0),
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=None if asked.seed is None else asked.seed & ((1 << 63) - 1),
        logit_bias=_logit_bias(asked.logit_bias or {}, vocabulary),
        logprobs=logprobs,
    )


def _logit_bias(asked: Mapping[str, float], vocabulary: int) -> dict[int, float]:
    ids = _in_vocabulary([int(key) for key in asked], vocabulary, "logit_bias")
    return dict(zip(ids, asked.values(), strict=True))


def _in_vocabulary(ids: list[int] | tuple[int, ...], size: int, field: str) -> list[int] | tuple[int, ...]:
    if ids and max(ids) >= size:
        raise InvalidRequest(f"{field}: token {max(ids)} is not one of the model's {size}", field=field)
    return ids
