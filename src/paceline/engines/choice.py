"""Which engine runs a model here: Paceline's own kernels, or an engine that this node starts. One pure rule, with its reason in words.

Laws:
- An engine that can't use this machine's GPU is never chosen silently: the choice then carries a note with the command that installs one that can.
- On processors own kernels are the faster ones: ahead of llama.cpp in the measurements of bench/RESULTS.md.
- On a GPU own kernels hold bf16 only. A quantised file is a third to a quarter of that, and what is generated is limited by reading it: an engine that
  reads the quantised blocks is faster.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from paceline.core.errors import ConfigError, how_to_install
from paceline.engines.installed import Gpu, Installed, Kind


class Asked(StrEnum):
    """The values of `--engine`."""

    OWN = "own"
    LLAMA = "llama"
    VLLM = "vllm"
    MLX = "mlx"


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Properties of the model that decide the choice."""

    name: str
    is_gguf: bool
    is_quantised: bool
    own_lacks: str = ""
    """Why own kernels can't run it; empty: they can."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    engine: Installed | None
    """The engine to start; None: own kernels."""
    reason: str
    note: str = ""
    """A sentence for the person at the start: what is slower than it could be, and the command that changes it. Empty: nothing."""


_WHEELS: Final = "https://xorbitsai.github.io/xllamacpp/whl/"
"""Index of the wheels for GPUs, by their makers."""
_FOLDERS: Final = {Gpu.CUDA: "cu128", Gpu.ROCM: "rocm-6.4.1", Gpu.VULKAN: "vulkan"}


def choose(
    asked: Asked | None, model: ModelTraits, installed: Sequence[Installed], gpus: Collection[Gpu], own_gpu: Gpu | None
) -> EngineChoice:
    """Choose what runs a model.

    Args:
        asked: the value of `--engine`; None: not given.
        installed: engines of this machine; of one kind, the preferred one first.
        gpus: interfaces of this machine's GPUs.
        own_gpu: the GPU that own kernels use; None: they run on processors.

    Raises:
        ConfigError: the engine that was asked for can't run the model here, or nothing can. It says why, and what to install.
    """
    if asked is Asked.OWN:
        if model.own_lacks:
            raise ConfigError(
                f"Paceline's own kernels can't run {model.name}: {model.own_lacks}", "Leave --engine out, or choose --engine llama"
            )
        return EngineChoice(None, "asked for with --engine own")
    if asked is not None:
        kind = Kind(asked.value)
        why_not = _why_not(kind, model, installed, gpus)
        if why_not:
            raise ConfigError(f"--engine {asked} can't run {model.name}: {why_not[0]}", why_not[1])
        engine = _best(kind, installed)
        return EngineChoice(engine, f"asked for with --engine {asked}", _note(engine, gpus))
    fitting = [_best(kind, installed) for kind in Kind if not _why_not(kind, model, installed, gpus)]
    with_gpu = [engine for engine in fitting if _uses(engine, gpus)]
    if model.own_lacks:
        if not fitting:
            raise ConfigError(
                f"Nothing on this machine runs {model.name}. Paceline's own kernels can't: {model.own_lacks}. No other engine for it is installed",
                f"Run: {how_to_start_with(model, gpus)}",
            )
        engine = (with_gpu or fitting)[0]
        return EngineChoice(engine, f"own kernels can't run it: {model.own_lacks}", _note(engine, gpus))
    if not gpus:
        return EngineChoice(None, "own kernels are the fastest on this machine's processors")
    if own_gpu is not None and not model.is_quantised:
        return EngineChoice(None, "own kernels use the GPU, and hold this model as its file does")
    if with_gpu:
        held = "own kernels hold bf16 only on a GPU" if own_gpu is not None else "own kernels can't use this GPU"
        return EngineChoice(with_gpu[0], f"{with_gpu[0]} runs it on the GPU, and {held}")
    where = "hold it in bf16 on the GPU" if own_gpu is not None else "run it on processors"
    note = f"A llama-server that uses this machine's GPU ({_named(gpus)}) would be faster. Install one: {how_to_start_with(model, gpus)}"
    return EngineChoice(None, f"own kernels {where}, and no engine that uses the GPU is installed", note if model.is_gguf else "")


def _best(kind: Kind, installed: Sequence[Installed]) -> Installed:
    return next(each for each in installed if each.kind is kind)


def _uses(engine: Installed, gpus: Collection[Gpu]) -> bool:
    """Return whether an engine uses this machine's GPU. What it lists itself counts: Vulkan drives GPUs of every maker."""
    return bool(engine.gpus.intersection(gpus) or (gpus and engine.devices))


def _why_not(kind: Kind, model: ModelTraits, installed: Sequence[Installed], gpus: Collection[Gpu]) -> tuple[str, str] | None:
    """Return why an engine can't run a model here, and what to do; None: it can."""
    is_here = any(each.kind is kind for each in installed)
    match kind:
        case Kind.LLAMA:
            if not model.is_gguf:
                return "llama.cpp reads GGUF files, and this is a folder with safetensors", "Pull the model as a GGUF file"
            return (
                None
                if is_here
                else ("neither a llama-server on the PATH nor the package xllamacpp is here", f"Run: {how_to_start_with(model, gpus)}")
            )
        case Kind.VLLM:
            if model.is_gguf:
                return "vLLM is started with folders of safetensors only", "Pull the model as safetensors, or choose --engine llama"
            if not is_here:
                return "vLLM is not installed", f"Run: {how_to_install('vllm')}"
            return None
        case Kind.MLX:
            if model.is_gguf:
                return (
                    "mlx_lm.server reads folders of safetensors, and this is a GGUF file",
                    "Choose --engine llama, or pull the model as safetensors",
                )
            return None if is_here else ("mlx-lm is not installed", f"Run: {how_to_install('mlx-lm')}")


def _note(engine: Installed, gpus: Collection[Gpu]) -> str:
    if not gpus or _uses(engine, gpus):
        return ""
    model = ModelTraits("", is_gguf=engine.kind is Kind.LLAMA, is_quantised=True)
    return f"{engine} can't use this machine's GPU ({_named(gpus)}) and runs on processors. To use it: {how_to_start_with(model, gpus)}"


def _named(gpus: Collection[Gpu]) -> str:
    return ", ".join(sorted(gpus))


def how_to_start_with(model: ModelTraits, gpus: Collection[Gpu]) -> str:
    """Return the shell command that installs an engine for a model on this machine's GPU; without a GPU, for processors."""
    if not model.is_gguf:
        return how_to_install("mlx-lm" if Gpu.METAL in gpus else "vllm")
    folder = next((_FOLDERS[gpu] for gpu in Gpu if gpu in gpus and gpu in _FOLDERS), None)
    if folder is None or Gpu.METAL in gpus:
        return how_to_install("xllamacpp>=2026.10,<2027")
    return how_to_install("xllamacpp", "--force-reinstall", "--index-url", f"{_WHEELS}{folder}")
