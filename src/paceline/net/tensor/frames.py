"""The bytes of a tensor stream. A frame is its kind (1 byte), the length of its body (4 bytes, big-endian like all numbers), and its body.

    from       kind     body
    sender     HELLO    magic, ticket (32 bytes)
    receiver   WELCOME
    sender     TENSOR   seq u32, header length u32, bytes of the whole tensor u64, dtype u8, dimensions u8, each u32, header, first data
    sender     CHUNK    seq u32, data
    either     CLOSE    code u8, message (UTF-8)

Header and data of a TENSOR, or the data of a CHUNK, are at most 1 MiB.

Both ends follow a table of the frames that may come in each state of a stream. A frame that may not come raises an error and changes nothing. TCP bounds
the bytes in flight, and the deadlines of `pipe` bound the time (docs/internals/adr/0013).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum, auto
from struct import Struct

import numpy as np

from paceline.core.errors import StreamClosed, StreamCorrupt, StreamStalled, TensorStreamError, TensorTooLarge
from paceline.core.text import printable

TICKET_BYTES = 32
"""Size of a ticket. The node that expects a stream draws it at random, and the node that opens the stream shows it."""
MAGIC = b"PLTS"
"""First bytes of a hello. They hold no version, because only nodes of one protocol version exchange tickets, by RPC."""
MAX_CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 512 << 10
MAX_TENSOR_BYTES = 64 << 20
MAX_DIMENSIONS = 4
MAX_MESSAGE_BYTES = 512

HEAD = Struct("!BI")
TENSOR = Struct("!IIQBB")
SEQ = Struct("!I")
SHAPES = tuple(Struct(f"!{n}I") for n in range(MAX_DIMENSIONS + 1))
_TENSOR_START = tuple(Struct(f"!BIIIQBB{n}I") for n in range(MAX_DIMENSIONS + 1))
_CHUNK_START = Struct("!BII")
MAX_START_BYTES = max(start.size for start in _TENSOR_START)


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    TENSOR = 3
    CHUNK = 4
    CLOSE = 6


class CloseCode(IntEnum):
    """The reason for the end of a stream."""

    DONE = 0
    REFUSED = 1
    CORRUPT = 2
    TOO_LARGE = 3
    STALLED = 4


LENGTHS: dict[int, tuple[int, int]] = {
    FrameKind.HELLO: (len(MAGIC) + TICKET_BYTES, len(MAGIC) + TICKET_BYTES),
    FrameKind.WELCOME: (0, 0),
    FrameKind.TENSOR: (TENSOR.size, TENSOR.size + 4 * MAX_DIMENSIONS + MAX_CHUNK_BYTES),
    FrameKind.CHUNK: (SEQ.size + 1, SEQ.size + MAX_CHUNK_BYTES),
    FrameKind.CLOSE: (1, 1 + MAX_MESSAGE_BYTES),
}
"""Bytes of the shortest and the longest body of each kind."""

BF16, FP16, FP32 = 1, 2, 3
DTYPES: dict[int, np.dtype[np.generic]] = {BF16: np.dtype(np.uint16), FP16: np.dtype(np.float16), FP32: np.dtype(np.float32)}
"""numpy dtype for each dtype code. numpy has no bf16, so its bits are held as uint16."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

_ERRORS: dict[int, type[TensorStreamError]] = {
    CloseCode.CORRUPT: StreamCorrupt,
    CloseCode.TOO_LARGE: TensorTooLarge,
    CloseCode.STALLED: StreamStalled,
}


def hello(ticket: bytes) -> bytes:
    return HEAD.pack(FrameKind.HELLO, len(MAGIC) + len(ticket)) + MAGIC + ticket


WELCOME = HEAD.pack(FrameKind.WELCOME, 0)


def tensor_start(seq: int, header_bytes: int, total: int, dtype: int, shape: Sequence[int], n_data: int) -> bytes:
    """Return the bytes of a TENSOR frame before its header and its first `n_data` bytes of data."""
    n = len(shape)
    body = TENSOR.size + 4 * n + header_bytes + n_data
    return _TENSOR_START[n].pack(FrameKind.TENSOR, body, seq, header_bytes, total, dtype, n, *shape)


def chunk_start(seq: int, n_data: int) -> bytes:
    """Return the bytes of a CHUNK frame before its `n_data` bytes of data."""
    return _CHUNK_START.pack(FrameKind.CHUNK, SEQ.size + n_data, seq)


def starts(header: bytes, total: int, dtype: int, shape: Sequence[int]) -> Iterator[tuple[bytes, int]]:
    """Yield, for each frame of a tensor, the bytes before its data (with sequence number 0) and the number of data bytes."""
    n = min(total, MAX_CHUNK_BYTES - len(header))
    yield tensor_start(0, len(header), total, dtype, shape, n) + header, n
    for at in range(n, total, MAX_CHUNK_BYTES):
        n = min(total - at, MAX_CHUNK_BYTES)
        yield chunk_start(0, n), n


def close(code: int, message: str) -> bytes:
    text = message.encode()[:MAX_MESSAGE_BYTES]
    return HEAD.pack(FrameKind.CLOSE, 1 + len(text)) + bytes([code]) + text


def code_of(error: TensorStreamError) -> CloseCode:
    """Return the code by which a CLOSE reports an error to the other side."""
    for code, kind in _ERRORS.items():
        if isinstance(error, kind):
            return CloseCode(code)
    return CloseCode.DONE


def error_of(code: int, message: str, who: str) -> TensorStreamError:
    """Return the error for a CLOSE that the other side sent."""
    said = printable(message)
    return _ERRORS.get(code, StreamClosed)(f"{who} ended the tensor stream" + (f": {said}" if said else ""))


SEQ_MASK = 0xFFFFFFFF


class State(Enum):
    FRESH = auto()
    GREETED = auto()
    """The hello was sent and not yet answered."""
    BETWEEN = auto()
    """No tensor is under way."""
    INSIDE = auto()
    """A tensor's first chunk has passed, its last has not."""
    CLOSED = auto()


class Event(Enum):
    HELLO = auto()
    WELCOME = auto()
    WHOLE = auto()
    """A tensor that fits into one frame."""
    FIRST = auto()
    NEXT = auto()
    LAST = auto()
    CLOSE = auto()


TABLE: dict[tuple[State, Event], State] = {
    (State.FRESH, Event.HELLO): State.GREETED,
    (State.GREETED, Event.WELCOME): State.BETWEEN,
    (State.BETWEEN, Event.WHOLE): State.BETWEEN,
    (State.BETWEEN, Event.FIRST): State.INSIDE,
    (State.INSIDE, Event.NEXT): State.INSIDE,
    (State.INSIDE, Event.LAST): State.BETWEEN,
    (State.FRESH, Event.CLOSE): State.CLOSED,
    (State.GREETED, Event.CLOSE): State.CLOSED,
    (State.BETWEEN, Event.CLOSE): State.CLOSED,
    (State.INSIDE, Event.CLOSE): State.CLOSED,
}


class Conversation:
    """The state of one stream, as this end knows it.

    Args:
        first_seq: sequence number of the first chunk.
    """

    __slots__ = ("next_seq", "remaining", "state")

    def __init__(self, first_seq: int = 0) -> None:
        self.state = State.FRESH
        self.next_seq = first_seq
        self.remaining = 0
        """Bytes of the tensor under way that are still to come."""

    @property
    def between(self) -> bool:
        """True if no tensor is under way."""
        return self.state is State.BETWEEN

    @property
    def over(self) -> bool:
        """True if a CLOSE has passed."""
        return self.state is State.CLOSED

    def on(self, event: Event) -> None:
        """Record a hello, a welcome or a close.

        Raises:
            StreamCorrupt: it may not come in this state.
        """
        self.state = self._after(event)

    def tensor(self, seq: int, total: int, n_data: int) -> None:
        """Record the first chunk of a tensor, with `n_data` of its `total` bytes.

        Raises:
            StreamCorrupt: it may not come in this state, a chunk is missing, or it has more data than the tensor.
        """
        if n_data > total or (not n_data and total):
            raise StreamCorrupt(f"A tensor of {total} bytes begins with {n_data}")
        state = self._after(Event.WHOLE if n_data == total else Event.FIRST)
        self._count(seq)
        self.state, self.remaining = state, total - n_data

    def chunk(self, seq: int, n_data: int) -> None:
        """Record a further chunk of the tensor under way, with `n_data` bytes.

        Raises:
            StreamCorrupt: it may not come in this state, a chunk is missing, or it has more data than the tensor lacks.
        """
        remaining = self.remaining - n_data
        state = self._after(Event.LAST if not remaining else Event.NEXT)
        if remaining < 0 or n_data <= 0:
            raise StreamCorrupt(f"A chunk of {n_data} bytes where the tensor lacks {self.remaining}")
        self._count(seq)
        self.state, self.remaining = state, remaining

    def _after(self, event: Event) -> State:
        state = TABLE.get((self.state, event))
        if state is None:
            raise StreamCorrupt(f"{event.name} on a tensor stream that is {self.state.name}")
        return state

    def _count(self, seq: int) -> None:
        if seq != self.next_seq:
            raise StreamCorrupt(f"Chunk {seq} where {self.next_seq} was to come")
        self.next_seq = (seq + 1) & SEQ_MASK
