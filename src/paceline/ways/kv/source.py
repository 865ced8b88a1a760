"""The KV of one engine and that of its peers: blocks that a peer has are fetched into the pool before a sequence begins, beside those on this machine's
disk; and blocks that are here are read for peers.

Law: what is slow, lost or wrong is a miss, and the block is computed. A block is written only while its fetch is not over, and read for others only
while it is lent, so neither outlives the engine.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceline.core.errors import ExecutorLost, NixlFailed, StreamCorrupt, StreamStalled, TensorStreamError
from paceline.core.generation import GenerationRequest, KvLeg
from paceline.core.ids import BlockId, NodeId, RequestId
from paceline.core.inference import ChunkStream
from paceline.engine.kv_source import KvFetch, KvLoan, KvLoans
from paceline.engine.local import LayerRunner
from paceline.machine.kv_tier import DiskTier, kv_name
from paceline.machine.settings import PrefillRole
from paceline.net.tensor.ends import TensorReceiver
from paceline.net.tensor.incoming import TensorMessage
from paceline.net.tensor.listener import ExpectedStream
from paceline.ways.kv.price import KvPrice, PrefillPrice, marked, run_of
from paceline.ways.kv.staged import SEND_S, BlockSender, NixlOffered, StagedReceiver

KEY_BYTES: Final = 16
MOST_KEYS: Final = 4096
"""Of one fetch. Raising it: a longer prefix comes at once, and a request for it takes more room."""
MOST_FETCHES: Final = 4
"""At once, of one engine. Raising it: more threads, which share the link."""
MOST_ROUTED_PUSHES: Final = 8
"""The same of prompts that a router has computed elsewhere."""
LEAST_S: Final = 0.5
MOST_S: Final = 30.0
"""A fetch may take as long as computing its blocks does, and no less or more than this. Raising them: a peer that stalls is waited for longer."""
PUSH_PATIENCE: Final = 1.5
"""By what factor a prompt that a peer computes may take longer than here: its blocks come all the while, and what came stands. Raising it: a peer that
became slow is waited for longer."""
MOST_PUSH_S: Final = 45.0
"""The same of a prompt that a peer computes: less than a sequence may wait for KV. Raising it: longer prompts come whole."""
SILENCE_S: Final = 5.0
"""Between two blocks."""
WINDOW_BYTES: Final = 32 << 20
"""Of blocks that are lent at a time. Raising it: more of the pool can't be handed out while a peer takes its blocks."""
_HEADER: Final = struct.Struct("<16sI")


@dataclass(frozen=True, slots=True)
class KvPeer:
    """A node that has KV of this engine's model, as it told, and as it was priced."""

    node_id: NodeId
    instance: bytes
    """Of its process, as its card names it."""
    addresses: tuple[str, ...]
    marks: frozenset[bytes]
    price: KvPrice
    prefill: PrefillPrice | None = None
    """None: it computes no prompts for this node."""


@dataclass(frozen=True, slots=True)
class PromptPush:
    """A prompt that a peer is to compute."""

    request_id: str
    """Names one sequence of a client's request."""
    prompt_ids: tuple[int, ...] = ()
    """Of whole blocks. None, where the peer has them from a router."""
    leg: KvLeg | None = None
    """A router has it computed, by a request of its own."""
    ended: Callable[[str, int], object] = lambda *_: None
    """Told how it ended, and how many blocks came."""


class PeerFetch:
    """Implements `engine.kv_source.KvFetch`: blocks that come in order.

    Args:
        expected: blocks that the peer is likely to have, of those that are asked for.
        write: fills a block of the pool.
        wake: called, in any thread, once it is over.
        push: what the peer is to compute; None: it has the blocks.
    """

    def __init__(
        self,
        peer: KvPeer,
        keys: Sequence[bytes],
        blocks: Sequence[BlockId],
        expected: int,
        write: Callable[[BlockId, memoryview], None],
        wake: Callable[[], None],
        push: PromptPush | None = None,
    ) -> None:
        self.peer, self.keys, self.expected, self.push = peer, keys, expected, push
        self.hang_up: Callable[[], object] = lambda: None
        """Called once it is over, in any thread; must not wait."""
        here_s = max(LEAST_S, expected * peer.price.computed_s)
        self.most_s = (
            min(here_s, MOST_S) if push is None else MOST_PUSH_S if push.leg is not None else min(PUSH_PATIENCE * here_s, MOST_PUSH_S)
        )
        self._blocks, self._write, self._wake = blocks, write, wake
        self._lock = threading.Lock()
        self.filled = 0
        self.is_over = self.is_late = False

    def expire(self) -> None:
        """It took too long. Any thread."""
        self.is_late = True
        self.cancel()

    def cancel(self) -> None:
        """End it now: no block is written any more. Any thread; idempotent."""
        with self._lock:
            over, self.is_over = self.is_over, True
        if not over:
            self.hang_up()
            self._wake()

    def fill(self, data: memoryview) -> bool:
        """The next block came. Returns whether more is wanted: not where the pool is lost."""
        with self._lock:
            if self.is_over:
                return False
            try:
                self._write(self._blocks[self.filled], data)
                self.filled += 1
                ends = self.filled == len(self.keys)
            except ExecutorLost:
                ends = True
        if ends:
            self.cancel()
        return not self.is_over


class _Joined:
    """A fetch whose first blocks are on the disk, and the others at a peer."""

    def __init__(self, disk: KvFetch, n_disk: int, peer: PeerFetch) -> None:
        self._disk, self._n_disk, self._peer = disk, n_disk, peer

    @property
    def filled(self) -> int:
        first = self._disk.filled
        return first + self._peer.filled if first == self._n_disk else first

    @property
    def is_over(self) -> bool:
        if self._disk.is_over and self._disk.filled < self._n_disk:
            self._peer.cancel()  # what follows a gap is of no use
        return self._disk.is_over and self._peer.is_over

    def cancel(self) -> None:
        self._disk.cancel()
        self._peer.cancel()


class PeerKv:
    """Implements `engine.kv_source.KvSource`. Made before its node is in the fleet, and used by it from then on.

    Args:
        disk: what this machine's disk has; None: nothing.
        loans: of the engine's pool.
        wake: called, in other threads, when a fetch is over.
    """

    def __init__(
        self, runner: LayerRunner[Any], model_digest: str, disk: DiskTier | None, loans: KvLoans, wake: Callable[[], None]
    ) -> None:
        self._runner, self._disk, self.loans, self._wake = runner, disk, loans, wake
        self.digest, self.numerics_id = model_digest, runner.numerics_id
        self.block_tokens, self.block_bytes = runner.block_size, runner.block_bytes
        self.layout = bytes.fromhex(kv_name(runner, model_digest))
        self.window = max(1, min(WINDOW_BYTES // self.block_bytes, runner.n_blocks // 8))
        """Blocks that a peer is lent at a time."""
        self.most_held = runner.n_blocks // 4
        """Blocks that are held for nodes that are to come for them."""
        self.routed: dict[RequestId, tuple[KvPeer, PromptPush]] = {}
        """Prompts that a router has computed at a peer. Whoever asks for them first takes them from here."""
        self._peers: Sequence[KvPeer] = ()
        self._begin: Callable[[PeerFetch], None] | None = None
        self.role, self.nixl = PrefillRole.BOTH, False
        self.compute: Callable[[GenerationRequest], ChunkStream] | None = None
        """Runs a request of another node on this engine; None: none may."""
        self._found: tuple[int, int, KvPeer | None, PromptPush | None] = (0, 0, None, None)
        self._asked: RequestId | None = None
        """For the `fetch` that follows `run_of`: what was found, and of which request, where there is one."""
        self._fetches: set[PeerFetch] = set()
        self._let_go: deque[BlockId] = deque()
        self._reading = threading.Lock()
        self._closed = False

    def show(self, peers: Sequence[KvPeer], begin: Callable[[PeerFetch], None]) -> None:
        """Which peers there are now.

        Args:
            begin: asks for a fetch's blocks, in other threads; must not wait.
        """
        self._peers, self._begin = peers, begin

    def leave_out(self, node_id: NodeId) -> None:
        """Ask a peer for nothing until it is shown again."""
        self._peers = [peer for peer in self._peers if peer.node_id != node_id]

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for others."""
        return self.compute is not None and self.role is not PrefillRole.DECODE

    # -------------------------------------------------------------------------------------------------------------- for the engine

    @property
    def counts(self) -> Mapping[str, int]:
        return {} if self._disk is None else self._disk.counts

    @property
    def kept_bytes(self) -> int:
        return 0 if self._disk is None else self._disk.kept_bytes

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        self._found = here, run, peer, push = self._look(keys, request, n_writing)
        self._asked = None if request is None else request.request_id
        if push is not None:
            return run
        # Of a prefix that has a mark at so many blocks, and none at twice as many, there may be more: to ask costs nothing.
        return here if peer is None else min(2 * run - 1, here + MOST_KEYS, len(keys))

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        here, run, peer, push = self._found
        if peer is None or self._begin is None:
            return self._on_disk(keys, blocks)
        fetch = PeerFetch(peer, keys[here:], blocks[here:], run - here, self._runner.import_block, self._wake, push)
        self._fetches = {one for one in self._fetches if not one.is_over} | {fetch}
        if push is not None and push.leg is not None and self._asked is not None and self.routed.pop(self._asked, None) is None:
            fetch.cancel()  # the event loop took it meanwhile, and told that it was not asked for
        else:
            self._begin(fetch)
        return _Joined(self._on_disk(keys[:here], blocks[:here]), here, fetch) if here else fetch

    def keep(self, key: bytes, block: BlockId) -> bool:
        if self._disk is not None:
            return self._disk.keep(key, block)
        self._let_go.append(block)
        return True

    def kept(self) -> Sequence[BlockId]:
        if self._disk is not None:
            return self._disk.kept()
        kept = tuple(self._let_go)
        self._let_go.clear()
        return kept

    def reset(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()
        self._fetches = set()
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
        return key in loan.blocks or (self._disk is not None and bool(self._disk.run_of([key])))

    def read(self, loan: KvLoan, key: bytes, into: memoryview) -> bool:
        """Copy a block that is lent, or on the disk. Returns whether there was one."""
        block = loan.blocks.get(key)
        if block is not None:
            with self._reading:
                if self._closed:
                    return False
                try:
                    self._runner.export_block(block, into)
                except ExecutorLost:
                    return False
            if not loan.is_void:
                return True
        return self._disk is not None and self._disk.read(key, into)

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _on_disk(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        assert self._disk is not None, "nothing else has blocks"
        return self._disk.fetch(keys, blocks)

    def _look(
        self, keys: Sequence[bytes], request: GenerationRequest | None, n_writing: int
    ) -> tuple[int, int, KvPeer | None, PromptPush | None]:
        """Blocks of a chain that the disk has; those that the best peer may have, or is to compute; that peer, if more come from it and that pays."""
        here = 0 if self._disk is None else self._disk.run_of(keys)
        best: tuple[float, int, KvPeer, PromptPush | None] | None = None
        under_way = [fetch.push is not None and fetch.push.leg is not None for fetch in self._fetches if not fetch.is_over]
        lacks = here < len(keys) <= here + MOST_KEYS
        if lacks and request is not None and sum(under_way) < MOST_ROUTED_PUSHES:
            routed = self.routed.get(request.request_id)
            if routed is not None:
                return here, len(keys), *routed
        if request is not None and (request.caller or request.cache_salt or request.scores_prompt):
            request = None  # who computes a prompt sees it
        if self._peers and under_way.count(False) < MOST_FETCHES:
            peers = self._peers
            found = marked(frozenset[bytes]().union(*(peer.marks for peer in peers)), keys)
            whole = 0 if request is None else (len(request.prompt_ids) - 1) // self.block_tokens
            for peer in peers:
                run = run_of(peer.marks, found)
                saved_s = peer.price.saved_s(run - here, n_writing)
                if saved_s > 0 and (best is None or saved_s > best[0]):
                    best = saved_s, run, peer, None
                if request is None or peer.prefill is None or not here < len(keys) <= min(whole, here + MOST_KEYS):
                    continue
                known = whole - len(keys) + run if run else 0
                saved_s = peer.prefill.saved_s(whole - known, len(keys) - here, n_writing)
                if saved_s > 0 and (best is None or saved_s > best[0]):
                    push = PromptPush(request.request_id, request.prompt_ids[: whole * self.block_tokens])
                    best = saved_s, len(keys), peer, push
        if best is None:
            return here, here, None, None
        _, run, peer, push = best
        return here, run, peer, push


def send_block(sender: BlockSender, key: bytes, data: memoryview) -> None:
    """Send the block that is in the sender's space. Raises as `TensorSender.send` does, where nothing is taken for `SEND_S`."""
    sender.send(_HEADER.pack(key, zlib.crc32(data)), np.frombuffer(data, np.uint16), time.perf_counter() + SEND_S)


def receive_blocks(receiver: TensorReceiver | StagedReceiver, fetch: PeerFetch, block_bytes: int) -> None:
    """Fill those of a fetch's blocks that lack with what comes, until it is over. Blocks. What is computed first may take its time.

    Raises:
        StreamCorrupt: what came is another block than the next one that was asked for, or damaged. The peer is told.
        TensorStreamError: the stream broke, or nothing came.
    """
    silence_s = SILENCE_S if fetch.push is None else fetch.most_s
    with ThreadPoolExecutor(1, "paceline-kv-check") as checker:
        checked: Future[bool] | None = None
        for key in fetch.keys[fetch.filled :]:
            try:
                message = receiver.receive(time.perf_counter() + silence_s)
            except TensorStreamError:
                if checked is not None:
                    checked.result()  # a block that was wrong ended the stream
                raise
            if checked is not None and not checked.result():
                return
            receiver.swap()
            checked = checker.submit(_take, receiver, fetch, key, message, block_bytes)
        if checked is not None:
            checked.result()


def _take(receiver: TensorReceiver | StagedReceiver, fetch: PeerFetch, key: bytes, message: TensorMessage, block_bytes: int) -> bool:
    """In a thread of its own, while the next block comes."""
    data = message.array.data.cast("B") if message.array.nbytes else memoryview(b"")
    if len(data) != block_bytes or message.header != _HEADER.pack(key, zlib.crc32(data)):
        raise receiver.refuse(StreamCorrupt(f"{receiver.peer} sent another block of KV than the one asked for, or a damaged one"))
    return fetch.fill(data)


class Receiving:
    """A stream of blocks that is waited for, then read. Closing it ends either.

    Args:
        offered: what the sender may do in place of sending blocks through the stream.
    """

    def __init__(self, expected: ExpectedStream, offered: NixlOffered | None = None) -> None:
        self._expected, self.ticket, self.offered = expected, expected.ticket, offered
        self._receiver: TensorReceiver | None = None
        self.transport = "stream"
        self.nixl_failed = False

    def run(self, fetch: PeerFetch, block_bytes: int) -> None:
        """In a thread of its own. Raises as `receive_blocks` does."""
        self._receiver = self._expected.wait(time.perf_counter() + fetch.most_s)
        if self._receiver.peer != fetch.peer.node_id:
            raise StreamCorrupt(f"{self._receiver.peer} sends KV that {fetch.peer.node_id} was asked for")
        if fetch.is_over:
            return
        if self.offered is None:
            receive_blocks(self._receiver, fetch, block_bytes)
            return
        staged = StagedReceiver(self._receiver, self.ticket, self.offered, block_bytes)
        try:
            receive_blocks(staged, fetch, block_bytes)
        except (NixlFailed, StreamStalled) as error:
            self.nixl_failed = isinstance(error, NixlFailed) or staged.transport == "nixl"
            raise
        finally:
            self.transport = staged.transport
            staged.close()

    def close(self) -> None:
        self._expected.cancel()
        if self._receiver is not None:
            self._receiver.close()
