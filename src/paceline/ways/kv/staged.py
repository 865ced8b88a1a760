"""How blocks of KV cross over: through a TLS stream, or, where both nodes are one user's on one host and have NIXL, out of memory that the giver stages.

Law: the stream is there in either case, and says which block comes next and what its checksum is; only its bytes take another way. A slot that is staged
is filled again once its block was read, and belongs to one transfer: who reads late finds nothing, and writes nowhere. What was read is a copy, checked
as the stream's is before it becomes a block. Who reads may stop and go, and loses what it did not take.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final, Protocol

import numpy as np

from paceline.core.backoff import LeftOut
from paceline.core.errors import NixlFailed, StreamClosed, StreamCorrupt, StreamStalled, TensorStreamError
from paceline.core.ids import NodeId
from paceline.net.nixl import PAUSE_S, PROOF_BYTES, TOKEN_BYTES, HostDoor, NixlAgent, NixlReading, is_installed, knock
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.incoming import Array, TensorMessage
from paceline.net.wire import kv_pb2 as wire

logger = logging.getLogger(__name__)

SEND_S: Final = 5.0
"""For as long as a peer takes nothing."""
STAGED_BYTES: Final = 8 << 20
MOST_SLOTS: Final = 8
"""Of one transfer, and two at least. Raising them: more is read at a time, out of slower caches."""
REST_S: Final = 600.0
"""For which NIXL is not used with a node with which it failed."""
MOST_DESCRIBED: Final = 64 << 10
LOOK_S: Final = 0.01
"""Between two looks whether the reader is still there."""
_OPENS: Final = struct.Struct(f"<4s{PROOF_BYTES}s{TOKEN_BYTES}sQI")
"""What says that blocks are staged: a mark, the proof of the caller's door, a token, and the memory's address and slots. How to open it follows."""
_MARK: Final = b"NIXL"
_EMPTY: Final = np.empty(0, np.uint16)


class BlockSender(Protocol):
    """Sends blocks, each of which is written into `space` first. For one thread; `close` is for any."""

    transport: str

    def space(self) -> memoryview:
        """Where the next block belongs, once there is room. Raises as `send` does."""
        ...

    def send(self, header: bytes, array: Array, deadline: float) -> None:
        """The block that is in `space`. Raises as `TensorSender.send` does."""
        ...

    def finish(self) -> None:
        """Wait until all was taken, or is not wanted. Raises as `send` does."""
        ...

    def close(self) -> None: ...


class StreamedBlocks:
    """Blocks that go through the stream."""

    transport = "stream"

    def __init__(self, sender: TensorSender, block_bytes: int) -> None:
        self._sender, self._space = sender, memoryview(bytearray(block_bytes))

    def space(self) -> memoryview:
        return self._space

    def send(self, header: bytes, array: Array, deadline: float) -> None:
        self._sender.send(header, array, deadline)

    def finish(self) -> None:
        """The system has it."""

    def close(self) -> None:
        self._sender.close()


class StagedBlocks:
    """Blocks that are read out of this process's memory. Raises NixlFailed where none can be, TensorStreamError where the stream broke."""

    transport = "nixl"

    def __init__(self, sender: TensorSender, agent: NixlAgent, proof: bytes, block_bytes: int) -> None:
        self._sender, self._agent = sender, agent
        self._n_slots, self._sent = max(2, min(MOST_SLOTS, STAGED_BYTES // block_bytes)), 0
        self._staging, self._token = agent.stage(self._n_slots, block_bytes), secrets.token_bytes(TOKEN_BYTES)
        try:
            opens = _OPENS.pack(_MARK, proof, self._token, self._staging.address, self._n_slots) + self._staging.describe()
            agent.listen(self._token)
            sender.send(opens, _EMPTY, time.perf_counter() + SEND_S)
        except BaseException:
            self._let_go()
            raise

    def space(self) -> memoryview:
        self._wait(self._sent - self._n_slots + 1)
        return self._staging.slot(self._sent % self._n_slots)

    def send(self, header: bytes, array: Array, deadline: float) -> None:
        del array  # it is in its slot
        self._sender.send(header, _EMPTY, deadline)
        self._sent += 1

    def finish(self) -> None:
        with suppress(StreamClosed):  # who asked has what it wants
            self._wait(self._sent)

    def close(self) -> None:
        self._sender.close()
        self._let_go()

    def _let_go(self) -> None:
        self._staging.close()
        self._agent.forget(self._token)

    def _wait(self, n_read: int) -> None:
        """Until so many were read."""
        last, until, look_at = 0, time.perf_counter() + SEND_S, time.perf_counter() + LOOK_S
        while (read := self._agent.n_read(self._token)) < n_read:
            now = time.perf_counter()
            if read > last:
                last, until = read, now + SEND_S
            if now >= until:
                stalled = StreamStalled("a node reads none of the KV that is staged for it")
                self._sender.fail(stalled)  # it may have read, and not be heard: it is told
                raise stalled
            if now >= look_at:
                self._sender.check()
                look_at = now + LOOK_S
            time.sleep(PAUSE_S)


def offer_of(request: wire.FetchBlocksRequest | wire.PrefillRequest) -> wire.NixlOffer | None:
    return request.nixl if request.HasField("nixl") else None


def block_sender(
    sender: TensorSender, own: NodeId, ticket: bytes, offer: wire.NixlOffer | None, agent: NixlAgent | None, block_bytes: int
) -> BlockSender:
    """How blocks go to a node that offers this. Blocks. Raises TensorStreamError where the stream breaks.

    Args:
        own: this node.
        ticket: of the stream.
    """
    if offer is not None and agent is not None and offer.version == agent.version:
        try:
            if (proof := knock(offer.door, own, ticket)) is not None:
                return StagedBlocks(sender, agent, proof, block_bytes)
        except NixlFailed as error:
            logger.warning("KV goes over TLS: %s", error)
    return StreamedBlocks(sender, block_bytes)


@dataclass(frozen=True, slots=True)
class NixlOffered:
    """What a node said when it asked for blocks."""

    agent: NixlAgent
    """That reads."""
    door: HostDoor

    @property
    def message(self) -> wire.NixlOffer:
        return wire.NixlOffer(version=self.agent.version, door=self.door.name)


class StagedReceiver:
    """Receives blocks as `TensorReceiver` does, from whichever memory they come."""

    def __init__(self, receiver: TensorReceiver, ticket: bytes, offered: NixlOffered, block_bytes: int) -> None:
        self._receiver, self._ticket, self._offered, self._block_bytes = receiver, ticket, offered, block_bytes
        self._reading: NixlReading | None = None
        self._n_slots = self._taken = 0

    @property
    def peer(self) -> NodeId:
        return self._receiver.peer

    @property
    def transport(self) -> str:
        return "stream" if self._reading is None else "nixl"

    def receive(self, deadline: float) -> TensorMessage:
        """See `TensorReceiver`. Raises NixlFailed where memory can't be read, StreamCorrupt where who opened it did not see the door."""
        message = self._receiver.receive(deadline)
        if not self._taken and self._reading is None and message.header.startswith(_MARK) and not message.array.nbytes:
            self._open(message.header)
            message = self._receiver.receive(deadline)
        place, self._taken = self._taken, self._taken + 1
        if self._reading is None or message.array.nbytes:
            return message
        data = self._reading.read(place % self._n_slots, time.perf_counter() + SEND_S)
        return TensorMessage(message.header, np.frombuffer(data, np.uint16))

    def refuse(self, error: TensorStreamError) -> TensorStreamError:
        return self._receiver.refuse(error)

    def close(self) -> None:
        """In the thread that received."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()

    def _open(self, header: bytes) -> None:
        opens, described = header[: _OPENS.size], header[_OPENS.size :]
        _, proof, token, address, self._n_slots = _OPENS.unpack(opens.ljust(_OPENS.size, b"\0"))
        seen = compare_digest(proof, self._offered.door.proof(self.peer, self._ticket))
        if not seen or not 0 < self._n_slots <= MOST_SLOTS or len(described) > MOST_DESCRIBED:
            raise self.refuse(StreamCorrupt(f"{self.peer} opens memory and did not see this node's door"))
        self._reading = NixlReading(self._offered.agent, described, address, self._n_slots, self._block_bytes, token)


class NixlUse:
    """Of one node: its agent and its door, once they are there, and with whom they are used. On the event loop."""

    def __init__(self) -> None:
        self.agent: NixlAgent | None = None
        self._door = HostDoor()
        self._failed: LeftOut[tuple[NodeId, bytes], None] = LeftOut()
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Soon, in the background, where it is installed. Idempotent."""
        if self._starting is None and is_installed():
            self._starting = asyncio.create_task(self._start(), name="NIXL")

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self.agent = None
        self._door.close()

    def offer(self, node_id: NodeId, instance: bytes, now: float) -> NixlOffered | None:
        """What is offered to a process of a node; None: nothing."""
        if self.agent is None or (node_id, instance) in self._failed.now(now):
            return None
        return NixlOffered(self.agent, self._door)

    def failed(self, node_id: NodeId, instance: bytes, now: float) -> None:
        """Leave it be with that process for a while."""
        self._failed.add((node_id, instance), now + REST_S, None)

    async def _start(self) -> None:
        try:
            agent = await asyncio.to_thread(NixlAgent)
            await self._door.open()
        except (NixlFailed, OSError) as error:
            logger.warning("NIXL is installed and not used: %s", error)
            return
        self.agent = agent
        logger.info("KV goes by NIXL %s to nodes of this user on this host", agent.version)
