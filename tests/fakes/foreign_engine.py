"""An engine of another maker that writes a given text, for tests of what stands before engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from paceline.core.errors import EngineGone, PacelineError
from paceline.core.generation import FinishReason
from paceline.core.text import Tokenizer
from paceline.engines.contract import AnswerPiece, Ask, Busy, Door, EngineIdentity, EngineModel, Scores, Takes, Vectors


class ScriptedEngine:
    """Implements `engines.contract.Engine`.

    Args:
        answer: token ids that follow any prompt, whatever it is: of a prompt that ends in some of them, the rest.
        prompt: length of the prompt in tokens, so that the place in the answer is known.
        breaks: number of pieces after which it breaks off; None: never.
        cuts: number of tokens in each piece.
    """

    def __init__(
        self,
        answer: Sequence[int],
        prompt: int,
        *,
        tokenizer: Tokenizer | None = None,
        takes: Takes = Takes.IDS,
        breaks: int | None = None,
        cuts: int = 1,
        path: Path | None = None,
        url: str = "http://127.0.0.1:1",
        socket: Path | None = None,
    ) -> None:
        self._door = Door(url, socket=socket)
        self._answer, self._prompt, self._tokenizer, self._cuts = answer, prompt, tokenizer, cuts
        self.breaks = breaks
        self.cached = 0
        """Prompt tokens that two reports of progress and the last piece say were not computed again; 0: there are no reports."""
        self.asked: list[Ask] = []
        self.worked: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        """Calls for vectors and ranks: the model, the texts, and the marks of nodes."""
        self.fails_after: int | None = None
        """Calls for vectors and ranks that succeed before one breaks off; None: all."""
        self.bias = 0.0
        """Second number of every vector; the first is the text's length."""
        self.told: tuple[EngineModel, ...] = (EngineModel("tiny", frozenset({takes}), path=path, context=4096, slots=4),)
        self.trouble: PacelineError | None = None
        """Raised by everything but `close`."""
        self.looks = 0
        self.closed = False

    @property
    def door(self) -> Door:
        return self._door

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    async def identify(self) -> EngineIdentity | None:
        self._check()
        self.looks += 1
        return EngineIdentity("scripted", "1")

    async def models(self) -> tuple[EngineModel, ...]:
        self._check()
        return self.told

    async def is_ready(self) -> bool:
        self._check()
        return True

    async def busy(self) -> Busy:
        self._check()
        return Busy()

    async def load(self, model: str) -> None:
        raise AssertionError("a test never loads")

    async def unload(self, model: str) -> None:
        raise AssertionError("a test never unloads")

    async def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
        self.asked.append(ask)
        self._check()
        prompt = ask.prompt
        assert not isinstance(prompt, dict)
        if isinstance(prompt, str):
            assert self._tokenizer is not None
            whole = self._tokenizer.text_of(self._answer)
            done = next(n for n in range(len(self._answer) + 1) if prompt.endswith(self._tokenizer.text_of(self._answer[:n])) and n >= 0)
            pieces = [AnswerPiece(text=character, n_tokens=1) for character in whole[len(self._tokenizer.text_of(self._answer[:done])) :]]
        else:
            left = self._answer[len(prompt) - self._prompt :]
            left = left if ask.max_tokens is None else left[: ask.max_tokens]
            pieces = [AnswerPiece(token_ids=tuple(left[at : at + self._cuts])) for at in range(0, len(left), self._cuts)]
        if self.cached:
            progress = [
                AnswerPiece(tokens_read=read, prompt_tokens=self._prompt, cached_tokens=self.cached) for read in (self.cached, self._prompt)
            ]
            pieces = [*progress, *pieces]
        for place, piece in enumerate(pieces):
            if self.breaks is not None and place >= self.breaks:
                raise EngineGone("it broke off")
            yield piece
            await asyncio.sleep(0)
        yield AnswerPiece(finish=FinishReason.STOP, cached_tokens=self.cached)

    def _work(self, model: str, texts: tuple[str, ...], via: tuple[str, ...]) -> None:
        self.worked.append((model, texts, via))
        self._check()
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise EngineGone("it broke off")

    async def embed(self, model: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Vectors:
        self._work(model, texts, via)
        return Vectors([[float(len(text)), self.bias] for text in texts], sum(map(len, texts)))

    async def rerank(self, model: str, query: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Scores:
        self._work(model, (query, *texts), via)
        return Scores([float(text.count(query)) for text in texts], sum(map(len, texts)))

    async def close(self) -> None:
        self.closed = True
