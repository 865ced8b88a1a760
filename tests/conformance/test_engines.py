"""Every adapter under the one suite: with the engine itself where it runs here, else with a server that answers as its documents say."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from tests.conformance.suites.engine import EngineCase, EngineSuite
from tests.fakes.foreign_engines import Running, llama_server

from paceline.engines.contract import Door, Takes
from paceline.engines.llama_server import LlamaServer
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
