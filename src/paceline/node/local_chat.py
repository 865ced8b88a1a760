"""A chat with an engine in this process, without a server: synchronous, one answer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Self
from uuid import uuid4

from paceline.core.errors import ContextOverflow, PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream, Inference, ServedModel


class LocalChat:
    """Answers to conversations, streamed, on an event loop of its own that runs only while an answer does."""

    def __init__(self, inference: Inference, model: ServedModel) -> None:
        self._inference = inference
        self._model = model
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.close()

    def say(self, messages: Sequence[Mapping[str, str]], *, temperature: float, seed: int | None) -> Generator[str, None, bool]:
        """Stream the answer's text; returns whether it was cut for want of room. Closing the generator ends the generation.

        Raises:
            ContextOverflow: the conversation has outgrown the context.
            PacelineError: the engine failed.
        """
        prompt = tuple(self._model.tokenizer.render_chat(messages))
        if len(prompt) >= self._model.max_context:
            raise ContextOverflow(f"The conversation has outgrown the context of {self._model.max_context} tokens", "Shorten it.")
        sampling = SamplingParams(temperature=temperature, seed=seed)
        request = GenerationRequest(RequestId(f"chat-{uuid4().hex}"), prompt, None, sampling)
        stream = self._inference.generate(self._model.name, request)
        cut = False
        try:
            while (chunks := self._runner.run(_next(stream))) is not None:
                for chunk in chunks:
                    if chunk.finish_reason is FinishReason.ERROR:
                        raise PacelineError(chunk.error or "The generation failed")
                    cut = cut or chunk.finish_reason is FinishReason.LENGTH
                    if chunk.text:
                        yield chunk.text
        finally:
            self._runner.run(stream.aclose())
        return cut


async def _next(stream: ChunkStream) -> Sequence[GenerationChunk] | None:
    return await anext(stream, None)
