"""Every adapter under the one suite: with the engine itself where it runs here, else with a server that answers as its documents say."""

from __future__ import annotations

from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conformance.suites.engine import EngineCase, EngineSuite
from tests.fakes import recorded_engines as recorded
from tests.fakes.foreign_engines import Running, llama_server, mlx_server
from tests.fakes.scripted_http import served
from tests.fakes.seeded_models import shape, write_folder

from paceline.engines.adapter import TEXT_AND_MESSAGES
from paceline.engines.contract import Door, Takes
from paceline.engines.llama_server import LlamaServer
from paceline.engines.lmstudio import LmStudio
from paceline.engines.mlx_server import MlxServer
from paceline.engines.ollama import Ollama
from paceline.engines.openai import OpenAi
from paceline.engines.vllm import Vllm
from paceline.store.catalog import open_model


@pytest.fixture(scope="module")
def llama(shallow_gguf: Path) -> Generator[Running]:
    with llama_server(shallow_gguf, n_ctx=512, n_parallel=2) as running:
        yield running


class TestLlamaServer(EngineSuite):
    @pytest.fixture
    def case(self, llama: Running, shallow_gguf: Path) -> EngineCase:
        tokenizer = open_model(str(shallow_gguf)).tokenizer
        return EngineCase(
            "llama-server",
            LlamaServer,
            Door(llama.url),
            frozenset(Takes),
            ids=tokenizer.encode("日本語の😊 one"),
            spell=tokenizer.text_of,
            model={"path": shallow_gguf, "quantisation": "Q4_1", "context": 256, "slots": 2},
            unknown_model=False,
        )


@pytest.fixture(scope="module")
def mlx(tmp_path_factory: pytest.TempPathFactory) -> Generator[Running]:
    with mlx_server(write_folder(tmp_path_factory.mktemp("mlx") / "tiny", shape("tiny"))) as running:
        yield running


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
class TestMlxServer(EngineSuite):
    @pytest.fixture
    def case(self, mlx: Running) -> EngineCase:
        return EngineCase(
            "mlx_lm.server", MlxServer, Door(mlx.url), TEXT_AND_MESSAGES, model={"loaded": True, "context": 0}, draws_bytes=True
        )


class TestVllm(EngineSuite):
    @pytest.fixture
    def case(self) -> Generator[EngineCase]:
        with served(recorded.vllm) as server:
            yield EngineCase(
                "vllm", Vllm, Door(server.url), frozenset(Takes), ids=[2] * 9, spell=recorded.spell, model={"context": recorded.CONTEXT}
            )


class TestOllama(EngineSuite):
    @pytest.fixture
    def case(self) -> Generator[EngineCase]:
        with served(recorded.ollama) as server:
            model = {"digest": recorded.DIGEST, "quantisation": "Q4_K_M", "context": recorded.CONTEXT, "loaded": True}
            yield EngineCase("ollama", Ollama, Door(server.url), TEXT_AND_MESSAGES, model=model)


class TestLmStudio(EngineSuite):
    @pytest.fixture(params=[recorded.lmstudio, recorded.lmstudio_older], ids=["v1", "v0"])
    def case(self, request: pytest.FixtureRequest) -> Generator[EngineCase]:
        with served(request.param) as server:
            model = {"quantisation": "Q4_K_M", "context": recorded.CONTEXT, "loaded": True}
            yield EngineCase("lmstudio", LmStudio, Door(server.url), TEXT_AND_MESSAGES, model=model)


class TestOpenAi(EngineSuite):
    @pytest.fixture
    def case(self, llama: Running) -> EngineCase:
        return EngineCase("openai", OpenAi, Door(llama.url), TEXT_AND_MESSAGES, unknown_model=False)
