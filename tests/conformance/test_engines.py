"""Every adapter under the one suite: with the engine itself where it runs here, else with a server that answers as its documents say."""

from __future__ import annotations

import signal
from collections.abc import Generator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conformance.suites.engine import GREEDY, EngineCase, EngineSuite
from tests.fakes import recorded_engines as recorded
from tests.fakes.foreign_engines import Running, llama_server, mlx_server
from tests.fakes.scripted_http import served
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.seeded_models import shape, write_folder
from tests.fakes.served import Served

from paceline.core.errors import EngineGone
from paceline.engines.adapter import TEXT_AND_MESSAGES
from paceline.engines.contract import Ask, Capability, Door, EngineModel, ForeignEngine, Takes
from paceline.engines.llama_server import LlamaServer
from paceline.engines.lmstudio import LmStudio
from paceline.engines.mlx_server import MlxServer
from paceline.engines.ollama import Ollama
from paceline.engines.openai import OpenAi
from paceline.engines.patience import EnginePatience
from paceline.engines.vllm import Vllm
from paceline.store.catalog import open_model

KEY = "sk-0123456789"
MEAN = 1
"""llama.cpp's number of the pooling that takes the mean."""


@pytest.fixture(scope="module")
def llama(shallow_gguf: Path) -> Generator[Running]:
    with llama_server(shallow_gguf, n_ctx=512, n_parallel=2) as running:
        yield running


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp's server is not installed")
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


@pytest.fixture(scope="module")
def vectors(shallow_gguf: Path) -> Generator[Running]:
    with llama_server(shallow_gguf, n_ctx=512, embedding=True, pooling_type=MEAN, api_keys=[KEY]) as running:
        yield running


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp's server is not installed")
class TestLlamaServerForVectors(EngineSuite):
    """The server writes as well, and is stopped and killed in the end."""

    @pytest.fixture
    def case(self, vectors: Running) -> EngineCase:
        model = {"context": 512, "slots": 1, "capabilities": frozenset({Capability.EMBEDDINGS, Capability.SCHEMAS})}
        return EngineCase(
            "llama-server", LlamaServer, Door(vectors.url, KEY), frozenset(Takes), ids=[5, 6], model=model, unknown_model=False
        )

    @pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
    def test_zz_a_server_that_is_stopped_or_killed_midway_is_gone(self, case: EngineCase, vectors: Running, end: signal.Signals) -> None:
        async def lose(engine: ForeignEngine, model: EngineModel) -> None:
            async for piece in engine.generate(Ask(model.name, (5, 6), 400, GREEDY, ignore_eos=True)):
                if piece.text:
                    vectors.process.send_signal(end)

        with pytest.raises(EngineGone):
            self.run(replace(case, make=lambda door: LlamaServer(door, EnginePatience(quiet_s=0.3, answer_s=0.5))), lose)
        vectors.process.send_signal(signal.SIGCONT)


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


class TestPaceline(EngineSuite):
    """Paceline itself, as any server with OpenAI's API."""

    @pytest.fixture
    def case(self) -> Generator[EngineCase]:
        paceline = Served(ScriptedInference())
        yield EngineCase("openai", OpenAi, Door(paceline.url), TEXT_AND_MESSAGES)
        paceline.close()


class TestOpenAi(EngineSuite):
    @pytest.fixture
    def case(self, llama: Running) -> EngineCase:
        return EngineCase("openai", OpenAi, Door(llama.url), TEXT_AND_MESSAGES, unknown_model=False, is_recognised=False)
