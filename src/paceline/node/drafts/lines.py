"""To proposers of this process, as if they were another's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.core.errors import PacelineError, RemoteProposerError
from paceline.node.drafts.drafter import OnEnd
from paceline.transport.draft_blocks import OnBlock
from paceline.transport.proposer_desk import BlockAsk, ProposerDesk


class DeskLine:
    """To proposers of this process. Lives on the event loop.

    Args:
        desk: drafts.
        caller: in whose name.
        on_block: told of blocks.
        on_end: told why there will be no more.
    """

    def __init__(self, desk: ProposerDesk, caller: str, on_block: OnBlock, on_end: OnEnd) -> None:
        self._desk, self._caller, self._on_block, self._on_end = desk, caller, on_block, on_end
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: set[int] = set()

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        """As `RemoteLine.send`."""
        if ended:
            # Soon, so that asks sent before begin before.
            asyncio.get_running_loop().call_soon(self._desk.end, self._caller, ended)
        self._sessions.difference_update(ended)
        if ask is not None:
            self._sessions.add(ask.session)
            task = asyncio.create_task(self._propose(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """As `RemoteLine.close`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._desk.end(self._caller, tuple(self._sessions))

    async def _propose(self, ask: BlockAsk) -> None:
        try:
            block = await self._desk.propose(self._caller, ask)
        except PacelineError as error:
            self._on_end(RemoteProposerError(error.message, error.hint, status="FAILED_PRECONDITION"))
        except Exception as error:  # noqa: BLE001 - whatever a proposer fails of, drafts are not to be had from it
            self._on_end(RemoteProposerError(f"Drafting failed here: {type(error).__name__}: {error}", status="INTERNAL"))
        else:
            self._on_block(ask.session, block)
