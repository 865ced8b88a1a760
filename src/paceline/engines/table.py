"""All adapters, and which of them is right for a door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.core.errors import EngineGone
from paceline.engines.sense import made_sense, shown_identity

if TYPE_CHECKING:
    from paceline.engines.adapter import Adapter
    from paceline.engines.contract import Door, EngineIdentity
    from paceline.engines.patience import EnginePatience

PORTS: Final = {
    8080: "llama-server, mlx_lm.server",
    8081: "llama-server",
    8000: "vLLM",
    11434: "Ollama",
    1234: "LM Studio",
    30000: "SGLang",
}
"""Ports of the engines as they are installed."""


def adapters() -> tuple[type[Adapter], ...]:
    """Return the adapters in the order to try them. The last takes every server with OpenAI's API."""
    from paceline.engines.llama_server import LlamaServer
    from paceline.engines.lmstudio import LmStudio
    from paceline.engines.mlx_server import MlxServer
    from paceline.engines.ollama import Ollama
    from paceline.engines.openai import OpenAi
    from paceline.engines.vllm import Vllm

    return LlamaServer, Ollama, LmStudio, Vllm, MlxServer, OpenAi


async def open_engine(door: Door, patience: EnginePatience | None = None, *, name: str = "") -> Adapter:
    """Find out which engine answers at a door, and return its adapter.

    Args:
        name: the engine's name as `EngineIdentity` has it, if it is known. The door is then not asked.

    Raises:
        EngineGone: nothing answers at the door, or nothing that is an engine.
        ConfigError: the key can't be sent.
    """
    for adapter in adapters():
        if adapter.name == name:
            return adapter(door, patience)
    engine, _ = await identify(door, patience)
    return engine


async def identify(door: Door, patience: EnginePatience | None = None) -> tuple[Adapter, EngineIdentity]:
    """Return the engine at a door and what it says of itself.

    Raises:
        EngineGone: nothing answers at the door, or nothing that is an engine.
        ConfigError: the key can't be sent.
    """
    for adapter in adapters():
        engine = adapter(door, patience)
        identity: EngineIdentity | None = None
        try:
            identity = await made_sense(door.url, engine.identify())
        finally:
            if identity is None:
                await engine.close()
        if identity is not None:
            return engine, shown_identity(identity)
    from paceline.engines.http import place_of

    raise EngineGone(f"No engine that Paceline knows answers at {place_of(door)}", "Check the address: it is the one without /v1.")
