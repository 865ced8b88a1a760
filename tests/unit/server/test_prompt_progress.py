"""What a silent stream carries, in every API: how far the prompt is read. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_inference import ScriptedInference

from paceline.core.generation import PROMPT_PROGRESS, FinishReason, GenerationChunk, GenerationRequest, Notice
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
    """Says how far each prompt is read, waits for silences, then answers."""

    def __init__(self, read: Sequence[tuple[str, int]], until_sent: Callable[[int], Any]) -> None:
        super().__init__()
        self._read, self._until_sent = read, until_sent

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        own = [tokens for name, tokens in self._read if name == request.request_id]
        for number, tokens in enumerate(own or [0]):
            if tokens:
                notice = Notice(PROMPT_PROGRESS, {"tokens_read": tokens, "tokens": 100})
                yield [GenerationChunk(request.request_id, 0, (), "", notices=(notice,))]
            await self._until_sent(number + 1)
        yield [GenerationChunk(request.request_id, 0, (104,), "h", finish_reason=FinishReason.LENGTH)]


async def sent_by(
    shape: Callable[[Call], Shape], read: Sequence[tuple[str, int]], names: Sequence[str] = ("r",), *, include_events: bool = False
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


def test_several_prompts_are_read_together_and_those_that_were_read_count_no_more() -> None:
    bodies, _ = asyncio.run(sent_by(CompletionShape, [("a", 40), ("b", 10), ("b", 30), ("b", 60)], "ab"))
    assert b"prompt: 50 of 200 tokens read" in bodies[0]
    assert b" of 100 tokens read" in b"".join(bodies)


def test_a_client_that_asks_for_events_has_each_as_one() -> None:
    bodies, _ = asyncio.run(sent_by(ChatShape, [("r", 40)], include_events=True))
    assert b"event: prompt_progress\ndata: " in b"".join(bodies)
    assert b'"tokens_read":40' in b"".join(bodies)
