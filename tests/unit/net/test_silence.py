"""Whose silence it is: a node that stood still itself has not listened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.net.member.nodes import in_loop
from tests.unit.ways.pipeline.test_shard_service import REQUEST

from paceline.core.errors import PipelineStalled
from paceline.core.ids import NodeId
from paceline.ways.pipeline.client import LISTENED, _next
from paceline.ways.pipeline.codec import write_event
from paceline.ways.pipeline.executor.route import StageReport

SILENCE_S = 4.0
LOST_S = 5.0


class Call:
    """One whose message comes when it is told to."""

    def __init__(self) -> None:
        self.comes = asyncio.Event()

    async def read(self) -> Any:
        await self.comes.wait()
        return write_event(StageReport())


async def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process lose some seconds, and look at what is due."""
    loop = asyncio.get_running_loop()
    late_s = loop.time() + LOST_S
    monkeypatch.setattr(loop, "time", lambda: late_s)
    for _ in range(4):
        await asyncio.sleep(0)


@in_loop
async def test_time_lost_here_is_no_silence_there() -> None:
    call: Any = Call()
    with pytest.MonkeyPatch.context() as monkeypatch:
        heard = asyncio.create_task(_next(call, NodeId("a"), REQUEST, SILENCE_S))
        await asyncio.sleep(0)
        await stand_still(monkeypatch)
        call.comes.set()
        assert await heard == StageReport()


@in_loop
async def test_silence_ends_a_session() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        heard = asyncio.create_task(_next(Call(), NodeId("a"), REQUEST, SILENCE_S))  # type: ignore[arg-type]
        for _ in range(LISTENED):
            await asyncio.sleep(0)
            await stand_still(monkeypatch)
        with pytest.raises(PipelineStalled, match="said nothing for 4 s"):
            await heard
