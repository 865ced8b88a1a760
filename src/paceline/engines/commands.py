"""The commands that start engines: options from the plan, in the spelling that the installed version knows.

Laws: no key stands on a command line, which other users of the machine can read. Nothing is fetched from a network. An engine listens on a Unix socket in a
folder of this user where it can, else on loopback.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.engines.contract import Door
from paceline.engines.installed import Installed, Kind

NO_PAGE: Final = "https://paceline.invalid"
"""The only origin that may read answers of the engine from a page: a name that no host can have (RFC 6761)."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model that an engine is started for, and its limits."""

    model: Path
    """A GGUF file (of a split model, the first) or a folder with safetensors."""
    name: str
    """Name of the model in requests to the engine."""
    context: int | None = None
    """Tokens of prompt and answer of one request; None: the model's own maximum, or what the engine finds room for."""
    slots: int = 1
    """Requests at once."""
    projector: Path | None = None
    """GGUF file that turns images into embeddings (mmproj)."""
    predicts_ahead: bool = False
    """The file holds layers that draft the model's next tokens (MTP)."""
    draft: Path | None = None
    """GGUF file of a smaller model that drafts tokens."""
    threads: int | None = None
    """Threads that compute; None: the engine decides."""
    cache_mib: int | None = None
    """Host memory for prompts of earlier requests, in MiB; None: the engine's own limit."""


def command_of(engine: Installed, wanted: EngineOptions, door: Door, gpu_layers: int | None) -> list[str]:
    """Return the command that starts an engine.

    Args:
        gpu_layers: layers of the model on the GPU; None: the engine decides.
    """
    match engine.kind:
        case Kind.LLAMA:
            return _llama(engine, wanted, door, gpu_layers)
        case Kind.VLLM:
            return _vllm(engine, wanted, door)
        case Kind.MLX:
            return [*engine.program, "--model", str(wanted.model), "--max-tokens", str(wanted.context or 4096), *_address(door)]


def variables_of(engine: Installed, key: str, folder: Path) -> dict[str, str]:
    """Return the environment variables that carry the key and keep an engine from asking a hub.

    Args:
        folder: stands in for the hub's cache. mlx-lm's server lists and loads every model there, and fails where it is missing.
    """
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    match engine.kind:
        case Kind.LLAMA:
            return {"LLAMA_API_KEY": key}
        case Kind.VLLM:
            return {**offline, "VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
        case Kind.MLX:
            return {**offline, "HF_HUB_CACHE": str(folder), "MLX_SERVER_KEY": key}


def _address(door: Door) -> list[str]:
    if door.socket is not None:
        return ["--host", str(door.socket)]
    host, _, port = door.url.rpartition("//")[2].rpartition(":")
    return ["--host", host, "--port", port]


def _llama(engine: Installed, wanted: EngineOptions, door: Door, gpu_layers: int | None) -> list[str]:
    command = [*engine.program, "--model", str(wanted.model), *_address(door)]

    def add(spellings: tuple[str, ...], *values: object) -> None:
        """Add an option in the first spelling that this version has. Without one it has no such feature."""
        known = next((each for each in spellings if engine.has(each)), None)
        if known is not None:
            command.extend([known, *map(str, values)])

    add(("--alias",), wanted.name)
    add(("--parallel",), wanted.slots)
    if wanted.context is not None:
        add(("--ctx-size",), wanted.context * wanted.slots)  # the slots divide it
    add(("--no-kv-unified",))
    if gpu_layers is not None:
        add(("--n-gpu-layers", "--gpu-layers"), gpu_layers)
    if wanted.projector is not None:
        add(("--mmproj",), wanted.projector)
    if wanted.predicts_ahead and engine.has("draft-mtp"):
        add(("--spec-type",), "draft-mtp")
    elif wanted.draft is not None:
        add(("--spec-draft-model", "--model-draft"), wanted.draft)
    if wanted.threads is not None:
        add(("--threads",), wanted.threads)
    if wanted.cache_mib is not None:
        add(("--cache-ram",), wanted.cache_mib)
    add(("--offline",))
    add(("--no-ui", "--no-webui"))
    add(("--cors-origins",), NO_PAGE)
    add(("--jinja",))
    add(("--metrics",))
    return command


def _vllm(engine: Installed, wanted: EngineOptions, door: Door) -> list[str]:
    command = [*engine.program, "--model", str(wanted.model), "--served-model-name", wanted.name, "--max-num-seqs", str(wanted.slots)]
    if wanted.context is not None:
        command += ["--max-model-len", str(wanted.context)]
    if door.socket is not None:
        return [*command, "--uds", str(door.socket)]
    return [*command, *_address(door)]
