"""An `Inference` without a model, for tests of the server: a byte tokenizer, and answers that repeat the prompt.

Honest in what the server relies on: a bounded queue, blocks held by live requests and freed when an iterator is closed,
stop ids and strings, lengths, `n`, logprobs, progress. Deterministic: token `k` of an answer is byte `k` of the prompt, cyclically.
`hold_after` makes every sequence wait at that many tokens until `release`, so that tests meet a request in mid-stream.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from paceline.core.errors import InvalidRequest, Overloaded
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, Notice, TokenLogprob
from paceline.core.inference import Progress, ServedModel
from paceline.core.model import BLOCK_TOKENS
from paceline.core.stats import EngineStats
from paceline.core.text import NOTHING_GIVEN, Given
from paceline.engine.config import check_draft
from paceline.engine.sequence import TextStream

EOS = 256
SIZE = 257


class ByteTokenizer:
    """A token is a byte; one more ends an answer."""

    defaults: Mapping[str, float] = {}

    @property
    def size(self) -> int:
        return SIZE

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself; nothing for the end of sequence."""
        return b"" if token_id == EOS else bytes([token_id])

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """UTF-8 bytes. There are no special tokens to add."""
        del add_special
        return list(text.encode())

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())

    def text_of(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    strips_space = False

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {}

    @property
    def chat_template(self) -> str | None:
        return None

    tool_template = None

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        return self.defaults

    @property
    def infill_tokens(self) -> None:
        return None

    @property
    def response_template(self) -> None:
        return None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        """The last message's content, so that a chat is answered with what was said; or gone on with it.

        Raises:
            InvalidRequest: the last message is empty or not the user's.
        """
        last = messages[-1]
        if last["role"] != ("assistant" if given.continues else "user") or not last["content"]:
            raise InvalidRequest("The last message should be the user's and not empty", field="messages")
        return self.encode(last["content"])


@dataclass(slots=True)
class _Live:
    blocks: int
    n: int


@dataclass(slots=True)
class _Counts:
    prompt: int = 0
    generated: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict[str, int])


class ScriptedInference:
    """Echoes prompts. Not thread-safe: lives on the server's event loop, as the protocol says."""

    def __init__(
        self,
        *,
        name: str = "echo",
        max_context: int = 4096,
        max_requests: int = 64,
        hold_after: int | None = None,
        fail_after: int | None = None,
        tokens_per_item: int = 1,
        fail_code: str | None = None,
        notices: Mapping[int, Notice] | None = None,
        tokenizer: ByteTokenizer | None = None,
    ) -> None:
        tokenizer = tokenizer or ByteTokenizer()
        self._model = ServedModel(name, created=1_700_000_000, max_context=max_context, tokenizer=tokenizer, fingerprint="fp_echo")
        self._max_requests = max_requests
        self._hold_after = hold_after
        self._fail_after = fail_after
        self._tokens_per_item = tokens_per_item
        self._fail_code = fail_code
        self._notices = dict(notices or {})
        """Said when so many tokens are there."""
        self._released = asyncio.Event()
        self._changed = asyncio.Event()
        self._live: dict[str, _Live] = {}
        self._counts = _Counts()
        self.awaited = set[str]()
        """What `expects` says yes to; tests set it."""
        self.reported = Progress(busy=False, seconds_since_step=0.0)
        """What `progress` says; tests set it."""

    def models(self) -> Sequence[ServedModel]:
        return (self._model,)

    def expects(self, model: str) -> bool:
        return model in self.awaited

    def release(self) -> None:
        """Let held sequences go on."""
        self._released.set()

    async def until_live(self, count: int) -> None:
        """Wait until exactly so many requests are live (0: all were closed and their blocks freed)."""
        while len(self._live) != count:
            self._changed.clear()
            await self._changed.wait()

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        """Echo the prompt, one step of all `n` sequences an item."""
        if model != self._model.name:
            raise ValueError(model)  # the server has checked
        check_draft(request, ())
        if len(self._live) >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are running", "Come back later.", retry_after_s=3)
        most = self._model.max_context - len(request.prompt_ids) if request.max_tokens is None else request.max_tokens
        blocks = request.n * math.ceil((len(request.prompt_ids) + most) / BLOCK_TOKENS)
        self._live[request.request_id] = _Live(blocks, request.n)
        self._changed.set()
        self._counts.prompt += len(request.prompt_ids)
        ending = FinishReason.ABORT
        try:
            done, text = 0, TextStream(self._model.tokenizer, request.stop)
            if request.scores_prompt:
                scores = tuple(_logprob(token, request.sampling.logprobs or 0) for token in request.prompt_ids[1:])
                for part in (scores[:2], scores[2:]):
                    yield [GenerationChunk(request.request_id, index, (), "", prompt_logprobs=part) for index in range(request.n)]
            if not most:
                ending = FinishReason.LENGTH
                yield [GenerationChunk(request.request_id, index, (), "", finish_reason=ending) for index in range(request.n)]
            while done < most:
                if done in self._notices:
                    yield [GenerationChunk(request.request_id, 0, (), "", notices=(self._notices[done],))]
                if self._hold_after is not None and done >= self._hold_after:
                    await self._released.wait()
                else:
                    await asyncio.sleep(0)
                if self._fail_after is not None and done >= self._fail_after:
                    ending = FinishReason.ERROR
                    error, code = "The script says: fail", self._fail_code
                    yield [GenerationChunk(request.request_id, 0, (), "", finish_reason=ending, error=error, code=code)]
                    return
                count = min(self._tokens_per_item, most - done)
                item = self._step(request, text, done, count, most)
                done += count
                self._counts.steps += 1
                self._counts.generated += request.n * count
                if item[-1].finish_reason is not None:
                    ending = item[-1].finish_reason
                yield item
                if ending is not FinishReason.ABORT:
                    return
        finally:
            del self._live[request.request_id]
            self._changed.set()
            self._counts.finished[ending] = self._counts.finished.get(ending, 0) + request.n

    def _step(self, request: GenerationRequest, stream: TextStream, done: int, count: int, most: int) -> list[GenerationChunk]:
        chunks: list[GenerationChunk] = []
        for place in range(done, done + count):
            token = request.prompt_ids[place % len(request.prompt_ids)]
            ended = token in request.stop_ids or (token in self._model.tokenizer.eos_ids and not request.ignore_eos)
            text = "" if ended else stream.push(token)
            stopped = ended or stream.stopped
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH if place + 1 == most else None
            if finish is not None:
                text += stream.flush()
            logprobs = () if request.sampling.logprobs is None else (_logprob(token, request.sampling.logprobs),)
            chunks.extend(
                GenerationChunk(request.request_id, index, (token,), text, logprobs, finish, cached_tokens=0 if place else 1)
                for index in range(request.n)
            )
            if finish is not None:
                break
        return chunks

    def stats(self) -> EngineStats:
        return EngineStats(
            running=sum(live.n for live in self._live.values()),
            blocks_total=1 << 20,
            blocks_in_use=sum(live.blocks for live in self._live.values()),
            prompt_tokens=self._counts.prompt,
            generated_tokens=self._counts.generated,
            steps=self._counts.steps,
            finished=dict(self._counts.finished),
        )

    def progress(self) -> Progress:
        return self.reported


def _logprob(token: int, alternatives: int) -> TokenLogprob:
    """The token itself is certain; the others are impossible."""
    others = [other for other in range(SIZE) if other != token][: max(alternatives - 1, 0)]
    top = ((token, 0.0), *((other, -math.inf) for other in others)) if alternatives else ()
    return TokenLogprob(token, 0.0, top)
