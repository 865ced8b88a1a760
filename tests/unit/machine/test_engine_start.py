"""Models in engines that this node starts: the decision from real files, and llama.cpp's real server."""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console
from tests.fakes.hybrid_model import HIDDEN, write_hybrid
from tests.fakes.seeded_models import shape, write_folder
from tests.fakes.seeing_model import write_projector

from paceline.cli.children import engine_for
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, EngineGone, ModelFileError, OutOfMemory, PacelineError, UnsupportedModel
from paceline.engines.choice import Asked
from paceline.engines.installed import Gpu, Installed, Kind
from paceline.engines.llama_server import LlamaServer
from paceline.engines.process import EngineProcess
from paceline.engines.table import open_engine
from paceline.machine.devices import gpus_here
from paceline.machine.engine_start import Decision, decide, find_projector, read_gguf, start_child
from paceline.store.catalog import BUNDLED
from paceline.store.home import Home

LLAMA = Installed(Kind.LLAMA, "llama-server", "b6000", ("llama-server",), frozenset({Gpu.CUDA}), ("RTX 4090",))
MLX = Installed(Kind.MLX, "mlx_lm.server", "0.32", ("mlx",), frozenset())


def decided(
    path: Path | str, home: Path, asked: Asked | None = None, *, engines: Sequence[Installed] = (LLAMA,), gpu: bool = False
) -> Decision:
    gpus = frozenset({Gpu.CUDA} if gpu else ())
    return decide(str(path), Home(home), asked, find=lambda: engines, gpus=gpus, own_gpu=lambda: Gpu.CUDA)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "hybrid.gguf")


def test_own_kernels_run_what_they_can_and_no_engine_is_asked(tmp_path: Path) -> None:
    def find() -> Sequence[Installed]:
        raise AssertionError("engines were asked")

    decision = decide(BUNDLED, Home(tmp_path), find=find, gpus=())
    assert decision.choice.engine is None
    assert decision.opened is not None


def test_a_quantised_file_runs_where_the_gpu_reads_it(tmp_path: Path) -> None:
    assert decided(BUNDLED, tmp_path, gpu=True).choice.engine is LLAMA
    alone = decided(BUNDLED, tmp_path, gpu=True, engines=()).choice
    assert alone.engine is None
    assert "pip install" in alone.note


@pytest.mark.parametrize("asked", [None, Asked.OWN, Asked.LLAMA])
def test_a_start_says_that_own_kernels_leave_a_projector_unread(tmp_path: Path, bundled_gguf: Path, asked: Asked | None) -> None:
    (tmp_path / "model.gguf").symlink_to(bundled_gguf)
    printed = io.StringIO()
    console = Console(file=printed)
    engine_for(str(tmp_path / "model.gguf"), None, Home(tmp_path), console)
    assert not printed.getvalue()
    projector = write_projector(tmp_path / "mmproj-model.gguf", 576)
    decision = decided(tmp_path / "model.gguf", tmp_path, asked)
    assert decision.projector == projector
    assert ("mmproj-model.gguf" in decision.choice.note) == (asked is not Asked.LLAMA)
    if not gpus_here():
        assert engine_for(str(tmp_path / "model.gguf"), None, Home(tmp_path), console) is None
        assert "--engine llama" in printed.getvalue()


def test_a_family_that_own_kernels_lack_goes_to_the_engine(tmp_path: Path, hybrid: Path) -> None:
    decision = decided(hybrid, tmp_path)
    assert decision.choice.engine is LLAMA
    assert "lfm2" in decision.choice.reason
    assert decision.gguf is not None
    assert (decision.gguf.n_layers, decision.gguf.context, decision.gguf.is_quantised) == (4, 2048, False)
    with pytest.raises(ConfigError, match="lfm2"):
        decided(hybrid, tmp_path, Asked.OWN)
    with pytest.raises(ConfigError, match="lfm2"):
        decided(hybrid, tmp_path, engines=())


def test_a_folder_goes_to_the_engine_that_reads_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", shape("tiny", n_layers=1))
    assert decided(folder, tmp_path, Asked.MLX, engines=(LLAMA, MLX)).choice.engine is MLX
    with pytest.raises(ConfigError, match="safetensors"):
        decided(folder, tmp_path, Asked.LLAMA)


@pytest.mark.parametrize("asked", [None, Asked.LLAMA])
@pytest.mark.parametrize("damage", ["short", "headless", "no text", "empty"])
def test_a_damaged_file_is_a_clear_error_before_any_process(tmp_path: Path, hybrid: Path, asked: Asked | None, damage: str) -> None:
    data = hybrid.read_bytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(
        {"short": data[:-4096], "headless": data[:1000], "no text": b"GGUF" + struct.pack("<I", 3) + b"\xff" * 64, "empty": b""}[damage]
    )
    with pytest.raises(ModelFileError) as caught:
        decided(path, tmp_path, asked)
    assert str(path) in caught.value.message


def write_part(path: Path, arch: str, fields: Mapping[str, Any]) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "fields"), [("bert", {}), ("llama", {"general.type": "adapter"}), ("clip", {"general.type": "mmproj"}), ("clip", {})]
)
def test_a_file_that_answers_no_chat_is_refused(tmp_path: Path, arch: str, fields: Mapping[str, str]) -> None:
    with pytest.raises(UnsupportedModel):
        read_gguf(write_part(tmp_path / "part.gguf", arch, fields))


def test_layers_that_predict_ahead_are_seen(tmp_path: Path) -> None:
    assert read_gguf(write_part(tmp_path / "mtp.gguf", "glm4moe", {"glm4moe.nextn_predict_layers": 1})).predicts_ahead
    assert not read_gguf(write_part(tmp_path / "plain.gguf", "glm4moe", {})).predicts_ahead


def test_the_projector_next_to_a_model_is_found_by_its_size(tmp_path: Path, hybrid: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(hybrid.read_bytes())
    assert find_projector(model, HIDDEN) is None
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    write_part(tmp_path / "mmproj-other.gguf", "clip", {"clip.vision.projection_dim": HIDDEN * 2})
    assert find_projector(model, HIDDEN) is None
    right = write_part(tmp_path / "mmproj-right.gguf", "clip", {"clip.vision.projection_dim": HIDDEN})
    assert find_projector(model, HIDDEN) == right


def test_gpus_are_seen_by_their_drivers(tmp_path: Path) -> None:
    assert gpus_here(tmp_path, "linux") == frozenset()
    assert gpus_here(tmp_path, "darwin", "arm64") == {Gpu.METAL}
    assert gpus_here(tmp_path, "darwin", "x86_64") == frozenset()
    (tmp_path / "dev").mkdir()
    for device, gpu in (("nvidiactl", Gpu.CUDA), ("kfd", Gpu.ROCM)):
        (tmp_path / "dev" / device).touch()
        assert gpu in gpus_here(tmp_path, "linux")


# ---------------------------------------------------------------------------------------------------------- the real server


def client(engine: EngineProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(engine.door.socket)), base_url=engine.door.url, timeout=60)


async def say(engine: EngineProcess, text: str, **more: Any) -> str:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **more}
    async with client(engine) as http:
        answer = await http.post("/v1/chat/completions", json=asked, headers={"Authorization": f"Bearer {engine.door.api_key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_hybrid_model_answers_from_a_child_that_only_its_node_can_use(
    tmp_path: Path, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("HF_TOKEN", "of-the-person")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # a llama-server of this machine is not meant
    decision = decide(str(hybrid), Home(tmp_path), gpus=())

    async def test() -> tuple[str, str]:
        engine = await start_child(decision, Home(tmp_path), SystemClock(), context=256, slots=2, threads=1)
        try:
            await engine.wait_ready()
            key, socket = engine.door.api_key, engine.door.socket
            assert socket is not None
            assert socket.parent.stat().st_mode & 0o077 == 0  # no other user can search it
            async with client(engine) as http:
                asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
                page = {"Origin": "https://evil.example"}
                for headers in ({}, page, {"Authorization": "Bearer guess"}, {**page, "Authorization": f"Bearer {key[:-1]}"}):
                    refused = await http.post("/v1/chat/completions", json=asked, headers=headers)
                    assert refused.status_code == 401
                    assert refused.headers.get("Access-Control-Allow-Origin") not in {"*", page["Origin"]}
                    for path in ("/props", "/slots", "/metrics"):
                        assert (await http.get(path, headers=headers)).status_code == 401
            adapter = LlamaServer(engine.door)
            (model,) = await adapter.models()
            assert (model.name, model.path, model.context, model.slots) == ("hybrid", hybrid, 256, 2)
            await adapter.close()
            assert engine.pid is not None
            family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
            assert len(family) == 2
            for process in family:
                assert key not in " ".join(process.cmdline())
                assert not {"HF_TOKEN", "PACELINE_HOME"} & process.environ().keys()
            return await say(engine, "Tell me a story", max_tokens=24), await say(
                engine, "Tell me a story", max_tokens=24, cache_prompt=False
            )
        finally:
            await engine.stop()

    one, other = asyncio.run(test())
    assert one
    assert one == other


def test_the_bundled_model_answers_from_a_child_and_a_wrong_one_says_why(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    decision = decide(BUNDLED, Home(tmp_path), Asked.LLAMA, gpus=())
    unknown = write_part(tmp_path / "unknown.gguf", "newest", {})
    notes: list[str] = []

    async def test() -> None:
        engine = await start_child(decision, Home(tmp_path), SystemClock(), context=256, slots=1, threads=1)
        try:
            await engine.wait_ready(notes.append)
            assert await say(engine, "Say hello.", max_tokens=4)
            assert "ready" in notes[-1]
        finally:
            await engine.stop()
        location = replace(decision.location, path=unknown)
        wrong = await start_child(replace(decision, location=location), Home(tmp_path), SystemClock())
        try:
            with pytest.raises(PacelineError, match="newest") as caught:
                await wrong.wait_ready()
            assert isinstance(caught.value, EngineGone)
            assert not isinstance(caught.value, OutOfMemory)
        finally:
            await wrong.stop()

    asyncio.run(test())


@pytest.mark.whole("mlx-lm's server imports transformers, for seconds; only its key and its socket are ours")
def test_mlx_lm_serves_its_one_model_behind_a_socket_and_a_key(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    folder = write_folder(tmp_path / "tiny", shape("tiny", n_layers=1))
    decision = decide(str(folder), Home(tmp_path), Asked.MLX, gpus=())

    async def test() -> None:
        engine = await start_child(decision, Home(tmp_path), SystemClock(), context=256)
        adapter = await open_engine(engine.door, name=engine.identity.name)
        try:
            await engine.wait_ready()
            assert [model.path for model in await adapter.models()] == [folder]
            async with client(engine) as http:
                for path in ("/health", "/v1/models"):
                    assert (await http.get(path, headers={"Origin": "https://evil.example"})).status_code == 401
            assert await say(engine, "Hello", max_tokens=2)
        finally:
            await adapter.close()
            await engine.stop()

    asyncio.run(test())
