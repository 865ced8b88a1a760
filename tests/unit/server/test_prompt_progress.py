"""What a silent stream carries, in every API: how far the prompt is read. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_inference import ScriptedInference

from paceline.core.generation import (
    MODEL_LOADING,
    PROMPT_PROGRESS,
    AnswerProgress,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    ModelLoading,
    Notice,
    PromptReading,
    progress_of,
    progress_of_comment,
)
from paceline.core.ids import RequestId
from paceline.server.answer import Answer
from paceline.server.anthropic.shape import PING, MessageShape
from paceline.server.call import Call
from paceline.server.metrics import Meter
from paceline.server.ollama.shape import OllamaChatShape
from paceline.server.responses.shape import ResponsesShape
from paceline.server.shape import COMMENT, Shape
from paceline.server.shapes import ChatShape, CompletionShape

COMMENT_S = 10.0


class Reading(ScriptedInference):
    """Says how far each prompt is read, or how long its model has been loaded, waits for silences, then answers."""

    def __init__(self, read: Sequence[tuple[str, int | ModelLoading]], until_sent: Callable[[int], Any]) -> None:
        super().__init__()
        self._read, self._until_sent = read, until_sent

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        own = [tokens for name, tokens in self._read if name == request.request_id]
        for number, tokens in enumerate(own or [0]):
            if tokens:
                is_load = isinstance(tokens, ModelLoading)
                notice = tokens.notice() if is_load else Notice(PROMPT_PROGRESS, {"tokens_read": tokens, "tokens": 100})
                yield [GenerationChunk(request.request_id, 0, (), "", notices=(notice,))]
            await self._until_sent(number + 1)
        yield [GenerationChunk(request.request_id, 0, (104,), "h", finish_reason=FinishReason.LENGTH)]


async def sent_by(
    shape: Callable[[Call], Shape],
    read: Sequence[tuple[str, int | ModelLoading]],
    names: Sequence[str] = ("r",),
    *,
    include_events: bool = False,
) -> tuple[list[bytes], list[float]]:
    """The bodies of a stream, and when each was sent."""
    clock, bodies, times = FakeClock(), list[bytes](), list[float]()
    more = asyncio.Condition()

    async def sleep(seconds: float) -> None:
        for _ in range(20):  # what is ready to be sent comes first
            await asyncio.sleep(0)
        clock.advance(seconds)

    async def until_sent(count: int) -> None:
        async with more:
            await more.wait_for(lambda: len(bodies) >= count)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            async with more:
                bodies.append(message["body"])
                times.append(clock.monotonic())
                more.notify_all()

    inference = Reading(read, until_sent)
    requests = tuple(GenerationRequest(RequestId(name), (1,), 8) for name in names)
    call = Call(
        "id-1",
        shape,
        inference.models()[0],
        5,
        requests,
        1,
        stream=True,
        include_usage=False,
        logprobs=False,
        include_events=include_events,
    )
    answer = Answer(call, inference, Meter(), clock, 0.0, asyncio.get_running_loop().create_future(), COMMENT_S, sleep)
    await answer({"type": "http", "path": "/v1/chat/completions"}, asyncio.get_running_loop().create_future, send)  # type: ignore[arg-type]
    return bodies, times


SAID = b": prompt: 40 of 100 tokens read\n\n"


@pytest.mark.parametrize(
    ("shape", "told", "untold"),
    [
        (ChatShape, SAID, COMMENT),
        (CompletionShape, SAID, COMMENT),
        (MessageShape, SAID + PING, PING),
        (OllamaChatShape, b'"done":false', b'"done":false'),  # lines of JSON have no comments
    ],
)
def test_a_silence_says_how_far_the_prompt_is_read(shape: Callable[[Call], Shape], told: bytes, untold: bytes) -> None:
    bodies, times = asyncio.run(sent_by(shape, [("r", 40), ("r", 80)]))
    assert told in bodies[0]
    assert times[:2] == [COMMENT_S, 2 * COMMENT_S]
    assert (b": prompt: 80 of 100 tokens read" in bodies[1]) == told.startswith(SAID)
    assert ResponsesShape.silence is ChatShape.silence is Shape.silence
    bodies, times = asyncio.run(sent_by(shape, []))
    assert untold in bodies[0]
    assert b": prompt" not in b"".join(bodies)
    assert times[0] == COMMENT_S


@pytest.mark.parametrize(
    ("shape", "told"),
    [(ChatShape, b"\n\n"), (MessageShape, b"\n\n" + PING), (OllamaChatShape, b'"done":false')],
    ids=["chat", "messages", "ollama"],
)
def test_a_silence_says_how_long_a_model_has_been_loaded_and_then_how_far_the_prompt_is_read(
    shape: Callable[[Call], Shape], told: bytes
) -> None:
    bodies, _ = asyncio.run(sent_by(shape, [("r", ModelLoading(2, 40)), ("r", ModelLoading(12, 40)), ("r", 80)]))
    has_comments = shape is not OllamaChatShape
    assert told in bodies[0]
    for body, words in zip(
        bodies, (b": loading the model: 2 of about 40 s", b": loading the model: 12 of", b": prompt: 80 of 100"), strict=False
    ):
        assert (words in body) == has_comments


def test_a_load_comes_before_the_prompts_that_wait_with_it() -> None:
    bodies, _ = asyncio.run(sent_by(CompletionShape, [("a", 40), ("b", ModelLoading(3, 9))], "ab"))
    assert b": loading the model: 3 of about 9 s" in bodies[0]


@pytest.mark.parametrize("detail", [{}, {"seconds": 1}, {"seconds": -1, "expected_seconds": 2}, {"seconds": "1", "expected_seconds": 2}])
def test_a_notice_of_another_node_that_is_malformed_tells_nothing(detail: dict[str, int | str]) -> None:
    assert progress_of(Notice(MODEL_LOADING, detail)) is None
    assert progress_of(Notice("other", {"seconds": 1, "expected_seconds": 2})) is None


@pytest.mark.parametrize("progress", [ModelLoading(3, 40), PromptReading(10, 20)])
def test_a_comment_is_read_as_it_was_written(progress: AnswerProgress) -> None:
    assert progress_of_comment(progress.comment().decode().strip()) == progress
    assert progress_of_comment(": the answer goes on") is None


def test_several_prompts_are_read_together_and_those_that_were_read_count_no_more() -> None:
    bodies, _ = asyncio.run(sent_by(CompletionShape, [("a", 40), ("b", 10), ("b", 30), ("b", 60)], "ab"))
    assert b"prompt: 50 of 200 tokens read" in bodies[0]
    assert b" of 100 tokens read" in b"".join(bodies)


def test_a_client_that_asks_for_events_has_each_as_one() -> None:
    bodies, _ = asyncio.run(sent_by(ChatShape, [("r", 40)], include_events=True))
    assert b"event: prompt_progress\ndata: " in b"".join(bodies)
    assert b'"tokens_read":40' in b"".join(bodies)
