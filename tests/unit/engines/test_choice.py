"""What runs a model: a table of machines, installed engines and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline.engines.choice import Asked, EngineChoice, ModelTraits, choose
from paceline.engines.environment import engine_environment
from paceline.engines.installed import Gpu, Installed, Kind, read_devices, read_version, read_words

LLAMA = Installed(Kind.LLAMA, "llama-server", "b6000", ("llama-server",), frozenset())
WITH_CUDA = replace(LLAMA, gpus=frozenset({Gpu.CUDA}), devices=("RTX 4090",))
WITH_VULKAN = replace(LLAMA, gpus=frozenset({Gpu.VULKAN}), devices=("RTX 4090",))
VLLM = Installed(Kind.VLLM, "vllm", "0.32", ("vllm", "serve"), frozenset({Gpu.CUDA}))
MLX = Installed(Kind.MLX, "mlx_lm.server", "0.32", ("mlx",), frozenset({Gpu.METAL}))
Q4 = ModelTraits("q4.gguf", is_gguf=True, is_quantised=True)
BF16 = ModelTraits("bf16.gguf", is_gguf=True, is_quantised=False)
NEW = replace(Q4, own_lacks="its architecture is 'new'")
FOLDER = ModelTraits("folder", is_gguf=False, is_quantised=False, own_lacks="its architecture is 'new'")
CUDA, METAL = (frozenset({gpu}) for gpu in (Gpu.CUDA, Gpu.METAL))
NO_GPU = frozenset[Gpu]()


@pytest.mark.parametrize(("asked", "model", "installed", "gpus", "own_gpu", "engine", "note"), [
    (None, Q4, (), NO_GPU, None, None, ""),
    (None, Q4, (LLAMA,), NO_GPU, None, None, ""),  # own kernels are ahead on processors
    (None, NEW, (LLAMA,), NO_GPU, None, LLAMA, ""),
    (None, Q4, (WITH_CUDA,), CUDA, Gpu.CUDA, WITH_CUDA, ""),
    (None, Q4, (WITH_VULKAN,), CUDA, Gpu.CUDA, WITH_VULKAN, ""),  # Vulkan drives it too
    (None, Q4, (WITH_CUDA,), CUDA, None, WITH_CUDA, ""),  # torch is not installed
    (None, BF16, (WITH_CUDA,), CUDA, Gpu.CUDA, None, ""),
    (None, BF16, (WITH_CUDA,), CUDA, None, WITH_CUDA, ""),
    (None, Q4, (LLAMA,), CUDA, Gpu.CUDA, None, "cu128"),  # it has no device: not chosen, and the better one is named
    (None, Q4, (), CUDA, None, None, "cu128"),
    (None, Q4, (), frozenset({Gpu.ROCM}), None, None, "rocm"),
    (None, Q4, (), METAL, Gpu.METAL, None, "xllamacpp"),
    (None, NEW, (LLAMA,), CUDA, Gpu.CUDA, LLAMA, "runs on processors"),
    (None, NEW, (LLAMA,), METAL, Gpu.METAL, LLAMA, "runs on processors"),
    (None, NEW, (WITH_CUDA, LLAMA), CUDA, Gpu.CUDA, WITH_CUDA, ""),
    (None, FOLDER, (LLAMA, VLLM), CUDA, Gpu.CUDA, VLLM, ""),
    (None, FOLDER, (LLAMA, MLX), METAL, Gpu.METAL, MLX, ""),
    (None, FOLDER, (VLLM,), METAL, Gpu.METAL, VLLM, "mlx-lm"),
    (Asked.OWN, Q4, (WITH_CUDA,), CUDA, Gpu.CUDA, None, ""),
    (Asked.LLAMA, Q4, (LLAMA,), NO_GPU, None, LLAMA, ""),
    (Asked.LLAMA, Q4, (LLAMA,), CUDA, Gpu.CUDA, LLAMA, "cu128"),
    (Asked.LLAMA, Q4, (WITH_CUDA, LLAMA), CUDA, Gpu.CUDA, WITH_CUDA, ""),
    (Asked.VLLM, FOLDER, (LLAMA, VLLM), CUDA, Gpu.CUDA, VLLM, ""),
    (Asked.MLX, FOLDER, (MLX,), NO_GPU, None, MLX, ""),
])  # fmt: skip
def test_the_engine_and_what_is_said(
    asked: Asked | None, model: ModelTraits, installed: tuple[Installed, ...], gpus: frozenset[Gpu], own_gpu: Gpu | None,
    engine: Installed | None, note: str,
) -> None:  # fmt: skip
    choice = choose(asked, model, installed, gpus, own_gpu)
    assert choice == EngineChoice(engine, choice.reason, choice.note)
    assert choice.reason
    assert note in choice.note
    assert bool(note) == bool(choice.note)


@pytest.mark.parametrize(("asked", "model", "installed", "why"), [
    (None, NEW, (), "its architecture is 'new'"),
    (None, NEW, (VLLM, MLX), "its architecture is 'new'"),
    (None, FOLDER, (LLAMA,), "its architecture is 'new'"),
    (Asked.OWN, NEW, (LLAMA,), "its architecture is 'new'"),
    (Asked.LLAMA, Q4, (), "xllamacpp"),
    (Asked.LLAMA, FOLDER, (LLAMA,), "safetensors"),
    (Asked.VLLM, FOLDER, (), "not installed"),
    (Asked.VLLM, Q4, (VLLM,), "safetensors"),
    (Asked.MLX, FOLDER, (), "not installed"),
    (Asked.MLX, Q4, (MLX,), "GGUF"),
])  # fmt: skip
def test_what_can_not_run_says_why_and_what_to_do(
    asked: Asked | None, model: ModelTraits, installed: tuple[Installed, ...], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(asked, model, installed, NO_GPU, None)
    assert why in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(("text", "devices"), [
    ("Available devices:\n  CUDA0: NVIDIA GeForce RTX 4090 (24217 MiB, 23849 MiB free)\n", [(Gpu.CUDA, "NVIDIA GeForce RTX 4090")]),
    ("ggml_vulkan: Found 1 Vulkan devices:\nAvailable devices:\n  Vulkan0: AMD Radeon (RADV) (8192 MiB, 8000 MiB free)\n",
     [(Gpu.VULKAN, "AMD Radeon (RADV)")]),
    ("Available devices:\n  Metal: Apple M3 Max (27648 MiB, 27647 MiB free)\n  BLAS: Accelerate (0 MiB, 0 MiB free)\n", [(Gpu.METAL, "Apple M3 Max")]),
    ("Available devices:\n  MTL0: Apple M4\n  ROCm1: gfx1100 (1 MiB, 1 MiB free)", [(Gpu.METAL, "Apple M4"), (Gpu.ROCM, "gfx1100")]),
    ("Available devices:\n", []),
    ("Available devices:\n  (none)\n", []),
    ("error: invalid argument: --list-devices", []),
    ("", []),
])  # fmt: skip
def test_devices_of_a_llama_server(text: str, devices: list[tuple[Gpu, str]]) -> None:
    assert read_devices(text) == devices


def test_a_version_and_the_options_of_a_llama_server() -> None:
    assert read_version("version: 6123 (abcdef0)\nbuilt with cc") == "b6123"
    assert read_version("") == ""
    words = read_words(
        "-np,   --parallel N   slots\n--host HOST  bind to an UNIX socket if the address ends with .sock\n--spec-type none,draft-mtp"
    )
    assert {"--parallel", "--host", ".sock", "draft-mtp"} <= words
    assert read_words("") == frozenset()


OWN: Mapping[str, str] = {
    "PATH": "/bin", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "1", "LC_ALL": "C", "GGML_VK_VISIBLE_DEVICES": "0", "VLLM_USE_V1": "1", "LD_LIBRARY_PATH": "/l",
    "HF_TOKEN": "s", "HUGGING_FACE_HUB_TOKEN": "s", "PACELINE_HOME": "s", "PACELINE_API_KEY": "s", "OPENAI_API_KEY": "s", "VLLM_API_KEY": "s",
    "NVIDIA_API_KEY": "s", "CUDA_SECRET": "s", "LLAMA_ARG_HOST": "s", "LLAMA_API_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s", "SSH_AUTH_SOCK": "s",
    "HTTPS_PROXY": "s", "TORCH_PASSWORD": "s", "DATABASE_URL": "s", "MLX_HOSTFILE": "s", "LD_PRELOAD": "s", "PYTHONSTARTUP": "s",
}  # fmt: skip


def test_an_engine_gets_what_gpus_need_and_no_secret() -> None:
    passed = engine_environment(OWN, {"LLAMA_API_KEY": "its own"})
    assert "s" not in passed.values()
    assert passed.pop("LLAMA_API_KEY") == "its own"
    assert passed == {name: value for name, value in OWN.items() if value != "s"}
