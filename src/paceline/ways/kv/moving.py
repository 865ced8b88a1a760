"""Blocks of this node's stages, between them and other nodes: fetched and given in parts, as the stages' orchestrators ask.

Law: who is asked, and who is given, this node decides by its own view and trust: an orchestrator only names them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from paceline.core.errors import FleetError
from paceline.core.ids import BlockId, NodeId
from paceline.fleet.eligibility import Use
from paceline.machine.kv_spans import KvBlocks, KvMove, KvPart, PartsFetch
from paceline.net.member.node import FleetNode
from paceline.net.trust.certificates import Member
from paceline.ways.kv.fetching import KvPeer, PeerFetch, send_block
from paceline.ways.kv.patience import Patience
from paceline.ways.kv.price import UNPRICED
from paceline.ways.kv.staged import BlockSender

logger = logging.getLogger(__name__)


class StageMoves:
    """Implements `machine.kv_spans.KvMover`.

    Args:
        begin: asks a peer for a fetch's blocks.
        is_resting: whether a process of a node is asked for nothing now.
        dial: as of `KvOwner.dial`.
        given: as of `KvOwner.given`.
    """

    def __init__(
        self,
        fleet: FleetNode,
        threads: Executor,
        begin: Callable[[PeerFetch], None],
        is_resting: Callable[[NodeId, bytes], bool],
        dial: Callable[[Member, int, bytes, None, int], Callable[[], BlockSender]],
        given: Callable[[int, int, str], None],
    ) -> None:
        self._fleet, self._threads, self._begin = fleet, threads, begin
        self._is_resting, self._dial, self._given = is_resting, dial, given

    def fetch(
        self,
        part: KvPart,
        held: KvBlocks,
        move: KvMove,
        keys: Sequence[bytes],
        blocks: Sequence[BlockId],
        within_s: float,
        wake: Callable[[], None],
    ) -> PartsFetch:
        """See `KvMover`."""
        live = self._fleet.view().get(move.node_id)
        fetches: list[PeerFetch] = []
        n, here_s = move.n_likely, within_s / max(1, move.n_likely)
        for piece in part.cut(move.stops):
            write = lambda block, data, layers=piece.layers: held.import_block(block, data, layers)  # noqa: E731
            instance, addresses = (b"", ()) if live is None else (live.card.instance, live.card.addresses)
            peer = KvPeer(move.node_id, instance, addresses, frozenset(), UNPRICED)
            # What is still being computed comes all at once.
            patience = Patience(time.perf_counter(), here_s, n, n if move.ticket else 1, within_s=within_s)
            fetches.append(fetch := PeerFetch(peer, piece, keys, blocks, n, write, wake, patience, prefill=move.ticket))
            if live is None or self._is_resting(move.node_id, instance):
                fetch.cancel()
            else:
                self._begin(fetch)
        return PartsFetch(fetches)

    async def give(
        self, part: KvPart, move: KvMove, keys: Sequence[bytes], read: Callable[[int, memoryview], bool], within_s: float
    ) -> int:
        """See `KvMover`."""
        sent, to = 0, self._fleet.member(move.node_id)
        if to is None:
            raise FleetError(f"{move.node_id} is not known here")
        self._fleet.trust.check(to, Use.SHARE_KV, self._fleet.gossip.voids)
        until, opened = time.perf_counter() + within_s, self._dial(to, move.tensor_port, move.ticket, None, part.block_bytes)

        def send() -> None:
            nonlocal sent
            sender = opened()
            try:
                while sent < len(keys) and time.perf_counter() < until and read(sent, data := sender.space()):
                    send_block(sender, keys[sent], data)
                    sent += 1
                sender.finish()
            finally:
                sender.close()

        try:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, send))
        except FleetError as error:
            logger.info("KV is not given to its end: %s", error)
        self._given(sent, sent * part.block_bytes, "stream")
        return sent
