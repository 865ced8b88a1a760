"""The KV of one engine and that of its peers: blocks that a peer has are fetched into the pool before a sequence begins, beside those on this machine's
disk; and blocks that are here are read for peers.

Law: what is slow, lost or wrong is a miss, and the block is computed. A block is written only while its fetch is not over, and read for others only
while it is lent, so neither outlives the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from secrets import token_bytes
from typing import Any, Final

from paceline.core.errors import ExecutorLost
from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId, NodeId, RequestId
from paceline.core.inference import ChunkStream
from paceline.core.model import LayerRange, LayerSpan
from paceline.engine.kv_fetch import GivenBlocks, KvFetch
from paceline.engine.kv_source import KvLoan, KvLoans
from paceline.engine.local import LayerRunner
from paceline.machine.kv_spans import KvMove, KvPart, KvSpread, MovedBlocks, PartsFetch, n_alike
from paceline.machine.kv_tier import DiskTier, part_of
from paceline.machine.settings import PrefillRole
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.ways.kv.fetching import (
    MOST_KEYS,
    ChainedFetch,
    ComparedBlocks,
    JoinedFetch,
    KvPeer,
    PeerFetch,
    PromptPush,
    PushedParts,
    StagesTurns,
)
from paceline.ways.kv.patience import LEAST_S, Patience, by_silence
from paceline.ways.kv.price import marked, run_of

MOST_FETCHES: Final = 4
"""At once, of one engine. Raising it: more threads, which share the link."""
MOST_ROUTED_PUSHES: Final = 8
"""The same of prompts that a router has computed elsewhere."""
MOST_MOVE_S: Final = 30.0
"""For the stages of a pipeline to fetch their parts of blocks; they say how far they came once they end. Raising it: they come from slower links, and a
stage that says nothing is waited for longer."""
WINDOW_BYTES: Final = 32 << 20
"""Of blocks that are lent at a time. Raising it: more of the pool can't be handed out while a peer takes its blocks."""


class PeerKv:
    """Implements `engine.kv_source.KvSource`. Made before its node is in the fleet, and used by it from then on.

    Args:
        runner: of all layers, or of those that this machine runs.
        disk: what this machine's disk has, None: nothing; or, of a model that lies on several machines, theirs, and what else they hold.
        loans: of the engine's pool.
        wake: called, in other threads, when a fetch is over.
        whole: of a model that lies on several machines.
    """

    def __init__(
        self,
        runner: LayerRunner[Any],
        model_digest: str,
        disk: DiskTier | KvSpread | None,
        loans: KvLoans,
        wake: Callable[[], None],
        whole: KvPart | None = None,
    ) -> None:
        self._runner, self._disk, self.loans, self._wake = runner, disk, loans, wake
        self._files = disk if isinstance(disk, DiskTier) else None
        self.spread: KvSpread | None = None if disk is None or isinstance(disk, DiskTier) else disk
        """Other machines that hold layers of it; None: all are here."""
        own = runner.layers
        if whole is None:
            layer_bytes = runner.block_bytes // len(own)
            whole = part_of(model_digest, runner.numerics_id, runner.kv_layout, runner.block_size, own, layer_bytes, len(own))
        self.whole = whole
        self.digest, self.numerics_id, self.layout = whole.digest, whole.numerics_id, whole.layout
        self.block_tokens, self.block_bytes = runner.block_size, whole.block_bytes
        self.window = max(1, min(WINDOW_BYTES // self.block_bytes, runner.n_blocks // 8))
        """Blocks that a peer is lent at a time."""
        self.most_held = runner.n_blocks // 4
        """Blocks that are held for nodes that are to come for them."""
        self.routed: dict[RequestId, tuple[KvPeer, PromptPush]] = {}
        """Prompts that a router has computed at a peer. Whoever asks for them first takes them from here."""
        self._peers: Sequence[KvPeer] = ()
        self._begin: Callable[[PeerFetch | PushedParts], None] | None = None
        self.role, self.nixl = PrefillRole.BOTH, False
        self.compute: Callable[[GenerationRequest], ChunkStream] | None = None
        """Runs a request of another node on this engine; None: none may."""
        self._found: tuple[int, int, KvPeer | None, PromptPush | None] = (0, 0, None, None)
        self._asked: RequestId | None = None
        self._n_writing = 0
        """For the `fetch` that follows `run_of`: what was found, of which request, where there is one, and beside how many answers."""
        self.prompts_per_s: Callable[[], float] = lambda: 0.0
        """Tokens of prompts a second, where the node's card does not say. From any thread."""
        self._fetches: dict[KvFetch, bool] = {}
        """And whether a router has each computed."""
        self.now: Callable[[], float] = time.perf_counter
        self._let_go: deque[BlockId] = deque()
        self._reading = threading.Lock()
        self._closed = False
        self._liars = frozenset[NodeId]()
        """Asked for nothing, though they may be shown."""
        self.on_checked: Callable[[frozenset[NodeId]], object] = lambda _: None
        """As of `KvLoans`."""
        loans.on_checked = self._checked

    def show(self, peers: Sequence[KvPeer], begin: Callable[[PeerFetch | PushedParts], None]) -> None:
        """Which peers there are now.

        Args:
            begin: asks for a fetch's blocks, in other threads; must not wait.
        """
        self._peers, self._begin = peers, begin

    def leave_out(self, node_id: NodeId) -> None:
        """Ask a peer for nothing until it is shown again."""
        self._peers = [peer for peer in self._peers if peer.node_id != node_id]

    def forgive(self, liars: frozenset[NodeId]) -> None:
        """Peers that were found to lie may be asked, where they are shown."""
        self._liars -= liars

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for others."""
        return self.compute is not None and self.role is not PrefillRole.DECODE

    @property
    def shares(self) -> bool:
        """Whether blocks can be moved now."""
        return self.spread is None or bool(self.spread.spans)

    def spans(self, own: NodeId) -> tuple[LayerSpan, ...]:
        """Where layers lie, in their order; none: all here.

        Args:
            own: this node.
        """
        if self.spread is None:
            return ()
        here = (LayerSpan(own, self._runner.layers),) if self._runner.layers else ()
        return (*here, *(LayerSpan(span.node_id, span.layers) for span in self.spread.spans))

    # -------------------------------------------------------------------------------------------------------------- for the engine

    @property
    def counts(self) -> Mapping[str, int]:
        return {} if self._disk is None else self._disk.counts

    @property
    def kept_bytes(self) -> int:
        return 0 if self._disk is None else self._disk.kept_bytes

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        self._found = here, run, peer, push = self._look(keys, request, n_writing)
        self._asked, self._n_writing = None if request is None else request.request_id, n_writing
        if push is not None:
            return run
        # Of a prefix that has a mark at so many blocks, and none at twice as many, there may be more: to ask costs nothing.
        return here if peer is None else max(here, min(2 * run - 1, here + MOST_KEYS, len(keys)))

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        here, run, peer, push = self._found
        if peer is None or self._begin is None:
            return self._on_disk(keys, blocks)
        if self.spread is None or not here:
            fetch = self._of_peer(peer, keys, blocks, here, run, push)
            return JoinedFetch(self._on_disk(keys[:here], blocks[:here]), here, fetch) if here else fetch

        def behind(n: int) -> KvFetch | None:
            if n >= run or (push is not None and not push.pays(n)):
                return None
            return self._of_peer(peer, keys, blocks, n, run, push)

        return ChainedFetch(self._on_disk(keys[:here], blocks[:here]), behind)

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        if self._disk is not None:
            return self._disk.keep(key, block, parent)
        self._let_go.append(block)
        return True

    def lacks(self, key: bytes) -> bool:
        return self._disk is not None and self._disk.lacks(key)

    def kept(self) -> Sequence[BlockId]:
        if self._disk is not None:
            return self._disk.kept()
        kept = tuple(self._let_go)
        self._let_go.clear()
        return kept

    def reset(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()
        self._fetches = {}
        self._let_go.clear()
        if self._disk is not None:
            self._disk.reset()

    def close(self) -> None:
        """End: nothing of the runner is read or written any more. Idempotent."""
        for fetch in tuple(self._fetches):
            fetch.cancel()
        with self._reading:
            self._closed = True
        if self._disk is not None:
            self._disk.close()

    # --------------------------------------------------------------------------------------------------------- for other threads

    def has(self, loan: KvLoan, key: bytes) -> bool:
        """Whether `read` is likely to find a block."""
        return key in loan.blocks or (self._files is not None and bool(self._files.run_of([key])))

    def read(self, loan: KvLoan, key: bytes, into: memoryview, part: LayerRange | None = None) -> bool:
        """Copy a block that is lent, or on the disk. Returns whether there was one.

        Args:
            part: layers of it that are here; None: all.
        """
        block = loan.blocks.get(key)
        if block is not None:
            with self._reading:
                if self._closed:
                    return False
                try:
                    self._runner.export_block(block, into, part)
                except ExecutorLost:
                    return False
            if not loan.is_void:
                return True
        if self._files is None:
            return False
        if part is None:
            return self._files.read(key, into)
        whole, size = memoryview(bytearray(self.block_bytes)), self.whole.layer_bytes
        was_there = self._files.read(key, whole)
        into[:] = whole[part.start * size : part.stop * size]
        return was_there

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _of_peer(
        self, peer: KvPeer, keys: Sequence[bytes], blocks: Sequence[BlockId], first: int, run: int, push: PromptPush | None
    ) -> KvFetch:
        """Ask a peer for blocks, from the first that is not kept here; of a model that lies on several machines, each for its layers."""
        assert self._begin is not None, "peers are shown"
        keys, blocks, expected, given = keys[first:], blocks[first:], run - first, GivenBlocks(peer.node_id, self._alike, first)
        if push is not None and push.leg is None and (self.spread is not None or peer.spans):
            return self._under_way(self._pushed_in_parts(peer, keys, blocks, expected, push, given), is_routed=False)
        own, routed = self._runner.layers, push is not None and push.leg is not None
        at_once = 1 if push is None or peer.prefill is None else peer.prefill.last_blocks
        here_s = peer.price.here_s(self._n_writing)
        parts: list[MovedBlocks] = []
        for part in replace(self.whole, layers=own).cut(peer.stops) if own else ():
            write = lambda block, data, layers=part.layers: self._runner.import_block(block, data, layers)  # noqa: E731
            patience = by_silence(self.now()) if routed else Patience(self.now(), here_s, expected, at_once)
            parts.append(fetch := PeerFetch(peer, part, keys, blocks, expected, write, self._wake, patience, push, self.now))
            if routed and self._asked is not None and self.routed.pop(self._asked, None) is None:
                fetch.cancel()  # the event loop took it meanwhile, and told that it was not asked for
            else:
                self._begin(fetch)
        if self.spread is not None:
            move = KvMove(peer.node_id, self.layout, peer.stops, expected)
            parts.append(self.spread.fetch_parts(move, keys, blocks, min(max(LEAST_S, expected * here_s), MOST_MOVE_S)))
        return self._under_way(PartsFetch(parts, given), is_routed=routed)

    def _pushed_in_parts(
        self, peer: KvPeer, keys: Sequence[bytes], blocks: Sequence[BlockId], expected: int, push: PromptPush, given: GivenBlocks
    ) -> PushedParts:
        """Have a peer compute a prompt whose blocks lie on several machines, there or here."""
        assert self._begin is not None, "peers are shown"
        assert peer.prefill is not None, "it was found"
        push, at_once = replace(push, ticket=token_bytes(TICKET_BYTES)), peer.prefill.last_blocks
        patience = partial(Patience, self.now(), peer.price.here_s(self._n_writing), expected, at_once)
        parts: list[PeerFetch] = []
        own = self._runner.layers
        for part in replace(self.whole, layers=own).cut(peer.stops) if own else ():
            write = lambda block, data, layers=part.layers: self._runner.import_block(block, data, layers)  # noqa: E731
            parts.append(PeerFetch(peer, part, keys, blocks, expected, write, self._wake, patience(), None, self.now, push.ticket))
        stages = None
        if (spread := self.spread) is not None:

            def ask(first: int, n_blocks: int, within_s: float) -> MovedBlocks:
                move = KvMove(peer.node_id, self.layout, peer.stops, n_blocks, ticket=push.ticket)
                return spread.fetch_parts(move, keys[first : first + n_blocks], blocks[first : first + n_blocks], within_s)

            stages = StagesTurns(ask, len(keys), at_once, patience(), MOST_MOVE_S, self.now)
        self._begin(fetch := PushedParts(peer, keys, push, parts, stages, given, self._wake))
        return fetch

    def _under_way(self, fetch: PartsFetch, *, is_routed: bool) -> PartsFetch:
        """One more, among those that are not over."""
        self._fetches = {one: routed for one, routed in self._fetches.items() if not one.is_over} | {fetch: is_routed}
        return fetch

    def _alike(self, blocks: Sequence[BlockId]) -> KvFetch:
        """See `GivenBlocks`."""
        parts: list[MovedBlocks] = [ComparedBlocks(n_alike(self._runner, blocks))] if self._runner.layers else []
        if self.spread is not None:
            parts.append(self.spread.compare_parts(blocks))
        return PartsFetch(parts)

    def _checked(self, liars: frozenset[NodeId]) -> None:
        self._liars |= liars
        self.on_checked(liars)

    def _on_disk(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        assert self._disk is not None, "nothing else has blocks"
        return self._disk.fetch(keys, blocks)

    def _look(
        self, keys: Sequence[bytes], request: GenerationRequest | None, n_writing: int
    ) -> tuple[int, int, KvPeer | None, PromptPush | None]:
        """Blocks of a chain that the disk has; those that the best peer may have, or is to compute; that peer, if more come from it and that pays."""
        kept = here = 0 if self._disk is None else self._disk.run_of(keys)
        if self.spread is not None:
            here = 0  # what all machines' disks have is known once they were asked
        best: tuple[float, int, KvPeer, PromptPush | None] | None = None
        under_way = [routed for fetch, routed in self._fetches.items() if not fetch.is_over]
        lacks = here < len(keys) <= here + MOST_KEYS
        if lacks and request is not None and sum(under_way) < MOST_ROUTED_PUSHES:
            routed = self.routed.get(request.request_id)
            if routed is not None and routed[0].node_id not in self._liars:
                return here, len(keys), *routed
        if request is not None and (request.caller or request.cache_salt or request.scores_prompt):
            request = None  # who computes a prompt sees it
        if self._peers and self.shares and under_way.count(False) < MOST_FETCHES:
            peers = [peer for peer in self._peers if peer.node_id not in self._liars]
            found = marked(frozenset[bytes]().union(*(peer.marks for peer in peers)), keys)
            pushable = self.spread is None or self.spread.takes_prompts
            whole = 0 if request is None else (len(request.prompt_ids) - 1) // self.block_tokens
            for peer in peers:
                run = run_of(peer.marks, found)
                saved_s = peer.price.saved_s(run - here, n_writing)
                if saved_s > 0 and (best is None or saved_s > best[0]):
                    best = saved_s, run, peer, None
                if request is None or not pushable or peer.prefill is None or not here < len(keys) <= min(whole, here + MOST_KEYS):
                    continue
                known = whole - len(keys) + run if run else 0
                saved = partial(peer.prefill.saved_s, whole - known, n_writing=n_writing)
                saved_s = saved(len(keys) - here)
                if saved_s > 0 and (best is None or saved_s > best[0]):
                    ids, pays = request.prompt_ids[: whole * self.block_tokens], partial(_pays, saved, len(keys))
                    push = PromptPush(request.request_id, ids, pays=pays)
                    best = saved_s, len(keys), peer, push
        if best is None:
            return kept, kept, None, None
        _, run, peer, push = best
        return kept, run, peer, push


def _pays(saved_s: Callable[[int], float], n_keys: int, n_here: int) -> bool:
    return saved_s(n_keys - n_here) > 0
