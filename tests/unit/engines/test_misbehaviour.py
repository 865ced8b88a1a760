"""Engines that misbehave end in Paceline's own errors, within the bounds, and their keys stay secret."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import aclosing
from itertools import chain, repeat
from typing import Any

import pytest
from tests.fakes import recorded_engines as recorded
from tests.fakes.scripted_http import Asked, Drop, Hang, Part, Said, Script, events, said, served

from paceline.core.errors import ContextOverflow, EngineGone, InvalidRequest, ModelAway, NotServed, Overloaded, PacelineError, UnknownModel
from paceline.core.generation import FinishReason
from paceline.engines import http
from paceline.engines import stream as stream_module
from paceline.engines.adapter import Adapter
from paceline.engines.contract import AnswerPiece, Ask, Door
from paceline.engines.llama_server import LlamaServer
from paceline.engines.lmstudio import LmStudio
from paceline.engines.mlx_server import MlxServer
from paceline.engines.ollama import Ollama
from paceline.engines.openai import OpenAi
from paceline.engines.patience import EnginePatience
from paceline.engines.refusals import refusal_of, without_address
from paceline.engines.table import adapters, open_engine
from paceline.engines.vllm import Vllm

SHORT = EnginePatience(
    connect_s=0.5, answer_s=0.3, quiet_s=0.05, half_event_s=0.1, first_token_s=0.4, next_token_s=0.3, load_s=0.3, figures_s=0.1
)
KEY = "sk-live-0123456789abcdef"
MODEL = "m"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WRITES = ("/completion", "/v1/completions", "/v1/chat/completions", "/api/generate")


def calm(asked: Asked) -> Said:
    """An engine that answers all questions but those for an answer. It is each of the engines in turn."""
    match asked.path:
        case "/v1/models":
            return said({"object": "list", "data": [{"id": MODEL, "meta": {"size": 5}}]})
        case "/api/tags":
            return said({"models": [{"name": MODEL, "digest": "d"}]})
        case "/api/v1/models":
            return said({"models": [{"key": MODEL, "type": "llm", "loaded_instances": []}]})
        case _:
            return said({"status": "ok", "version": "1"})


def but(answer: Callable[[Asked], Said] | Said, script: Script = calm) -> Script:
    """Answer requests for an answer like this, and others like the script."""
    return lambda asked: script(asked) if asked.path not in WRITES else answer(asked) if callable(answer) else answer


def stream(*parts: Part | Iterable[bytes]) -> Said:
    flat = [one for part in parts for one in ((part,) if isinstance(part, bytes | Hang | Drop) else part)]
    return Said(flat, kind="text/event-stream")


def word(asked: Asked, **more: Any) -> dict[str, Any]:
    """One event of an answer, in the shape of the engine that was asked."""
    if asked.path == "/completion":
        return {"index": 0, "content": " one", "tokens": [5], "stop": False, "tokens_predicted": 1, "tokens_evaluated": 2} | more
    if asked.path == "/api/generate":
        return {"model": MODEL, "response": " one", "done": False} | more
    model = asked.body["model"]
    part = {"delta": {"content": " one"}} if asked.path == "/v1/chat/completions" else {"text": " one"}
    return {"model": model, "choices": [{"index": 0, "finish_reason": None, **part}]} | more


def wire(asked: Asked, found: dict[str, Any]) -> bytes:
    if asked.path == "/api/generate":
        return json.dumps(found).encode() + b"\n"
    return b"data: " + json.dumps(found).encode() + b"\n\n"


Ended = tuple[list[AnswerPiece], PacelineError | None]


def run(adapter: type[Adapter], url: str, prompt: Any, key: str = "") -> Ended:
    return asyncio.run(write(adapter(Door(url, key), SHORT), prompt))


async def write(engine: Adapter, prompt: Any) -> Ended:
    """Return the pieces of an answer, and the error that ended it. The engine is closed."""
    pieces = list[AnswerPiece]()
    try:
        async with asyncio.timeout(5), aclosing(engine.generate(Ask(MODEL, prompt, 8))) as answer:
            async for piece in answer:
                pieces.append(piece)
    except PacelineError as error:
        return pieces, error
    finally:
        await engine.close()
    return pieces, None


BROKEN: dict[str, Callable[[Asked], Said]] = {
    "hangs": lambda _: Said((Hang(),)),
    "says 200 and ends": lambda _: stream(),
    "says 200 and nothing": lambda _: stream(Hang()),
    "breaks off": lambda asked: stream(wire(asked, word(asked)), Drop()),
    "promises more than it sends": lambda asked: Said((wire(asked, word(asked)), Drop()), kind="text/event-stream", length=10_000),
    "stops in an event": lambda asked: stream(wire(asked, word(asked))[:20], Hang()),
    "stops between events": lambda asked: stream(wire(asked, word(asked)), Hang()),
    "only pings": lambda _: stream(*[b": ping\n\n"] * 3, Hang()),
    "ends without a finish": lambda asked: stream(wire(asked, word(asked)), events()),
    "says no JSON": lambda _: stream(b"data: {]\n\n"),
    "says a number": lambda _: stream(b"data: 5\n\n5\n"),
    "says words in another shape": lambda asked: stream(wire(asked, {"choices": [5], "tokens": 5, "response": 5, "done": True})),
    "finishes for an unknown reason": lambda asked: stream(
        wire(asked, {"choices": [{"index": 0, "text": "", "finish_reason": "x"}], "stop": True, "stop_type": "x", "done": True, "done_reason": "x"})
    ),
    "fails midway": lambda asked: stream(wire(asked, word(asked)), wire(asked, {"error": {"message": "CUDA error", "code": 500}})),
    "sends empty events": lambda asked: stream(wire(asked, word(asked)), *[wire(asked, {}), Hang(0.02)] * 60),
    "repeats its role": lambda asked: stream(*[wire(asked, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}), Hang(0.02)] * 60),
    "repeats its progress": lambda asked: stream(
        *[b": keepalive 3/9\n\n" if asked.path != "/api/generate" else b"{}\n", wire(asked, {"prompt_progress": {"total": 9, "cache": 0, "processed": 3}}), Hang(0.02)] * 60
    ),
    "returns 500": lambda _: said({"error": {"message": "oops"}}, 500),
    "returns HTML": lambda _: Said((b"<html>hello</html>",), kind="text/html", length=18),
    "returns 502 of a proxy": lambda _: Said((b"<html>Bad Gateway</html>",), 502, "text/html", 24),
    "sends elsewhere": lambda _: Said((), 302, length=0, headers={"Location": "http://127.0.0.1:1/"}),
    "wants another key": lambda _: said({"error": {"message": "Invalid key"}}, 401),
    "returns a whole JSON": lambda asked: said(word(asked)),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_ends_in_engine_gone_for_every_adapter_and_form(broken: Callable[[Asked], Said]) -> None:
    async def all_at_once(url: str) -> list[Ended]:
        return await asyncio.gather(*(write(adapter(Door(url), SHORT), prompt) for adapter in adapters() for prompt in ("hi", CHAT)))

    with served(but(broken)) as server:
        for pieces, error in asyncio.run(all_at_once(server.url)):
            assert isinstance(error, EngineGone), (pieces, error)
            assert not any(piece.finish for piece in pieces)


@pytest.mark.parametrize("adapter", adapters())
def test_an_engine_that_hangs_with_an_open_port_is_gone(adapter: type[Adapter]) -> None:
    async def look(url: str) -> None:
        engine = adapter(Door(url), SHORT)
        async with asyncio.timeout(30):
            found = await asyncio.gather(engine.identify(), engine.models(), engine.is_ready(), return_exceptions=True)
        assert [type(each) for each in found] == [EngineGone] * 3
        await engine.close()

    with served(lambda _: Said((Hang(),))) as server:
        asyncio.run(look(server.url))


@pytest.fixture
def mumbling() -> Generator[str]:
    """A listener that speaks no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def mumble() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"\x00SSH-2.0-nothing\r\n\r\n")

        threading.Thread(target=mumble, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_what_is_no_http_is_gone(mumbling: str) -> None:
    async def look() -> None:
        with pytest.raises(EngineGone):
            await open_engine(Door(mumbling), SHORT)

    asyncio.run(look())
    for adapter in adapters():
        assert isinstance(run(adapter, mumbling, "hi")[1], EngineGone)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (said({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503), ModelAway),
        (said({"error": "server busy, please try again.  maximum pending requests exceeded"}, 503), Overloaded),
        (said({"detail": "slow down"}, 429, Retry_After="7"), Overloaded),
        (said({"error": {"message": "x", "type": "exceed_context_size_error", "n_ctx": 5}}, 400), ContextOverflow),
        (said({"error": {"message": "x", "code": "context_length_exceeded"}}, 400), ContextOverflow),
        (said({"error": {"message": "The model `m` does not exist.", "type": "NotFoundError"}}, 404), UnknownModel),
        (said({"error": "model 'm' not found"}, 404), UnknownModel),
        (said({"error": {"message": "temperature must be at most 2"}}, 400), InvalidRequest),
        (said({"detail": [{"loc": ["body"], "msg": "bad"}]}, 422), InvalidRequest),
        (said({"error": "this model does not support images"}, 400), NotServed),
    ],
)
def test_a_refusal_keeps_its_meaning(refusal: Said, error: type[PacelineError]) -> None:
    with served(but(refusal)) as server:
        for adapter in (LlamaServer, Vllm, OpenAi, Ollama):
            raised = run(adapter, server.url, "hi")[1]
            assert type(raised) is error
            if isinstance(raised, Overloaded):
                assert raised.retry_after_s in {2, 7}


@pytest.mark.parametrize("message", [f"bad key {KEY}", f"Bearer {KEY[4:14]}...", KEY[-8:], json.dumps({"authorization": KEY})])
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_an_engine_that_repeats_the_key_is_not_quoted(status: int, message: str) -> None:
    parts = [KEY[at : at + 6] for at in range(len(KEY) - 5)]
    with served(but(said({"error": {"message": message}}, status))) as server:
        error = run(OpenAi, server.url, "hi", KEY)[1]
        assert error is not None
        assert server.asked[-1].headers["Authorization"] == f"Bearer {KEY}"
    told = str(error) + repr(error) + repr(error.__cause__)
    assert not any(part in told for part in parts)
    assert repr(Door(server.url, KEY)).find(KEY) < 0


def test_a_key_does_not_follow_a_redirect() -> None:
    with served(calm) as other, served(but(Said((), 307, length=0, headers={"Location": f"{other.url}/v1/completions"}))) as server:
        assert isinstance(run(OpenAi, server.url, "hi", KEY)[1], EngineGone)
        assert not other.asked


def test_messages_show_no_password_of_the_address() -> None:
    error = run(OpenAi, "http://ann:secret@127.0.0.1:1", "hi")[1]
    assert "secret" not in str(error)


def test_words_of_an_engine_are_cut_and_printable() -> None:
    error = refusal_of("e", "", 400, {"error": "a\x1b[31m\n" + "b" * 5000})
    assert len(str(error)) < 500
    assert str(error).isprintable()


@pytest.mark.parametrize("adapter", [LlamaServer, Vllm, LmStudio, Ollama, OpenAi, MlxServer])
def test_an_answer_that_names_another_model_is_gone(adapter: type[Adapter]) -> None:
    def other(asked: Asked) -> Said:
        return stream(*(wire(asked, word(asked, model="other")) for _ in range(2)), Hang())

    def two(asked: Asked) -> Said:
        return said({"data": [{"id": MODEL}, {"id": "other"}]}) if asked.path == "/v1/models" else calm(asked)

    async def look(url: str) -> None:
        engine = adapter(Door(url), EnginePatience(answer_s=1.0 if adapter is OpenAi else 30.0))
        if adapter is OpenAi:
            await engine.models()
        pieces, error = await write(engine, CHAT)
        assert isinstance(error, EngineGone)
        assert not pieces

    with served(but(other, two)) as server:
        asyncio.run(look(server.url))


@pytest.mark.parametrize("adapter", [LlamaServer, Vllm, LmStudio, Ollama])
def test_an_engine_that_changed_its_model_under_a_name_is_found_before_its_first_word(adapter: type[Adapter]) -> None:
    now = {"size": 5}

    def changing(asked: Asked) -> Said:
        listed: dict[str, dict[str, Any]] = {
            "/v1/models": {"data": [{"id": MODEL, "meta": dict(now), "max_model_len": now["size"]}]},
            "/api/tags": {"models": [{"name": MODEL, "digest": str(now)}]},
            "/api/v1/models": {"models": [{"key": MODEL, "type": "llm", "loaded_instances": [], "size_bytes": now["size"]}]},
            "/api/ps": {"models": []},
            "/props": {"default_generation_settings": {"n_ctx": 64}},
        }
        return said(listed.get(asked.path, {"status": "ok"}))

    def answer(asked: Asked) -> Said:
        return stream(wire(asked, word(asked)), Drop())

    async def look(url: str) -> None:
        engine = adapter(Door(url), EnginePatience())
        assert [model.name for model in await engine.models()] == [MODEL]
        now["size"] = 6
        pieces, error = await write(engine, "hi")
        assert "another model" in str(error)
        assert not pieces

    with served(but(answer, changing)) as server:
        asyncio.run(look(server.url))


def test_llama_server_that_has_no_such_request_at_work_is_gone_before_patience_ends() -> None:
    def script(asked: Asked) -> Said:
        return said([{"id": 0, "is_processing": False}]) if asked.path == "/slots" else calm(asked)

    with served(but(stream(Hang()), script)) as server:
        error = run(LlamaServer, server.url, (1, 2))[1]
    assert "work on the request" in str(error)


def test_silence_is_no_fault_while_llama_server_is_at_work_nor_while_its_page_of_slots_waits() -> None:
    for slots in (said([{"id": 0, "is_processing": True}]), Said((Hang(),)), said({"error": {"code": 501}}, 501)):
        with served(but(stream(Hang()), lambda asked, slots=slots: slots if asked.path == "/slots" else calm(asked))) as server:
            error = run(LlamaServer, server.url, (1, 2))[1]
        assert isinstance(error, EngineGone)
        assert "wrote nothing" in str(error)


def test_a_slow_reader_is_no_silence_of_the_engine() -> None:
    def answer(asked: Asked) -> Said:
        end = word(asked, choices=[{"index": 0, "delta": {"content": " two"}, "finish_reason": "stop"}])
        return stream(wire(asked, word(asked)), Hang(0.2), wire(asked, end)[:9], wire(asked, end)[9:])

    async def read(url: str) -> str:
        engine, text = OpenAi(Door(url), EnginePatience(quiet_s=0.02, next_token_s=0.1)), ""
        async for piece in engine.generate(Ask(MODEL, CHAT, 8)):
            text += piece.text
            if piece.text == " one":
                await asyncio.sleep(0.18)
        await engine.close()
        return text

    with served(but(answer)) as server:
        assert asyncio.run(read(server.url)) == " one two"


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n", Hang(), b": ping\n\n"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_answer_that_is_complete_needs_no_more(end: Part, line_end: bytes) -> None:
    def answer(asked: Asked) -> Said:
        whole = wire(asked, word(asked)) + wire(asked, word(asked, choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]))
        whole = whole.replace(b"\n", line_end)
        return stream(*(whole[at : at + 7] for at in range(0, len(whole), 7)), end)

    with served(but(answer)) as server:
        pieces, error = run(OpenAi, server.url, CHAT)
    assert error is None
    assert "".join(piece.text for piece in pieces) == " one"
    assert pieces[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("form", ["hi", CHAT])
@pytest.mark.parametrize("is_endless", [False, True])
def test_after_the_end_of_an_answer_only_figures_count(form: Any, is_endless: bool) -> None:
    def answer(asked: Asked) -> Said:
        def event(text: str, finish: str | None = None, **more: Any) -> bytes:
            part = {"delta": {"content": text}} if asked.path == "/v1/chat/completions" else {"text": text}
            return wire(asked, word(asked, choices=[{"index": 0, "finish_reason": finish, **part}], **more))

        usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        after = [event("AFTER"), event("MORE", "length"), event("", usage=usage)]
        return Said(
            [event("a"), event("b", "stop"), *after, *after * (1000 if is_endless else 0)] + [Hang(9)] * is_endless,
            kind="text/event-stream",
        )

    with served(but(answer)) as server:
        for adapter in (OpenAi, MlxServer, Vllm, LmStudio):
            pieces, error = run(adapter, server.url, form)
            assert error is None
            assert "".join(piece.text for piece in pieces) == "ab"
            last = pieces[-1]
            assert (last.finish, last.prompt_tokens, last.cached_tokens) == (FinishReason.STOP, 5, 4)
            assert sum(piece.n_tokens for piece in pieces) == 2


def test_an_answer_that_never_stops_after_its_end_is_over() -> None:
    def answer(asked: Asked) -> Said:
        end = wire(asked, word(asked, choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]))
        return Said(chain([end], repeat(wire(asked, word(asked)))), kind="text/event-stream")

    with served(but(answer)) as server:
        pieces, error = run(OpenAi, server.url, CHAT)
    assert error is None
    assert [piece.text for piece in pieces] == ["a", ""]


@pytest.mark.parametrize("event", [b"data: {}\n\n", b": ping\n\n", b"\n\n", b'data: {"choices":[]}\n\n'])
def test_a_flood_of_events_leaves_other_requests_their_turns_and_ends(event: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_IDLE_EVENTS", 6400)
    turns = 0

    async def look(url: str) -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        _, error = await write(OpenAi(Door(url), EnginePatience()), CHAT)
        counting.cancel()
        assert isinstance(error, EngineGone)

    with served(but(lambda _: Said(repeat(event * 5000), kind="text/event-stream"))) as server:
        asyncio.run(look(server.url))
    assert turns >= 100


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_the_same_however_they_are_cut(size: int, line_end: bytes) -> None:
    def answer(asked: Asked) -> Said:
        choice = {"index": 0, "delta": {"content": "\r\n\n ü"}, "finish_reason": "stop"}
        whole = (b": x\n\n" + wire(asked, word(asked)) + wire(asked, word(asked, choices=[choice]))).replace(b"\n", line_end)
        return stream(*(whole[at : at + size] for at in range(0, len(whole), size)))

    with served(but(answer)) as server:
        pieces, error = run(OpenAi, server.url, CHAT)
    assert error is None
    assert "".join(piece.text for piece in pieces) == " one\r\n\n ü"


ODD: tuple[Any, ...] = (-1, 1 << 31, 1 << 63, 1.5, True, "5", "x", [1], {"a": 1}, None)
"""Values that are not an id or a count."""


def test_odd_ids_and_figures_of_llama_server_go_no_further() -> None:
    token = {"content": "x", "tokens": [5], "stop": False, "tokens_predicted": 1}
    end = {"stop": True, "stop_type": "limit", "tokens": [], "content": "", "tokens_evaluated": 3, "timings": {"cache_n": 2}}
    scored = {"id": 5, "logprob": -1.0, "top_logprobs": [{"id": 5, "logprob": -1.0}]}
    broken: list[dict[str, Any]] = [
        *({**token, "tokens": [odd]} for odd in ODD),
        *({**token, "tokens": odd} for odd in (5, "a", None, [], [1, 2])),
        *({**token, "tokens_predicted": odd} for odd in ODD),
        *({**token, "content": odd} for odd in (5, ["a"], {"a": 1}, None, True)),
        *({**token, "completion_probabilities": [{**scored, "id": odd}]} for odd in ODD),
        *({**token, "completion_probabilities": [{**scored, "logprob": odd}]} for odd in ("y", None, True, [1], {}, 1e308, 5, -1e308)),
        *({**token, "completion_probabilities": [{**scored, "top_logprobs": [{"id": odd, "logprob": -1}]}]} for odd in ODD),
        *({**token, "completion_probabilities": [{**scored, "top_logprobs": odd}]} for odd in (5, None, "x", [5], [{"id": 1, "logprob": "z"}])),
        *({**token, "completion_probabilities": odd} for odd in (5, "x", [5], None)),
    ]  # fmt: skip
    now: list[dict[str, Any]] = []
    with served(but(lambda _: stream(events(*now, done=False)))) as server:

        async def answers() -> None:
            for event in broken:
                now[:] = [event, end]
                pieces, error = await write(LlamaServer(Door(server.url), SHORT), (1, 2))
                assert isinstance(error, EngineGone), (event, pieces)
            for odd in ODD:
                for figures in (
                    [{"prompt_progress": {"total": odd, "cache": odd, "processed": odd}}, token, end | {"timings": odd}],
                    [token, {**end, "tokens_evaluated": odd, "timings": {"cache_n": odd}}],
                ):
                    now[:] = figures
                    pieces, error = await write(LlamaServer(Door(server.url), SHORT), (1, 2))
                    assert error is None, odd
                    assert {piece.cached_tokens for piece in pieces} <= {0}
                    assert {piece.prompt_tokens for piece in pieces} <= {0, 3}
                    assert {piece.tokens_read for piece in pieces} <= {0, None}

        asyncio.run(answers())


def test_odd_ids_and_figures_of_openais_shapes_go_no_further() -> None:
    now: list[dict[str, Any]] = []
    logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0}]}
    broken: list[dict[str, Any]] = [
        *({"text": "x", "token_ids": [odd]} for odd in ODD),
        *({"text": "x", "token_ids": odd} for odd in (5, "abc", {"a": 1})),
        *({"text": odd, "token_ids": [5]} for odd in (5, ["a"], {"a": 1}, True)),
        *({"text": odd} for odd in (5, ["a"], {"a": 1})),
        *({"text": "x", "token_ids": [5], "logprobs": {**logprobs, "tokens": [odd]}} for odd in ("token_id:-1", "token_id:4294967296", "x", 5, None)),
        *({"text": "x", "token_ids": [5], "logprobs": {**logprobs, "token_logprobs": [odd]}} for odd in ("y", None, True, [1], 1e308)),
        *({"text": "x", "token_ids": [5], "logprobs": {**logprobs, "top_logprobs": [{"token_id:5": odd}]}} for odd in ("y", None, True, [1], 1e308)),
    ]  # fmt: skip
    with served(but(lambda _: stream(events(*now, done=False)))) as server:

        async def answers() -> None:
            for choice in broken:
                now[:] = [{"choices": [{"index": 0, **choice}]}]
                _, error = await write(Vllm(Door(server.url), SHORT), (1, 2))
                assert isinstance(error, EngineGone), choice
            for odd in ODD:
                usage = {"prompt_tokens": odd, "completion_tokens": odd, "prompt_tokens_details": {"cached_tokens": odd}}
                end = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}
                for figures in (usage, odd, {"prompt_tokens_details": odd}):
                    now[:] = [{"prompt_progress": odd}, {"prompt_progress": {"processed": odd}}, end, {"usage": figures}]
                    pieces, error = await write(Vllm(Door(server.url), SHORT), CHAT)
                    assert error is None
                    assert (pieces[-1].prompt_tokens, pieces[-1].cached_tokens, sum(piece.n_tokens for piece in pieces)) == (0, 0, 1)
                    assert {piece.tokens_read for piece in pieces} <= {0, None}

        asyncio.run(answers())


def test_answers_beyond_the_bounds_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_EVENT_BYTES", 1 << 16)

    def endless(_: Asked) -> Said:
        return Said([b"data: " + b"x" * (1 << 16)] * 40, kind="text/event-stream")

    with served(but(endless)) as server:
        assert isinstance(run(OpenAi, server.url, "hi")[1], EngineGone)

    async def ask(url: str) -> None:
        layer = http.Http(Door(url), "e", SHORT)
        with pytest.raises(EngineGone):
            await layer.ask("GET", "/", max_bytes=1 << 10)
        await layer.close()

    with served(lambda _: Said([b"x" * 4096] * 4)) as server:
        asyncio.run(ask(server.url))


def test_closing_midway_leaves_no_connection_and_no_task() -> None:
    async def look(url: str) -> None:
        engine = OpenAi(Door(url), EnginePatience())
        answer = engine.generate(Ask(MODEL, CHAT, 8))
        assert (await anext(answer)).text == " one"
        await answer.aclose()
        await engine.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with served(but(lambda asked: stream(wire(asked, word(asked)), Hang()))) as server:
        asyncio.run(look(server.url))


def plain(asked: Asked) -> Said:
    """A server with OpenAI's API."""
    return said({"object": "list", "data": []}) if asked.path == "/v1/models" else said({"detail": "Not Found"}, 404)


def test_recorded_engines_are_told_apart_by_what_only_they_have() -> None:
    wanted = {
        recorded.vllm: "vllm",
        recorded.ollama: "ollama",
        recorded.lmstudio: "lmstudio",
        recorded.lmstudio_older: "lmstudio",
        plain: "openai",
    }

    async def look(url: str) -> str:
        engine = await open_engine(Door(url), EnginePatience())
        identity = await engine.identify()
        await engine.close()
        return "" if identity is None else identity.name

    for script, name in wanted.items():
        with served(script) as server:
            assert asyncio.run(look(server.url)) == name
            assert all(each.method == "GET" for each in server.asked)


@pytest.mark.parametrize("word", ["model ", "model\n", "context ", "does not ", "loading"])
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_words_without_end_are_read_at_once(word: str, status: int) -> None:
    words = word * 200_000
    refused = refusal_of("llama-server", KEY, status, {"error": {"message": words, "type": words, "code": [words]}}, "9" * 5000)
    assert isinstance(refused, PacelineError)
    assert len(refused.message) < 1000


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 503, 508])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:38473", "no"),
        ("http://127.0.0.1:38473", "can't reach localhost:38473, HTTP://127.0.0.1:38473/v1 nor [::1]:38473; loading; too many"),
        ("https://ann:pw@gpu.home.arpa:8443", "gpu.home.arpa:8443 has no such model"),
        ("http://192.168.7.9", "192.168.7.9: not support"),
        ("http://[fd00::7:1]:8080", "http://[fd00::7:1]:8080/x and fd00::7:1"),
        ("http://gpu:9999/base", "see http://gpu/x"),
    ],
)
def test_what_clients_read_of_a_refusal_has_no_address(url: str, words: str, status: int) -> None:
    layer = http.Http(Door(url, KEY), "llama-server", SHORT)
    error = layer.refused(status, {"error": {"message": words}}, "7")
    told = without_address(error, layer.door, "llama-server b1")
    assert type(told) is type(error)
    assert str(told).startswith("llama-server")
    assert not any(
        part in str(told).lower() for part in ("38473", "127.0.0.1", "localhost", "gpu.home", "192.168", "fd00", "9999", "://gpu", "pw")
    )
    assert {name for name in vars(error) if vars(error)[name] != vars(told)[name]} <= {"message", "hint"}
    assert words != "no" or status == 503 or "llama-server b1: no" in told.message


def test_words_that_are_not_an_address_stay() -> None:
    words = "vllm at work: 3:38 of llama-server at 12:8080x, port 38473"
    assert without_address(InvalidRequest(words), Door("http://vllm:38473"), "x").message == words
