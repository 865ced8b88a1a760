"""Proposers of this process alone, found and reached in the same ways as a fleet's."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from paceline.core.errors import PacelineError, PlacementError, RemoteProposerError
from paceline.core.ids import NodeId
from paceline.fleet.card import ModelOffer
from paceline.ways.draft.blocks import OnBlock
from paceline.ways.draft.desk import BlockAsk, ProposerDesk
from paceline.ways.draft.drafter import Drafter, Key, OnEnd, drafter_of


class DeskLine:
    """To proposers of this process. Lives on the event loop.

    Args:
        caller: in whose name.
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


HERE = NodeId("here")


class Alone:
    """Finds them and opens lines to them.

    Args:
        offers: what they promise, by the desk's names.
    """

    def __init__(self, desk: ProposerDesk, offers: Mapping[str, ModelOffer]) -> None:
        self._desk, self._offers = desk, offers

    def find(self, model_id: str, left_out: Collection[Key]) -> Sequence[Drafter]:
        """As `drafter.Find`, of a model; empty: of any."""
        found = [drafter_of(HERE, b"", name, offer, 0.0) for name, offer in self._offers.items() if model_id in {"", name}]
        left = [one for one in found if one.key not in left_out]
        if not left:
            raise PlacementError(f"Nobody drafts with {model_id or 'a model'} here", f"Start with --propose {model_id or 'MODEL'}.")
        return left

    def open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> DeskLine:
        """As `drafter.OpenLine`."""
        return DeskLine(self._desk, drafter.node_id, on_block, on_end)
