"""What goes on in the background does not end unheard."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.node.fleet.nodes import in_loop

from paceline.core.background import in_background


@in_loop
async def test_what_ends_a_task_is_logged_unless_its_owner_did(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def waits_for_what_is_cancelled() -> None:
        raise asyncio.CancelledError

    async def ends() -> None:
        pass

    tasks = [in_background(work(), work.__name__) for work in (fails, waits_for_what_is_cancelled, ends)]
    cancelled = in_background(asyncio.Event().wait(), "cancelled")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(*tasks, cancelled, return_exceptions=True)
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "fails failed",
        "waits_for_what_is_cancelled was ended by something it waited for",
    ]
