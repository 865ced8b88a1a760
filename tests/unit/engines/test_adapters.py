"""Each adapter's own part: what it sends, and how it reads what only its engine says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.fakes import recorded_engines as recorded
from tests.fakes.scripted_http import Asked, Said, events, said, served

from paceline.core.errors import ConfigError, EngineGone, ModelAway, NotServed, UnknownModel
from paceline.core.generation import FinishReason, Grammar, GrammarKind, SamplingParams, TokenLogprob
from paceline.engines import llama_server
from paceline.engines.adapter import Adapter
from paceline.engines.contract import AnswerPiece, Ask, Busy, Capability, Door, ForeignEngine, Takes
from paceline.engines.http import Http
from paceline.engines.llama_completion import completion_body
from paceline.engines.llama_server import LlamaServer
from paceline.engines.lmstudio import LmStudio
from paceline.engines.mlx_server import MlxServer
from paceline.engines.ollama import Ollama
from paceline.engines.openai import OpenAi
from paceline.engines.patience import EnginePatience
from paceline.engines.table import open_engine
from paceline.engines.vllm import Vllm

T = TypeVar("T")
SHORT = EnginePatience(answer_s=0.5, quiet_s=0.05, load_s=2)
DRAWN = SamplingParams(0.5, 40, 0.9, 0.1, 1.1, 0.2, 0.3, 7, {5: -100.0})


def use(adapter: type[Adapter], url: str, work: Callable[[Adapter], Awaitable[T]]) -> T:
    async def go() -> T:
        engine = adapter(Door(url), SHORT)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(go())


async def pieces_of(engine: ForeignEngine, ask: Ask) -> list[AnswerPiece]:
    return [piece async for piece in engine.generate(ask)]


# ----------------------------------------------------------------------------------------------------------- llama-server


class Router:
    """llama-server as a router of two models, as its source describes it."""

    def __init__(self, fails: bool = False) -> None:
        self.states = {"one": "unloaded", "two": "sleeping"}
        self.fails = fails

    def __call__(self, asked: Asked) -> Said:
        path, _, query = asked.path.partition("?")
        match path:
            case "/health":
                return said({"status": "ok"})
            case "/props" if not query:
                return said(
                    {
                        "role": "router",
                        "max_instances": 2,
                        "models_autoload": True,
                        "build_info": "b11549-abc",
                        "default_generation_settings": {},
                    }
                )
            case "/v1/models":
                listed = [{"id": name, "status": {"value": state, "args": []}} for name, state in self.states.items()]
                self.states = {name: self._next(state) for name, state in self.states.items()}
                return said({"data": listed})
            case "/models/load":
                self.states[asked.body["model"]] = "loading"
                return said({"success": True})
            case "/models/unload":
                self.states[asked.body["model"]] = "unloaded"
                return said({"success": True})
            case "/props":
                assert "autoload=false" in query
                if "two" in query:
                    return said({"is_sleeping": True, "default_generation_settings": {}})
                return said(
                    {
                        "default_generation_settings": {"n_ctx": 128},
                        "total_slots": 3,
                        "model_path": "/m/one.gguf",
                        "model_ftype": "Q8_0",
                        "modalities": {"vision": True},
                        "chat_template_caps": {"supports_tools": True},
                    }
                )
            case "/slots":
                return said([{"is_processing": True}, {"is_processing": False}, {"is_processing": False}])
            case _:
                return said({"error": {"code": 501, "message": "no", "type": "not_supported_error"}}, 501)

    def _next(self, state: str) -> str:
        return ("unloaded" if self.fails else "loaded") if state == "loading" else state


def test_a_router_loads_and_unloads_models_and_tells_which_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "LOAD_LOOK_S", 0.01)

    async def work(engine: Adapter) -> None:
        assert str(await engine.identify()) == "llama-server b11549-abc"
        assert {model.name: model.loaded for model in await engine.models()} == {"one": False, "two": True}
        assert await engine.busy() == Busy(0, 0)
        await engine.load("one")
        await engine.load("one")
        await engine.load("two")
        one = (await engine.models())[0]
        assert (one.loaded, one.context, one.slots, one.path, one.quantisation) == (True, 128, 3, Path("/m/one.gguf"), "Q8_0")
        assert one.capabilities == {Capability.SCHEMAS, Capability.IMAGES, Capability.TOOLS}
        assert await engine.busy() == Busy(1, 0)
        await engine.unload("one")
        with pytest.raises(UnknownModel):
            await engine.load("three")

    with served(Router(), "llama.cpp") as server:
        use(LlamaServer, server.url, work)
        assert server.paths().count("POST /models/load") == 1

    with served(Router(fails=True), "llama.cpp") as server, pytest.raises(EngineGone, match="failed to load"):
        use(LlamaServer, server.url, lambda engine: engine.load("one"))


def test_a_server_that_loads_its_only_model_is_recognised_and_not_ready() -> None:
    def loading(_: Asked) -> Said:
        return said({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503)

    async def work(engine: Adapter) -> None:
        identity = await engine.identify()
        assert identity is not None
        assert str(identity) == "llama-server"
        assert not await engine.is_ready()
        assert await engine.models() == ()
        with pytest.raises(ModelAway):
            await pieces_of(engine, Ask("m", (1,), 2))

    with served(loading, "llama.cpp") as server:
        use(LlamaServer, server.url, work)


def llama_events(*parts: tuple[str, int, int], stop_type: str = "limit") -> list[dict[str, Any]]:
    """Events of `/completion`: text, token and the number of tokens so far."""
    found: list[dict[str, Any]] = [
        {"content": "", "tokens": [0], "tokens_predicted": 0, "stop": False, "prompt_progress": {"total": 9, "cache": 4, "processed": 9}}
    ]
    found += [{"content": text, "tokens": [token], "tokens_predicted": count, "stop": False} for text, token, count in parts]
    end = {"content": "", "tokens": [], "stop": True, "stop_type": stop_type, "tokens_evaluated": 9, "timings": {"cache_n": 4}}
    return [*found, end]


WORDS = {(1,): "a", (2, 3): "é", (3,): "�", (9,): "", (4, 4): "bb", (7, 2, 3): " é"}


def llama(found: list[dict[str, Any]], spaced: bool = False) -> Callable[[Asked], Said]:
    """A server that writes these events. Its tokens are `WORDS`; a spaced tokenizer puts a space before each text."""
    ids = {text: list(tokens) for tokens, text in WORDS.items() if text}

    def script(asked: Asked) -> Said:
        match asked.path:
            case "/tokenize":
                text = asked.body["content"]
                lines = [10] * text.count("\n")
                return said({"tokens": [*([7] if spaced and not lines else []), *lines, *ids.get(text.strip("\n"), [])]})
            case "/detokenize":
                return said({"content": WORDS.get(tuple(asked.body["tokens"]), "�")})
            case "/completion":
                return Said(events(*found, done=False), kind="text/event-stream")
            case _:
                return said({"data": []})

    return script


@pytest.mark.parametrize(
    ("parts", "end", "gained"),
    [
        ([("a", 1, 1), ("é", 3, 3)], "limit", [("a", (1,)), ("é", (2, 3))]),
        ([("a", 1, 1), ("", 9, 2)], "eos", [("a", (1,))]),
        ([("", 9, 1), ("a", 1, 2)], "limit", [("a", (9, 1))]),
        ([("a", 1, 1), ("", 9, 2)], "limit", [("a", (1,)), ("", (9,))]),
        ([("a", 1, 3), ("a", 1, 3), ("a", 1, 3)], "limit", [("a", (1,))] * 3),
        ([("é", 3, 3), ("a", 1, 3)], "limit", [("é", (2, 3)), ("a", (1,))]),
    ],
    ids=[
        "a character of two tokens",
        "the end token",
        "a special token",
        "a special token at the end",
        "a draft",
        "a draft with two tokens a character",
    ],
)
@pytest.mark.parametrize("spaced", [False, True])
def test_pieces_of_llama_server_name_all_tokens_of_their_text(
    parts: list[tuple[str, int, int]], end: str, gained: list[tuple[str, tuple[int, ...]]], spaced: bool
) -> None:
    with served(llama(llama_events(*parts, stop_type=end), spaced)) as server:
        found = use(LlamaServer, server.url, lambda engine: pieces_of(engine, Ask("m", (1,), 8)))
    assert [(piece.text, piece.token_ids) for piece in found if piece.token_ids] == gained
    assert (found[0].tokens_read, found[0].prompt_tokens, found[0].cached_tokens) == (9, 9, 4)
    assert found[-1] == AnswerPiece(prompt_tokens=9, cached_tokens=4, finish=FinishReason.STOP if end == "eos" else FinishReason.LENGTH)


def test_a_stop_token_of_the_request_ends_the_answer_of_llama_server() -> None:
    with served(llama(llama_events(("a", 1, 1), ("b", 5, 2), ("a", 1, 3)))) as server:
        found = use(LlamaServer, server.url, lambda engine: pieces_of(engine, Ask("m", (1,), 8, stop_ids=frozenset({5}))))
    assert [piece.text for piece in found if piece.text] == ["a"]
    assert found[-1].finish is FinishReason.STOP


def test_sampling_reaches_llama_server_in_paceline_s_order() -> None:
    body = completion_body(Ask("m", (1,), None, DRAWN, ignore_eos=True), 128)
    assert body["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert {name: body[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")} == {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
    }  # fmt: skip
    assert (body["seed"], body["logit_bias"], body["n_predict"], body["ignore_eos"], body["repeat_last_n"]) == (
        7,
        [[5, -100.0]],
        -1,
        True,
        128,
    )
    assert completion_body(Ask("m", (1,), 4, SamplingParams(seed=(1 << 32) - 1)), 128)["seed"] != 0xFFFFFFFF
    assert completion_body(Ask("m", (1,), 4, cache_salt="s"), 128)["cache_prompt"] is False
    assert completion_body(Ask("m", (1,), 4, SamplingParams(logprobs=0)), 128)["n_probs"] == 1


# ---------------------------------------------------------------------------------------------------------------- others


def test_vllm_gets_ids_and_gives_log_probabilities_by_id() -> None:
    ask = Ask(recorded.VLLM_MODEL, (2, 2, 2), 3, replace(DRAWN, logprobs=1), stop_ids=frozenset({9}), cache_salt="salt")
    with served(recorded.vllm) as server:
        found = use(Vllm, server.url, lambda engine: pieces_of(engine, ask))
        body = next(each.body for each in server.asked if each.body)
    assert next(piece.logprobs for piece in found if piece.text) == (TokenLogprob(97, -0.5, ((97, -0.5),)),)
    assert body["prompt"] == [2, 2, 2]
    assert (body["seed"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (7, 40, 0.1, 1.1)
    assert (body["stop_token_ids"], body["cache_salt"], body["logit_bias"]) == ([9], "salt", {"5": -100.0})


@pytest.mark.parametrize(
    ("pages", "takes", "can"),
    [
        ({"/v1/completions"}, frozenset(Takes), {Capability.SCHEMAS}),
        ({"/v1/embeddings", "/v1/rerank"}, frozenset[Takes](), {Capability.EMBEDDINGS, Capability.RERANK}),
        ({"/v1/rerank"}, frozenset[Takes](), {Capability.RERANK}),
        ({"/v1/embeddings", "/v1/completions"}, frozenset(Takes), {Capability.SCHEMAS}),  # an older one has all pages
    ],
)
def test_vllm_with_a_pooling_model_is_known_by_its_pages(pages: set[str], takes: frozenset[Takes], can: set[Capability]) -> None:
    def script(asked: Asked) -> Said:
        if asked.path in pages or asked.path == "/v1/completions":
            return said({"detail": "no"}, 405 if asked.path in pages else 404)
        return recorded.vllm(asked)

    with served(script) as server:
        (model,) = use(Vllm, server.url, lambda engine: engine.models())
        assert (model.takes, model.capabilities) == (takes, can)
        assert not any(asked.body for asked in server.asked)


@pytest.mark.parametrize(
    ("tasks", "writes", "can"),
    [
        (None, True, set[Capability]()),
        (["chat", "embeddings"], True, {Capability.EMBEDDINGS}),
        (["embeddings"], False, {Capability.EMBEDDINGS}),
        (["rerank"], False, {Capability.RERANK}),
    ],
)
def test_another_paceline_says_what_its_models_do(tasks: list[str] | None, writes: bool, can: set[Capability]) -> None:
    listed = {"id": "m", "owned_by": "paceline", "max_model_len": 64} | ({} if tasks is None else {"tasks": tasks})
    with served(lambda asked: said({"data": [listed]}) if asked.path == "/v1/models" else said({}, 400)) as server:
        (model,) = use(OpenAi, server.url, lambda engine: engine.models())
        assert (bool(model.takes), model.capabilities) == (writes, can)


@pytest.mark.parametrize("tasks", [["text-generation"], [], 5, {"embeddings": 1}, "rerank"])
def test_tasks_of_other_servers_mean_nothing(tasks: object) -> None:
    with served(
        lambda asked: said({"data": [{"id": "m", "owned_by": "me", "tasks": tasks}]}) if asked.path == "/v1/models" else said({}, 400)
    ) as server:
        (model,) = use(OpenAi, server.url, lambda engine: engine.models())
        assert (bool(model.takes), model.capabilities) == (True, frozenset())


def test_vllm_tells_its_load() -> None:
    with served(recorded.vllm) as server:
        assert use(Vllm, server.url, lambda engine: engine.busy()) == Busy(0, 0, 0.25)


def test_ollama_lists_no_model_of_its_cloud_and_loads_by_an_empty_request() -> None:
    async def work(engine: Adapter) -> None:
        models = {model.name: model for model in await engine.models()}
        assert set(models) == {recorded.OLLAMA_MODEL, "all-minilm:latest"}
        assert models[recorded.OLLAMA_MODEL].capabilities == {Capability.TOOLS, Capability.SCHEMAS}
        assert (models["all-minilm:latest"].takes, models["all-minilm:latest"].capabilities) == (frozenset(), {Capability.EMBEDDINGS})
        assert not models["all-minilm:latest"].loaded
        assert (await engine.embed("all-minilm:latest", ("a", "b"))).vectors == [[0.1, 0.2], [0.1, 0.2]]
        await engine.load(recorded.OLLAMA_MODEL)
        await engine.unload(recorded.OLLAMA_MODEL)
        with pytest.raises(UnknownModel):
            await engine.load("none")
        with pytest.raises(NotServed):
            await pieces_of(engine, Ask(recorded.OLLAMA_MODEL, "hi", 4, DRAWN))

    with served(recorded.ollama) as server:
        use(Ollama, server.url, work)
        loads = [each.body for each in server.asked if each.path == "/api/generate"]
    assert loads[0] == {"model": recorded.OLLAMA_MODEL, "stream": False}
    assert loads[1]["keep_alive"] == 0
    assert not any(
        "num_ctx" in str(each.body) or "keep_alive" in each.body
        for each in server.asked
        if each.path == "/api/generate" and "prompt" in each.body
    )


def test_lm_studio_lists_the_context_of_the_loaded_instance_and_unloads_each() -> None:
    async def work(engine: Adapter) -> None:
        text, vectors = await engine.models()
        assert (text.slots, text.size_bytes, text.capabilities) == (4, 17990911801, {Capability.IMAGES, Capability.TOOLS})
        assert (vectors.takes, vectors.loaded, vectors.capabilities) == (frozenset(), False, {Capability.EMBEDDINGS})
        await engine.load(vectors.name)
        await engine.unload(text.name)

    with served(recorded.lmstudio) as server:
        use(LmStudio, server.url, work)
        assert [each.body for each in server.asked if each.method == "POST"] == [
            {"model": "text-embedding-nomic-embed-text-v1.5"},
            {"instance_id": f"{recorded.LMSTUDIO_MODEL}:2"},
        ]


def test_mlx_server_gets_only_names_that_it_lists_and_its_own_model_by_its_own_name() -> None:
    def script(asked: Asked) -> Said:
        if asked.path == "/v1/models":
            return said({"data": [{"id": "/models/tiny"}, {"id": "hub/other"}]})
        return Said(events({"model": asked.body["model"], "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}))

    async def work(engine: Adapter) -> None:
        assert [(model.name, model.loaded) for model in await engine.models()] == [("/models/tiny", True), ("hub/other", False)]
        for name in ("/models/tiny", "hub/other"):
            assert (await pieces_of(engine, Ask(name, "hi")))[0].text == "a"
        with pytest.raises(UnknownModel):
            await pieces_of(engine, Ask("hub/third", "hi", 4))

    with served(script) as server:
        use(MlxServer, server.url, work)
        assert [each.body["model"] for each in server.asked if each.method == "POST"] == ["default_model", "hub/other"]


def test_a_server_without_text_completions_takes_messages_alone() -> None:
    def script(asked: Asked) -> Said:
        return said({"data": [{"id": "m", "max_model_len": 32}]}) if asked.path == "/v1/models" else said({"detail": "Not Found"}, 404)

    with served(script) as server:
        (model,) = use(OpenAi, server.url, lambda engine: engine.models())
    assert (model.takes, model.context) == ({Takes.MESSAGES}, 32)


@pytest.mark.parametrize("adapter", [MlxServer, OpenAi, LmStudio])
@pytest.mark.parametrize(
    "part",
    [
        {"ignore_eos": True},
        {"stop_ids": frozenset({5})},
        {"grammar": Grammar(GrammarKind.REGEX, "a")},
        {"sampling": SamplingParams(logprobs=1)},
    ],
)
def test_a_part_that_an_engine_can_t_do_is_refused_before_it_is_asked(adapter: type[Adapter], part: dict[str, Any]) -> None:
    with served(lambda _: said({"data": [{"id": "m"}]})) as server:
        with pytest.raises(NotServed):
            use(adapter, server.url, lambda engine: pieces_of(engine, Ask("m", "hi", 4, **part)))
        assert not [each for each in server.asked if each.method == "POST"]


def test_a_body_passes_unchanged_but_for_its_model_stream_and_length() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi", "odd": 1}],
        "tools": [],
        "model": "x",
        "max_completion_tokens": 99,
        "n_odd": {"a": None},
    }
    sent = OpenAi(Door("http://127.0.0.1:1")).chat_body(Ask("m", body, 7))
    assert sent == body | {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 7}


def test_a_unix_socket_is_a_door(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nServer: llama.cpp\r\n\r\n" + b'{"a": 1}')
        writer.close()

    async def go() -> None:
        async with await asyncio.start_unix_server(answer, tmp_path / "door"):
            door = Door("http://localhost", socket=tmp_path / "door")
            engine = await open_engine(door, SHORT)
            assert isinstance(engine, LlamaServer)
            await engine.close()

    asyncio.run(go())


def test_an_engine_that_is_known_by_name_is_not_asked_and_a_key_that_no_header_takes_is_refused() -> None:
    async def go() -> None:
        engine = await open_engine(Door("http://127.0.0.1:1"), name="ollama")
        assert isinstance(engine, Ollama)
        await engine.close()

    asyncio.run(go())
    with pytest.raises(ConfigError):
        Http(Door("http://127.0.0.1:1", "a\nb"), "e", SHORT)
