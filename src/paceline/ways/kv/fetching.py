"""Blocks that come from a peer: what is wanted of it, and the stream that they come through.

Law: what is slow, lost or wrong is a miss, and the block is computed. A block is written only while its fetch is not over.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.core.errors import ExecutorLost, NixlFailed, StreamClosed, StreamCorrupt, StreamIdle, StreamStalled
from paceline.core.generation import KvLeg
from paceline.core.ids import BlockId, NodeId
from paceline.core.model import LayerSpan
from paceline.engine.kv_fetch import GivenBlocks, KvFetch
from paceline.machine.kv_spans import KvPart, MovedBlocks, PartsFetch
from paceline.net.tensor.ends import TensorReceiver
from paceline.net.tensor.incoming import TensorMessage
from paceline.net.tensor.listener import ExpectedStream
from paceline.net.wire import kv_pb2 as wire
from paceline.store.kv_folder import crc32
from paceline.ways.kv.patience import Patience
from paceline.ways.kv.price import KvPrice, PrefillPrice
from paceline.ways.kv.staged import SEND_S, BlockSender, NixlOffered, StagedReceiver

KEY_BYTES: Final = 16
MOST_KEYS: Final = 4096
"""Of one fetch. Raising it: a longer prefix comes at once, and a request for it takes more room."""
SILENCE_S: Final = 5.0
"""Between two blocks that are computed already."""
OPEN_S: Final = 30.0
"""For a peer to say what it has, and to open a stream: it may look between two steps alone. Whoever waits, waits no longer than its patience."""
LEAST_TURN_S: Final = 0.05
"""Of a turn that stages are asked for. Raising it: the last blocks of one that is late are computed here."""
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
    spans: tuple[LayerSpan, ...] = ()
    """Where its layers lie; none: with it."""

    @property
    def stops(self) -> list[int]:
        """Layers at which they end."""
        return [span.layers.stop for span in self.spans]


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
    ticket: bytes = b""
    """By which its parts are asked for, where several machines hold layers; empty: it comes through a stream of its own."""
    pays: Callable[[int], bool] = lambda _: True
    """Whether it is worth it, where so many of the blocks turn out to be here."""


class PeerFetch:
    """Implements `machine.kv_spans.MovedBlocks`: blocks that come in order.

    Args:
        part: that is wanted of each.
        expected: blocks that the peer is likely to have, of those that are asked for.
        write: fills that part of a block of the pool.
        wake: called, in any thread, once it is over.
        patience: how long it is waited for.
        push: what the peer is to compute; None: it has the blocks.
        now: the clock that patience goes by.
        prefill: ticket of the prompt that they are of, where it is still being computed.
    """

    def __init__(
        self,
        peer: KvPeer,
        part: KvPart,
        keys: Sequence[bytes],
        blocks: Sequence[BlockId],
        expected: int,
        write: Callable[[BlockId, memoryview], None],
        wake: Callable[[], None],
        patience: Patience,
        push: PromptPush | None = None,
        now: Callable[[], float] = time.perf_counter,
        prefill: bytes = b"",
    ) -> None:
        self.peer, self.part, self.keys, self.expected, self.push, self.prefill = peer, part, keys, expected, push, prefill
        self.given = None
        self.hang_up: Callable[[], object] = lambda: None
        """Called once it is over, in any thread; must not wait."""
        self.patience, self.now = patience, now
        self._blocks, self._write, self._wake = blocks, write, wake
        self._lock = threading.Lock()
        self.filled = 0
        self.is_over = self.is_late = self.is_wrong = False

    def look(self) -> float:
        """End it if its peer is not to be waited for any more. Any thread. Returns for how long it is, if no block comes."""
        left_s = self.patience.until - self.now()
        if left_s <= 0 and not self.is_over:
            self.is_late = True
            self.cancel()
        return left_s

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
                self.patience.came(self.now())
                ends = self.filled == len(self.keys)
            except ExecutorLost:
                ends = True
        if ends:
            self.cancel()
        return not self.is_over


class JoinedFetch:
    """A fetch whose first blocks are on the disk, and the others at a peer."""

    def __init__(self, disk: KvFetch, n_disk: int, peer: KvFetch) -> None:
        self._disk, self._n_disk, self._peer = disk, n_disk, peer

    @property
    def given(self) -> GivenBlocks | None:
        return self._peer.given

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


class StagesTurns:
    """Implements `machine.kv_spans.MovedBlocks`: stages fetch what is computed elsewhere in turns, of as many blocks as come together: what they do can't be
    ended in the middle of one. Begun by `PushedParts`.

    Args:
        ask: has them fetch so many blocks, from a place on, within so many seconds.
        most_s: of one turn.
    """

    given = None

    def __init__(
        self,
        ask: Callable[[int, int, float], MovedBlocks],
        n_blocks: int,
        at_once: int,
        patience: Patience,
        most_s: float,
        now: Callable[[], float],
    ) -> None:
        self._ask, self._n_blocks, self._at_once = ask, n_blocks, at_once
        self._patience, self._most_s, self._now = patience, most_s, now
        self._turn: MovedBlocks | None = None
        self._asked = self.filled = 0
        self.is_begun = self.is_late = self.is_wrong = self._is_cancelled = self._is_over = False

    @property
    def is_over(self) -> bool:
        self._is_over = self._is_over or self._go_on()
        return self._is_over

    def cancel(self) -> None:
        self._is_cancelled = True

    def _go_on(self) -> bool:
        """Take what came, and begin the next turn. Returns whether there is none."""
        while self._turn is None or self._turn.is_over:
            if self._turn is not None:
                came, self.is_wrong, self._turn = self._turn.filled, self._turn.is_wrong, None
                self.filled += came
                for _ in range(came):
                    self._patience.came(self._now())
                if came < self._asked:
                    self.is_late = self._now() >= self._patience.until
                    return True
            if self._is_cancelled or self.filled == self._n_blocks:
                return True
            left_s = self._patience.until - self._now()
            if left_s < LEAST_TURN_S:
                self.is_late = True
                return True
            if not self.is_begun:
                return False
            self._asked = min(self._at_once, self._n_blocks - self.filled)
            self._turn = self._ask(self.filled, self._asked, min(left_s, self._most_s))
        return False


class PushedParts(PartsFetch):
    """Implements `engine.kv_source.KvFetch`: blocks of a prompt that a peer computes, of a model whose layers lie on several machines, here or there. Each
    part is fetched by who is to hold it, once the peer has taken the registration.

    Args:
        own: parts of layers that are here.
        stages: of those that are not; None: all are here.
        wake: as of `PeerFetch`.
    """

    def __init__(
        self,
        peer: KvPeer,
        keys: Sequence[bytes],
        push: PromptPush,
        own: Sequence[PeerFetch],
        stages: StagesTurns | None,
        given: GivenBlocks,
        wake: Callable[[], None],
    ) -> None:
        super().__init__([*own, *(() if stages is None else (stages,))], given)
        self.peer, self.keys, self.push, self.own, self._stages, self._wake = peer, keys, push, own, stages, wake
        self.hang_up: Callable[[], object] = lambda: None
        """Called once it is over, or to be; in any thread, more than once; must not wait."""
        self.is_left = False
        """It was not wanted any more before its parts were over."""

    @property
    def is_over(self) -> bool:
        over = super().is_over
        if over:
            self.hang_up()
        return over

    @property
    def is_late(self) -> bool:
        return any(fetch.is_late for fetch in self.own) or (self._stages is not None and self._stages.is_late)

    def begin(self, begin: Callable[[PeerFetch], None]) -> None:
        """The peer has taken the registration."""
        for fetch in self.own:
            begin(fetch)
        if self._stages is not None:
            self._stages.is_begun = True
            self._wake()

    def cancel(self) -> None:
        self.is_left = True
        super().cancel()
        self.hang_up()
        self._wake()


class ChainedFetch:
    """A fetch of blocks that several machines' disks may have, and behind those that they do, from a peer."""

    def __init__(self, disks: KvFetch, peer: Callable[[int], KvFetch | None]) -> None:
        self._disks, self._begin = disks, peer
        self._peer: KvFetch | None = None
        self._is_decided = False

    @property
    def given(self) -> GivenBlocks | None:
        return None if self._peer is None else self._peer.given

    @property
    def filled(self) -> int:
        return self._disks.filled + (0 if self._peer is None else self._peer.filled)

    @property
    def is_over(self) -> bool:
        if not self._disks.is_over:
            return False
        if not self._is_decided:
            self._is_decided, self._peer = True, self._begin(self._disks.filled)
        return self._peer is None or self._peer.is_over

    def cancel(self) -> None:
        self._is_decided = True
        for fetch in (self._disks, self._peer):
            if fetch is not None:
                fetch.cancel()


class ComparedBlocks:
    """Implements `machine.kv_spans.MovedBlocks`: so many blocks, from the first on, hold what the first one holds."""

    given, is_over, is_wrong = None, True, False

    def __init__(self, n_alike: int) -> None:
        self.filled = n_alike

    def cancel(self) -> None:
        """It is over."""


@contextmanager
def watched(fetch: PeerFetch, loop: asyncio.AbstractEventLoop) -> Generator[None]:
    """The watchdog: end a fetch once its peer is not to be waited for any more."""

    def look() -> None:
        nonlocal timer
        if (left_s := fetch.look()) > 0:
            timer = loop.call_later(left_s, look)

    timer = loop.call_soon(look)
    try:
        yield
    finally:
        timer.cancel()


def send_block(sender: BlockSender, key: bytes, data: memoryview) -> None:
    """Send the block that is in the sender's space. Raises as `TensorSender.send` does, where nothing is taken for `SEND_S`."""
    sender.send(_HEADER.pack(key, crc32(data)), np.frombuffer(data, np.uint16), time.perf_counter() + SEND_S)


def receive_blocks(receiver: TensorReceiver | StagedReceiver, fetch: PeerFetch, most: int | None = None) -> None:
    """Fill those of a fetch's blocks that lack with what comes, until it is over. Blocks. What is computed first may take its time.

    Args:
        most: blocks that come; None: all that lack.

    Raises:
        StreamCorrupt: what came is another block than the next one that was asked for, or damaged. The peer is told.
        TensorStreamError: the stream broke, or nothing came.
    """
    for key in fetch.keys[fetch.filled :][:most]:
        if not _take(receiver, fetch, key, _next(receiver, fetch)):
            return


def _next(receiver: TensorReceiver | StagedReceiver, fetch: PeerFetch) -> TensorMessage:
    """What comes next. Between two blocks that are computed meanwhile, silence is the watchdog's to judge."""
    while True:
        try:
            return receiver.receive(time.perf_counter() + SILENCE_S)
        except StreamIdle:
            if fetch.push is None or fetch.is_over:
                raise


def _take(receiver: TensorReceiver | StagedReceiver, fetch: PeerFetch, key: bytes, message: TensorMessage) -> bool:
    """Check what came and write it. Returns whether more is wanted."""
    data = message.array.data.cast("B") if message.array.nbytes else memoryview(b"")
    if len(data) != fetch.part.block_bytes or message.header != _HEADER.pack(key, crc32(data)):
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

    def run(self, fetch: PeerFetch, sender: str = "", most: int | None = None) -> None:
        """In a thread of its own. Raises as `receive_blocks` does.

        Args:
            sender: who sends them for the peer; empty: the peer.
            most: as of `receive_blocks`.
        """
        self._receiver = self._expected.wait(time.perf_counter() + OPEN_S)
        if self._receiver.peer != (sender or fetch.peer.node_id):
            if self._receiver.peer == fetch.peer.node_id:
                raise StreamClosed(f"{sender} can't send KV for {fetch.peer.node_id}")
            raise StreamCorrupt(f"{self._receiver.peer} sends KV that {fetch.peer.node_id} was asked for")
        if fetch.is_over:
            return
        if self.offered is None:
            receive_blocks(self._receiver, fetch, most)
            return
        staged = StagedReceiver(self._receiver, self.ticket, self.offered, fetch.part.block_bytes)
        try:
            receive_blocks(staged, fetch, most)
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


def fetch_request(fetch: PeerFetch, port: int, receiving: Receiving) -> wire.FetchBlocksRequest:
    """Asks for those of a fetch's blocks that lack."""
    part, offered = fetch.part, receiving.offered
    return wire.FetchBlocksRequest(
        digest=part.digest,
        numerics_id=part.numerics_id,
        layout=part.layout,
        first_layer=part.layers.start,
        stop_layer=part.layers.stop,
        keys=b"".join(fetch.keys[fetch.filled :]),
        tensor_port=port,
        ticket=receiving.ticket,
        nixl=None if offered is None else offered.message,
        prefill=fetch.prefill,
    )
