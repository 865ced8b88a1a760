from __future__ import annotations

from paceline.core.errors import EngineGone
from paceline.engines.contract import Door, Engine, EngineIdentity
from paceline.engines.llama_server import LlamaServer


async def open_engine(door: Door) -> tuple[Engine, EngineIdentity]:
    engine = LlamaServer(door)
    found = await engine.identify()
    if found is None:
        raise EngineGone("no")
    return engine, found
