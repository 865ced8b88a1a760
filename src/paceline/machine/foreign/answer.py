"""An answer from an engine of another maker, as the stream of chunks that own engines give.

Laws:
- The text is that of the tokens, cut at stop strings as own engines cut it (`engine.sequence.TextStream`). Tokens of an earlier holder are counted and not sent
  again, so an answer that moves between holders repeats and drops nothing at the seam.
- An answer that the engine breaks off, or ends without saying why, is lost and no short answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from paceline.core.background import end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import EngineGone, NotServed, PacelineError
from paceline.core.generation import PROMPT_PROGRESS, FinishReason, GenerationChunk, GenerationRequest, ModelLoading, Notice, TokenLogprob
from paceline.core.text import Tokenizer
from paceline.engine.sequence import TextStream, overlap
from paceline.engines.contract import AnswerPiece, Ask, ForeignEngine, Takes
from paceline.engines.passed_chat import passed_chat
from paceline.engines.sense import nonsense
from paceline.machine.foreign.model import ForeignModel, as_clients_see
from paceline.machine.foreign.rates import Timed
from paceline.machine.foreign.silence import Silence, always

MOST_WAITING = 32
"""Chunks that wait for a reader. Raising it: an engine that writes faster than a client reads fills more memory."""
LOADING_S = 2.0
"""Seconds between two notices that a model is loaded. Raising it: clients see older figures."""


class ForeignAnswer:
    """Implements `core.inference.ChunkStream`.

    Args:
        before: awaited before the engine is asked. Raises if the engine has another model by that name now. Returns the expected seconds of the load that
            the request causes; None: the model is loaded.
        silence: ends sequences at which the engine hangs.
        allowed: returns the seconds of silence that a prompt is allowed, from its size as in `Timed.size`. None: as long as `EnginePatience` says.
        is_loaded: asks the engine whether it has the model loaded.
        ended: called once, when the stream is over: with the error that ended it, or None.
        timed: called with what each whole sequence took.
    """

    def __init__(
        self,
        engine: ForeignEngine,
        model: ForeignModel,
        request: GenerationRequest,
        clock: Clock,
        *,
        before: Callable[[], Awaitable[float | None]],
        silence: Silence | None = None,
        allowed: Callable[[int], float | None] = lambda _: None,
        is_loaded: Callable[[], Awaitable[bool]] = always,
        ended: Callable[[BaseException | None], None] = lambda _: None,
        timed: Callable[[Timed], None] = lambda _: None,
    ) -> None:
        self._engine, self._model, self._request, self._clock = engine, model, request, clock
        self._before, self._ended, self._timed = before, ended, timed
        self._silence, self._allowed, self._is_loaded = silence or Silence(), allowed, is_loaded
        self._load_s: float | None = None
        """Expected seconds of the load that this answer waits for; None: none."""
        self._has_begun = False
        """The engine wrote something."""
        self._tasks: list[asyncio.Task[None]] | None = None
        self._queue: asyncio.Queue[GenerationChunk | BaseException | None] = asyncio.Queue(MOST_WAITING)
        self._open = 0
        self._over = False

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]:
        return self

    async def __anext__(self) -> Sequence[GenerationChunk]:
        if self._over:
            raise StopAsyncIteration
        if self._tasks is None:
            await self._checked()
            if self._over:  # closed meanwhile
                raise StopAsyncIteration
            self._tasks = [asyncio.create_task(self._write(index)) for index in self._request.indices]
            self._open = len(self._tasks)
            if self._load_s is not None:
                self._tasks.append(asyncio.create_task(self._tell_loading(self._load_s)))
        items = [await self._queue.get()] if self._open else []
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        chunks: list[GenerationChunk] = []
        for item in items:
            match item:
                case None:
                    self._open -= 1
                case BaseException():
                    if chunks:  # what came before the error is the client's
                        self._queue.put_nowait(item)
                        return chunks
                    await self._end(item)
                    raise self._told(item) from item
                case _:
                    chunks.append(item)
        if not chunks and not self._open:
            await self._end(None)
            raise StopAsyncIteration
        return chunks

    async def _checked(self) -> None:
        try:
            self._load_s = await self._before()
        except BaseException as error:
            await self._end(error)
            if (told := self._told(error)) is error:
                raise
            raise told from error

    def _told(self, error: BaseException) -> BaseException:
        return error if not isinstance(error, PacelineError) else as_clients_see(error, self._engine.door, self._model)

    async def aclose(self) -> None:
        """End it at the engine. Idempotent."""
        await self._end(None)

    async def _end(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            self._ended(error)
            await end_tasks(*(self._tasks or ()))

    async def _write(self, index: int) -> None:
        try:
            async with aclosing(self._chunks(index)) as chunks:
                async for chunk in chunks:
                    await self._queue.put(chunk)
            await self._queue.put(None)
        except PacelineError as error:
            await self._queue.put(error)
        except Exception as error:  # noqa: BLE001 - whatever the engine wrote
            await self._queue.put(nonsense(str(self._model.identity), error))

    async def _chunks(self, index: int) -> AsyncGenerator[GenerationChunk, None]:
        request = self._request
        sequence = (_Passed if request.chat else _Sequence)(self._model, request, index)
        ask = await sequence.ask()
        began_s = first_s = self._clock.monotonic()
        prompt, cached, is_first = len(request.prompt_ids) + len(request.so_far.get(index, ())), 0, True
        size = prompt or len(request.chat)
        allowed_s = self._allowed(size) if self._load_s is None else None
        async with aclosing(self._silence.watched(self._engine.generate(ask), allowed_s, self._is_loaded)) as pieces:
            async for piece in pieces:
                self._has_begun = True
                cached = piece.cached_tokens or cached  # several pieces may tell it
                prompt = prompt or piece.prompt_tokens
                chunk = await sequence.chunk(piece)
                if chunk is None:
                    continue
                if is_first and not chunk.notices and (chunk.token_ids or chunk.n_tokens):
                    is_first, first_s = False, self._clock.monotonic()
                yield chunk
                if chunk.finish_reason is not None:
                    break
        if not sequence.is_over:
            raise EngineGone(f"{self._model.identity} ended an answer of {self._model.name} before its end")
        read, rest_s = max(0, prompt - cached), self._clock.monotonic() - first_s
        computed = size * read // prompt if prompt else size
        place, loaded = request.indices.index(index), self._load_s is None
        self._timed(Timed(read, first_s - began_s, sequence.n_new, rest_s, computed, place, loaded))

    async def _tell_loading(self, expected_s: float) -> None:
        """Say now and then how long the engine has been loading the model."""
        began_s, request = self._clock.monotonic(), self._request
        while not self._has_begun:
            loading = ModelLoading(round(self._clock.monotonic() - began_s), max(1, round(expected_s)))
            self._queue.put_nowait(GenerationChunk(request.request_id, request.indices[0], (), "", notices=(loading.notice(),)))
            await asyncio.sleep(LOADING_S)


class _Sequence:
    """One sequence on its way from pieces to chunks."""

    def __init__(self, model: ForeignModel, request: GenerationRequest, index: int) -> None:
        assert model.tokenizer is not None, "what has no tokenizer gets whole chats"
        self._model, self._request, self._index = model, request, index
        self._tokenizer: Tokenizer = model.tokenizer
        self._so_far = request.so_far.get(index, ())
        self._text = TextStream(self._tokenizer, request.stop)
        for token in self._so_far:
            self._text.push(token)  # its text was sent, as far as it was certain
        self._ends = request.stop_ids if request.ignore_eos else request.stop_ids | self._tokenizer.eos_ids
        self._spelled = SpelledTokens(self._tokenizer) if model.form is Takes.TEXT else None
        self._cached: int | None = None
        self.n_new = 0
        self.is_over = False

    async def ask(self) -> Ask:
        """Return what the engine is asked.

        Raises:
            NotServed: the engine can't do a part of the request.
        """
        request, model = self._request, self._model
        for what, is_asked in {
            "the log probabilities of the prompt": request.scores_prompt,
            "a form, in the middle of an answer": request.grammar is not None and bool(self._so_far),
        }.items():
            if is_asked:
                raise NotServed(f"{model.name} runs in {model.identity}, which does not give {what}")
        ids = (*request.prompt_ids, *self._so_far)
        prompt = ids if model.form is Takes.IDS else await asyncio.to_thread(self._tokenizer.text_of, ids)
        most = None if request.max_tokens is None else request.max_tokens - len(self._so_far)
        sampling = request.sampling
        if sampling.seed is not None:
            # A holder that goes on elsewhere must not repeat the noise of the first tokens.
            sampling = replace(sampling, seed=(sampling.seed + self._index + len(self._so_far)) & 0x7FFFFFFF)
        return Ask(
            model.told.name,
            prompt,
            most,
            sampling,
            stop_ids=request.stop_ids,
            ignore_eos=request.ignore_eos,
            grammar=request.grammar,
            cache_salt=request.cache_salt,
            via=request.via,
        )

    async def chunk(self, piece: AnswerPiece) -> GenerationChunk | None:
        """Return what a piece adds to the answer; None if that is nothing."""
        id_ = self._request.request_id
        if piece.cached_tokens and self._cached is None:
            self._cached = min(piece.cached_tokens, len(self._request.prompt_ids))
        if piece.tokens_read is not None:
            n_prompt = len(self._request.prompt_ids) + len(self._so_far)
            detail: Mapping[str, str | int | float] = {"tokens_read": min(piece.tokens_read, n_prompt), "tokens": n_prompt}
            return GenerationChunk(id_, self._index, (), "", notices=(Notice(PROMPT_PROGRESS, detail),))
        tokens = piece.token_ids
        if self._spelled is not None:
            tokens = await asyncio.to_thread(self._spelled.tokens, piece.text, is_last=piece.finish is not None)
        size = self._tokenizer.size
        if any(not 0 <= token < size for token in tokens):
            raise EngineGone(f"{self._model.identity} wrote a token that {self._model.name} does not have")
        text, taken, reason = self._take(tokens)
        if reason is None and piece.finish is not None:
            reason = piece.finish
            if reason is FinishReason.STOP and self._ends and (not tokens or tokens[-1] not in self._ends):
                taken = (*taken, min(self._ends))  # the engine keeps it to itself
        if reason is not None:
            self.is_over = True
            text += self._text.flush()
        if not (taken or text or reason):
            return None
        cached = 0
        if self.n_new == 0 and self._cached:
            cached = self._cached
        self.n_new += len(taken)
        logprobs = tuple(_known(each, size) for each in piece.logprobs[: len(taken)])
        return GenerationChunk(id_, self._index, taken, text, logprobs, reason, cached_tokens=cached)

    def _take(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...], FinishReason | None]:
        """Return the text of tokens, those that count, and why the answer ends with them."""
        text, most = "", self._request.max_tokens
        for place, token in enumerate(tokens, start=1):
            if token in self._ends:
                return text, tuple(tokens[:place]), FinishReason.STOP
            text += self._text.push(token)
            if self._text.stopped:
                return text, tuple(tokens[:place]), FinishReason.STOP
            if most is not None and len(self._so_far) + self.n_new + place >= most:
                return text, tuple(tokens[:place]), FinishReason.LENGTH
        return text, tuple(tokens), None


def _known(found: TokenLogprob, size: int) -> TokenLogprob:
    """Return a log probability with the alternatives that the vocabulary has. Engines fill their vocabularies up with empty tokens.

    Raises:
        EngineGone: it is that of a token outside of the vocabulary.
    """
    if not 0 <= found.token_id < size:
        raise EngineGone(f"the log probability of token {found.token_id}, of a vocabulary of {size}")
    if all(0 <= token < size for token, _ in found.top):
        return found
    return replace(found, top=tuple(each for each in found.top if 0 <= each[0] < size))


def _read_chat(text: str) -> dict[str, Any]:
    try:
        given: object = orjson.loads(text)
    except orjson.JSONDecodeError:  # another machine wrote it
        given = None
    return passed_chat(given)


class _Passed:
    """One answer to a chat that the engine renders and reads itself."""

    def __init__(self, model: ForeignModel, request: GenerationRequest, index: int) -> None:
        self._model, self._request, self._index = model, request, index
        self.n_new = 0
        self.is_over = False

    async def ask(self) -> Ask:
        """Return what the engine is asked.

        Raises:
            NotServed: the engine takes no chats.
            InvalidRequest: the body is not that of a chat.
        """
        if Takes.MESSAGES not in self._model.told.takes:
            raise NotServed(f"{self._model.name} runs in {self._model.identity}, which takes no chats as they are")
        body = await asyncio.to_thread(_read_chat, self._request.chat)  # images take long
        if isinstance(seed := body.get("seed"), int):
            body["seed"] = (seed + self._index) % (1 << 63)  # engines take no longer ones
        return Ask(self._model.told.name, body, self._request.max_tokens, via=self._request.via)

    async def chunk(self, piece: AnswerPiece) -> GenerationChunk | None:
        """Return what a piece adds to the answer; None if that is nothing."""
        if piece.delta is None and piece.finish is None:
            return None
        self.is_over = piece.finish is not None
        self.n_new += piece.n_tokens
        deltas = () if piece.delta is None else (orjson.dumps(piece.delta).decode(),)
        return GenerationChunk(
            *(self._request.request_id, self._index, (), ""),
            deltas=deltas,
            n_tokens=piece.n_tokens,
            prompt_tokens=piece.prompt_tokens,
            finish_reason=piece.finish,
            cached_tokens=min(piece.cached_tokens, piece.prompt_tokens),
        )


class SpelledTokens:
    """Token ids of an answer of which only the text is known, piece by piece. Special tokens are spelled in it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode, self._special = tokenizer.encode_inside, {text: token for text, token in tokenizer.special_tokens.items() if text}
        self._split = re.compile(f"({'|'.join(map(re.escape, sorted(self._special, key=len, reverse=True)))})") if self._special else None
        self._held = ""

    def tokens(self, text: str, *, is_last: bool) -> tuple[int, ...]:
        """Return the tokens of a further piece; blocks. The end of a text that may begin a special token is held back."""
        text = self._held + text
        held = 0 if is_last else max((overlap(text, special) for special in self._special), default=0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        parts = [text] if self._split is None else self._split.split(text)
        return tuple(token for part in parts if part for token in ([self._special[part]] if part in self._special else self._encode(part)))
