"""Messages of one and many lines, and what is asked with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference
from tests.fakes.served import Served

from paceline.cli import chat
from paceline.cli.chat import read_message
from paceline.cli.endpoint import EndpointClient, LocalChat
from paceline.core.generation import PROMPT_PROGRESS, GenerationChunk, GenerationRequest, Notice, PromptReading, SamplingParams


def lines(*texts: str) -> Callable[[str], str]:
    left = iter(texts)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two \\", "three"], "one \ntwo \nthree"),
        (['"""', "first", "", "third", '"""'], "first\n\nthird"),
        (['"""first', 'last"""'], "first\nlast"),
        (['"""all of it"""'], "all of it"),
    ],
)
def test_messages(typed: list[str], message: str) -> None:
    assert read_message(lines(*typed), "") == message


def test_the_end_of_input_inside_a_text_is_the_end() -> None:
    with pytest.raises(EOFError):
        read_message(lines('"""', "unfinished"), "")


class Recommending(ByteTokenizer):
    defaults = {"temperature": 0.2, "top_k": 20}  # noqa: RUF012


class Recording(ScriptedInference):
    """Keeps how answers are to be drawn."""

    def __init__(self) -> None:
        super().__init__(tokenizer=Recommending())
        self.drawn: list[SamplingParams] = []

    def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        self.drawn.append(request.sampling)
        return super().generate(model, request)


def test_a_chat_that_says_no_temperature_is_drawn_as_the_model_s_maker_says() -> None:
    hello = [{"role": "user", "content": "hi"}]
    served = Served(Recording())
    try:
        with EndpointClient(served.url, None) as endpoint:
            for temperature in (None, 0.7):
                assert "".join(endpoint.say("echo", hello, temperature=temperature, seed=1, max_tokens=2)) == "hi"
    finally:
        served.close()
    expected = [SamplingParams(temperature=each, top_k=20, seed=1) for each in (0.2, 0.7)]
    assert served.inference.drawn == expected
    local = Recording()
    with LocalChat(local, local.models()[0]) as chat:
        for temperature in (None, 0.7):
            texts = chat.say(hello, temperature=temperature, seed=1)
            assert next(texts) == "h"
            texts.close()
    assert local.drawn == expected


class Slow(ScriptedInference):
    """Reads long prompts."""

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        notice = Notice(PROMPT_PROGRESS, {"tokens_read": 40, "tokens": 100})
        yield [GenerationChunk(request.request_id, 0, (), "", notices=(notice,))]
        async for item in super().generate(model, request):
            yield item


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_chat_says_how_far_the_prompt_is_read_until_the_answer_begins(
    *, is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Slow()
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    with LocalChat(local, local.models()[0]) as one:
        chat._write(partial(one.say, temperature=0, seed=1), [{"role": "user", "content": "hi"}], chat._show_plain)
    shown = capsys.readouterr()
    assert shown.out.startswith("hi")
    assert ("40 of 100" in shown.err) == is_terminal
    assert not is_terminal or shown.err.endswith(chat._LINE_AGAIN)


def test_comments_of_an_endpoint_say_how_far_the_prompt_is_read() -> None:
    read = list[PromptReading]()
    lines = [": the answer goes on", "", ": prompt: 7 of 9 tokens read", ": prompt: x of 9 tokens read", "data: [DONE]"]
    response = SimpleNamespace(iter_lines=lambda: iter(lines))
    with EndpointClient("http://127.0.0.1:1", None) as endpoint:
        assert list(endpoint._texts(response, read.append)) == []  # type: ignore[arg-type]
    assert read == [PromptReading(7, 9)]
