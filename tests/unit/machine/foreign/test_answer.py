"""Answers of foreign engines as streams of chunks: whole, cut at stop strings, moved between holders at every place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import cache

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.foreign_engine import ScriptedEngine

from paceline.core.errors import EngineGone, InvalidRequest, ModelAway, NotServed, Overloaded, PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, Grammar, GrammarKind, SamplingParams, TokenLogprob
from paceline.core.ids import RequestId
from paceline.core.model import ModelRef, WeightsFormat
from paceline.engines.contract import AnswerPiece, Ask, EngineIdentity, EngineModel, Takes
from paceline.machine.foreign.answer import ForeignAnswer, SpelledTokens, Timed, _Passed  # pyright: ignore[reportPrivateUsage]
from paceline.machine.foreign.model import ForeignModel
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import BUNDLED, open_model

TEXTS = (
    "A line of riders takes turns in the wind.",
    "Grüße aus Zürich, 你好世界, 🚴‍♀️🚴 and 🇨🇭: bytes that no single token spells.",
    'Say {"name": "get_weather", "arguments": {"city": "Bern"}} STOP and go on.',
    "\n\n  indented\ttext\r\nwith   spaces  ",
    "naïve café — “quoted” … e\u0301 ﷽",
)


@cache
def tokenizer() -> BoundedTokenizer:
    return BoundedTokenizer(open_model(BUNDLED).tokenizer)


def model(takes: Takes = Takes.IDS) -> ForeignModel:
    told = EngineModel("tiny", frozenset({takes}), context=4096)
    ref = ModelRef("ab" * 32, WeightsFormat.STORED, "tiny")
    return ForeignModel(EngineIdentity("scripted", "1"), told, "tiny", ref, 4096, 0, tokenizer())


async def nothing() -> None:
    """What is asked before the engine is."""


def run(engine: ScriptedEngine, request: GenerationRequest, takes: Takes = Takes.IDS) -> tuple[list[GenerationChunk], Exception | None]:
    """Return what came of a request until it ended, and the error that ended it."""

    async def drain() -> tuple[list[GenerationChunk], Exception | None]:
        chunks: list[GenerationChunk] = []
        async with aclosing(ForeignAnswer(engine, model(takes), request, FakeClock(), before=nothing)) as answer:
            try:
                async for item in answer:
                    chunks += item
            except Exception as error:  # noqa: BLE001 - returned
                return chunks, error
        return chunks, None

    return asyncio.run(drain())


def request_of(prompt: list[int], **fields: object) -> GenerationRequest:
    return replace(GenerationRequest(RequestId("r"), tuple(prompt), 400, SamplingParams(temperature=0, seed=7)), **fields)  # type: ignore[arg-type]


def joined(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [(), (" STOP",), ("🚴",)])
def test_an_answer_moved_at_any_place_repeats_and_drops_nothing(text: str, stop: tuple[str, ...]) -> None:
    prompt, answer = tokenizer().encode("Why?"), tokenizer().encode(text, add_special=False)
    request = request_of(prompt, stop=stop)
    whole, error = run(ScriptedEngine(answer, len(prompt)), request)
    expected = text.partition(stop[0])[0] if stop else text
    assert error is None
    assert joined(whole) == expected
    for cut in range(len(answer) + 1):
        first, broken = run(ScriptedEngine(answer, len(prompt), breaks=cut), request)
        if broken is None:  # it had ended before
            assert joined(first) == expected
            continue
        assert isinstance(broken, EngineGone)
        so_far = tuple(token for chunk in first for token in chunk.token_ids)
        rest, error = run(ScriptedEngine(answer, len(prompt)), replace(request, so_far={0: so_far}))
        assert error is None
        assert joined(first) + joined(rest) == expected
        assert "�" not in joined(first) + joined(rest)
        assert rest[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("cuts", [1, 3, 100])
def test_tokens_beyond_the_bound_are_not_sent(cuts: int) -> None:
    prompt, answer = tokenizer().encode("Why?"), tokenizer().encode(TEXTS[0], add_special=False)
    chunks, error = run(ScriptedEngine(answer, len(prompt), cuts=cuts), request_of(prompt, max_tokens=5))
    assert error is None
    assert [token for chunk in chunks for token in chunk.token_ids] == answer[:5]
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def test_an_end_that_the_engine_keeps_to_itself_is_a_token_of_the_answer() -> None:
    prompt, answer = tokenizer().encode("Why?"), tokenizer().encode(TEXTS[0], add_special=False)
    chunks, _ = run(ScriptedEngine(answer, len(prompt)), request_of(prompt))
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].token_ids[-1] in tokenizer().eos_ids


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_of_text_alone_has_tokens_that_spell_it(text: str) -> None:
    prompt, answer = tokenizer().encode("Why?"), tokenizer().encode(text, add_special=False)
    engine = ScriptedEngine(answer, len(prompt), tokenizer=tokenizer(), takes=Takes.TEXT)
    chunks, error = run(engine, request_of(prompt), Takes.TEXT)
    assert error is None
    assert joined(chunks) == text
    tokens = [token for chunk in chunks for token in chunk.token_ids if token not in tokenizer().eos_ids]
    assert b"".join(map(tokenizer().token_bytes, tokens)).decode() == text


def test_special_tokens_in_a_text_are_tokens() -> None:
    special, id_ = next(iter(tokenizer().special_tokens.items()))
    spelled = SpelledTokens(tokenizer())
    text = f"before{special}after"
    tokens = [token for at in range(len(text)) for token in spelled.tokens(text[at], is_last=at == len(text) - 1)]
    assert tokens.count(id_) == 1
    assert b"".join(map(tokenizer().token_bytes, tokens)) == b"beforeafter"


def test_each_sequence_draws_with_a_seed_of_its_own_and_each_seam_too() -> None:
    prompt, answer = tokenizer().encode("Why?"), tokenizer().encode(TEXTS[0], add_special=False)
    engine = ScriptedEngine(answer, len(prompt))
    run(engine, request_of(prompt, n=3))
    run(engine, request_of(prompt, so_far={0: tuple(answer[:4])}))
    assert [ask.sampling.seed for ask in engine.asked] == [7, 8, 9, 11]
    assert engine.asked[-1].max_tokens == 396


@pytest.mark.parametrize(
    "fields",
    [{"scores_prompt": True}, {"so_far": {0: (1, 2)}, "grammar": Grammar(GrammarKind.JSON_SCHEMA, "{}")}],
    ids=["scores of the prompt", "a form in mid-answer"],
)
def test_what_no_engine_gives_is_refused(fields: dict[str, object]) -> None:
    prompt = tokenizer().encode("Why?")
    _, error = run(ScriptedEngine([1, 2, 3], len(prompt)), request_of(prompt, **fields))
    assert isinstance(error, NotServed)


def test_what_an_answer_took_is_told_once_it_is_whole() -> None:
    prompt, answer = tokenizer().encode("Why?"), tokenizer().encode(TEXTS[0], add_special=False)
    told: list[Timed] = []

    async def drain(breaks: int | None) -> None:
        engine = ScriptedEngine(answer, len(prompt), breaks=breaks)
        ended: list[BaseException | None] = []
        stream = ForeignAnswer(engine, model(), request_of(prompt), FakeClock(), before=nothing, ended=ended.append, timed=told.append)
        try:
            async for _ in stream:
                pass
        except EngineGone:
            pass
        await stream.aclose()
        assert len(ended) == 1

    asyncio.run(drain(3))
    assert told == []
    asyncio.run(drain(None))
    assert [(one.read_tokens, one.tokens) for one in told] == [(len(prompt), len(answer) + 1)]


@pytest.mark.parametrize("cached", [0, 1, 5])
def test_tokens_that_the_engine_had_cached_are_reported_once(cached: int) -> None:
    prompt, answer = tokenizer().encode("Why does the line turn?"), tokenizer().encode(TEXTS[0], add_special=False)
    engine, told = ScriptedEngine(answer, len(prompt)), list[Timed]()
    engine.cached = cached

    async def drain() -> list[GenerationChunk]:
        stream = ForeignAnswer(engine, model(), request_of(prompt), FakeClock(), before=nothing, timed=told.append)
        return [chunk async for item in stream for chunk in item if not chunk.notices]

    assert [chunk.cached_tokens for chunk in asyncio.run(drain()) if chunk.cached_tokens] == [cached] * bool(cached)
    assert [one.read_tokens for one in told] == [len(prompt) - cached]


@pytest.mark.parametrize("error", [InvalidRequest("x", field="stop"), Overloaded("x", retry_after_s=7), EngineGone("x"), ModelAway("x")])
def test_no_error_tells_a_client_where_the_engine_listens(error: PacelineError) -> None:
    error.message = "scripted at http://127.0.0.1:1: no"
    engine = ScriptedEngine([1], 1)
    engine.trouble = error
    _, told = run(engine, request_of([1]))
    assert type(told) is type(error)
    assert "127.0.0.1" not in str(told)
    assert "scripted 1" in str(told)
    assert isinstance(told, EngineGone) or vars(told) | {"message": ""} == vars(error) | {"message": ""}


class Wrote(ScriptedEngine):
    """An engine that writes these pieces."""

    def __init__(self, *pieces: AnswerPiece) -> None:
        super().__init__([], 0)
        self._pieces = pieces

    async def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
        for piece in (*self._pieces, AnswerPiece(finish=FinishReason.STOP)):
            yield piece


BEYOND = tokenizer().size


@pytest.mark.parametrize(
    "piece",
    [
        *(AnswerPiece(token_ids=(504, token)) for token in (-1, BEYOND, 1 << 31)),
        AnswerPiece(token_ids=(504,), logprobs=(TokenLogprob(BEYOND, -1.0),)),
    ],
)
def test_a_token_outside_of_the_vocabulary_ends_the_answer(piece: AnswerPiece) -> None:
    chunks, error = run(Wrote(piece), request_of([1]))
    assert isinstance(error, EngineGone)
    assert not chunks


def test_alternatives_outside_of_the_vocabulary_are_left_out() -> None:
    scored = TokenLogprob(504, -1.0, ((BEYOND, -1.0), (504, -1.0)))
    chunks, _ = run(Wrote(AnswerPiece(token_ids=(504,), logprobs=(scored,))), request_of([1]))
    assert [each.top for chunk in chunks for each in chunk.logprobs] == [((504, -1.0),)]


def test_progress_is_never_beyond_the_prompt() -> None:
    chunks, _ = run(Wrote(AnswerPiece(tokens_read=99)), request_of([1, 2]))
    assert chunks[0].notices[0].detail == {"tokens_read": 2, "tokens": 2}


@pytest.mark.parametrize("chat", ["", "{", "[]", "5", '{"messages": 5}', '{"messages": [{"content": [{"type": "file"}]}]}'])
def test_a_chat_of_another_machine_is_refused_if_it_is_not_one(chat: str) -> None:
    engine = ScriptedEngine([1], 1)
    with pytest.raises(InvalidRequest):
        asyncio.run(_Passed(model(Takes.MESSAGES), replace(request_of([]), chat=chat), 0).ask())
    assert not engine.asked


@pytest.mark.parametrize(("seed", "sent"), [(5, 7), ((1 << 63) - 1, 1), ((1 << 64) - 1, 1)])
def test_seeds_of_a_chats_answers_fit_their_field(seed: int, sent: int) -> None:
    chat = f'{{"messages": [], "seed": {seed}, "draft_model": "/x"}}'
    ask = asyncio.run(_Passed(model(Takes.MESSAGES), replace(request_of([]), chat=chat), 2).ask())
    assert ask.prompt == {"messages": [], "seed": sent}
