"""Command lines of engines, and their logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.engines.commands import EngineOptions, command_of, variables_of
from paceline.engines.contract import Door
from paceline.engines.engine_log import HEAD_BYTES, KEPT_LOGS, TAIL_BYTES, EngineLog, Memory, memory_lacked
from paceline.engines.installed import Installed, Kind
from paceline.engines.run_xllamacpp import parser

KEY = "a-random-key"
SOCKET = Door("http://127.0.0.1", KEY, Path("/run/x/engine.sock"))
PORT = Door("http://127.0.0.1:31234", KEY)
LLAMA = Installed(Kind.LLAMA, "llama-server", "b6000", ("llama-server",), frozenset())
OLD = replace(LLAMA, words=frozenset({"--parallel", "--ctx-size", "--no-webui", "--n-gpu-layers", "--model-draft", "--mmproj"}))
FULL = EngineOptions(
    Path("/m/model.gguf"),
    "model",
    context=4096,
    slots=4,
    projector=Path("/m/mmproj.gguf"),
    draft=Path("/m/d.gguf"),
    threads=8,
    cache_mib=512,
)


def pairs(command: list[str]) -> dict[str, str]:
    return dict(zip(command, [*command[1:], ""], strict=True))


def test_a_llama_server_gets_the_plan() -> None:
    command = command_of(LLAMA, FULL, SOCKET, 24)
    found = pairs(command)
    assert (found["--model"], found["--host"], found["--ctx-size"], found["--parallel"]) == (
        "/m/model.gguf",
        "/run/x/engine.sock",
        "16384",
        "4",
    )
    assert (found["--n-gpu-layers"], found["--mmproj"], found["--spec-draft-model"]) == ("24", "/m/mmproj.gguf", "/m/d.gguf")
    assert {"--offline", "--no-ui"} <= set(command)
    assert "--n-gpu-layers" not in command_of(LLAMA, FULL, SOCKET, None)  # as many as fit
    parser().parse_args(command[1:])  # the wheel's server takes the same


def test_a_file_that_predicts_ahead_needs_no_draft_model() -> None:
    command = command_of(LLAMA, replace(FULL, predicts_ahead=True), SOCKET, None)
    assert pairs(command)["--spec-type"] == "draft-mtp"
    assert "--spec-draft-model" not in command


def test_an_older_version_gets_only_options_that_it_has() -> None:
    command = command_of(OLD, replace(FULL, predicts_ahead=True), PORT, 24)
    assert not OLD.takes_socket
    assert pairs(command)["--port"] == "31234"
    assert pairs(command)["--model-draft"] == "/m/d.gguf"
    assert {word for word in command if word.startswith("--")} <= OLD.words | {"--model", "--host", "--port"}


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("door", [SOCKET, PORT])
def test_the_key_goes_by_the_environment_alone(kind: Kind, door: Door) -> None:
    engine = replace(LLAMA, kind=kind)
    assert KEY not in " ".join(command_of(engine, FULL, door, None))
    assert KEY in variables_of(engine, KEY, Path("/run/x")).values()


@pytest.mark.parametrize(("line", "lacked"), [
    ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4403.49 MiB on device 0: cudaMalloc failed: out of memory", Memory.DEVICE),
    ("CUDA error: out of memory", Memory.DEVICE),
    ("alloc_tensor_range: failed to allocate ROCm0 buffer of size 4617397248", Memory.DEVICE),
    ("llama_model_load: error loading model: unable to allocate Vulkan0 buffer", Memory.DEVICE),
    ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", Memory.DEVICE),
    ("error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", Memory.DEVICE),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", Memory.DEVICE),
    ("ValueError: No available memory for the cache blocks.", Memory.DEVICE),
    ("llama_model_load: error loading model: unable to allocate CPU buffer", Memory.HOST),
    ("terminate called after throwing an instance of 'std::bad_alloc'", Memory.HOST),
    ("llama_kv_cache: CUDA0 KV buffer size = 512.00 MiB", None),
    ("load_tensors: CUDA0 model buffer size = 4403.49 MiB", None),
    ("load_tensors: offloaded 33/33 layers to GPU", None),
    ("llama_model_load: error loading model: unknown model architecture: 'new'", None),
])  # fmt: skip
def test_memory_that_an_engine_says_it_lacks(line: str, lacked: Memory | None) -> None:
    assert memory_lacked(line) is lacked


def test_a_log_keeps_its_beginning_and_its_end_without_the_key(tmp_path: Path) -> None:
    log = EngineLog(tmp_path, "llama-server", 1.5, KEY)
    log.write(b"first line with " + KEY[:4].encode())
    log.write(KEY[4:].encode() + b" in two pieces\n")
    for n in range(40_000):
        log.write(b"%060d\n" % n)
    log.write(b"the last words \x1b[31m")
    log.close()
    log.close()
    data = log.path.read_bytes()
    assert len(data) < HEAD_BYTES + TAIL_BYTES + 200
    assert data.startswith(b"first line with [key] in two pieces\n")
    assert b"bytes are left out here" in data
    assert b"%060d\n" % 39_999 in data
    assert log.last_lines().endswith("the last words \\x1b[31m")


def test_logs_of_old_starts_are_removed(tmp_path: Path) -> None:
    (tmp_path / "vllm-000000000000001.log").touch()
    for n in range(2 * KEPT_LOGS):
        EngineLog(tmp_path, "llama-server", n, "").close()
    assert len(list(tmp_path.glob("llama-server-*.log"))) == KEPT_LOGS
    assert (tmp_path / f"llama-server-{(2 * KEPT_LOGS - 1) * 1000:015d}.log").exists()
    assert (tmp_path / "vllm-000000000000001.log").exists()
