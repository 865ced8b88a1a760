"""The reading side of one end of a tensor stream: bytes in, events out. Pure; the owner of the socket reads into `space` and calls `filled`.

Reads of small frames go on past their ends into a buffer, so that a message costs one read. Data of a large chunk is read directly to its place.
Lengths are checked before anything is allocated for them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import StreamCorrupt, TensorTooLarge
from paceline.net.tensor.frames import (
    DTYPES,
    HEAD,
    LENGTHS,
    MAGIC,
    MAX_CHUNK_BYTES,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    SEQ,
    SHAPES,
    TENSOR,
    Conversation,
    Event,
    FrameKind,
    State,
)

Array = npt.NDArray[np.generic]


class TensorMessage(NamedTuple):
    header: bytes
    array: Array
    """The tensor. Its memory is used again when the next message begins."""


@dataclass(frozen=True, slots=True)
class Hello:
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer that the hello was accepted."""


Happened = TensorMessage | Hello | Welcome | Closed

FROM_SENDER = frozenset({FrameKind.HELLO, FrameKind.TENSOR, FrameKind.CHUNK, FrameKind.CLOSE})
FROM_RECEIVER = frozenset({FrameKind.WELCOME, FrameKind.CLOSE})
BUFFER_BYTES = 64 << 10


class IncomingBytes:
    """The reader of the bytes that arrive at one end.

    Args:
        conversation: state of the stream, which is shared with the sending side and updated here.
        takes: kinds of frame that the other end may send.
        buffer_bytes: maximum number of bytes read ahead; at least the longest small frame.
    """

    def __init__(self, conversation: Conversation, takes: Collection[int], buffer_bytes: int = BUFFER_BYTES) -> None:
        self._conversation = conversation
        self._takes = frozenset(int(kind) for kind in takes)
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._start = self._end = 0
        # The memory (of a header, of data) to fill before the next frame begins.
        self._parts: list[memoryview] = []
        self._direct = False
        self._header = bytearray()
        self._store = np.empty(0, np.uint8)
        self._data = self._store.data
        self._filled = 0
        self._form: tuple[int, tuple[int, ...]] = (0, ())
        self._array: Array = self._store

    @property
    def tensor_bytes(self) -> int:
        """Size of the tensor that is arriving; 0 if none is."""
        return self._array.nbytes if self._parts or self._conversation.state is State.INSIDE else 0

    @property
    def empty(self) -> bool:
        """True if all bytes that came were returned as events."""
        return self._start == self._end and not self._parts

    def space(self) -> memoryview:
        """Return the memory to read the next bytes into. It is never empty."""
        if self._start == self._end:
            self._start = self._end = 0
            if self._parts and len(self._parts[0]) >= len(self._buffer) // 2:
                self._direct = True
                return self._parts[0]
        elif self._end == len(self._buffer):
            rest = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._buffer[: self._end] = rest
        self._direct = False
        return self._buffer[self._end :]

    def filled(self, n: int) -> None:
        """Record that `n` bytes were read into the last `space`."""
        if self._direct:
            self._parts[0] = self._parts[0][n:]
        else:
            self._end += n

    def next(self) -> Happened | None:
        """Return the next event; None: more bytes are needed.

        Raises:
            StreamCorrupt: the bytes are not a frame, or the frame may not come in this state.
            TensorTooLarge: a tensor is larger than the bound.
        """
        while True:
            if not self._parts:
                # An incomplete frame leaves only its bytes in the buffer; a frame that begins a chunk leaves parts to fill.
                event = self._frame()
                if event is not None or not self._parts:
                    return event
            while self._parts:
                part = self._parts[0]
                n = min(len(part), self._end - self._start)
                if n:
                    part[:n] = self._buffer[self._start : self._start + n]
                    self._start += n
                if n < len(part):
                    self._parts[0] = part[n:]
                    return None
                del self._parts[0]
            if self._conversation.state is not State.INSIDE:
                return TensorMessage(bytes(self._header), self._array)

    def _frame(self) -> Happened | None:
        """Take the next frame. Return its event; None if the frame is incomplete, or its data is still to be read into `_parts`."""
        buffer, at, have = self._buffer, self._start, self._end - self._start
        if have < HEAD.size:
            return None
        kind, length = HEAD.unpack_from(buffer, at)
        if kind not in self._takes:
            raise StreamCorrupt(f"A frame of kind {kind} from this side of a tensor stream")
        least, most = LENGTHS[kind]
        if not least <= length <= most:
            raise StreamCorrupt(f"A frame of kind {kind} with {length} bytes")
        at += HEAD.size
        have -= HEAD.size
        if kind == FrameKind.TENSOR:
            return self._tensor(at, have, length)
        if kind == FrameKind.CHUNK:
            if have >= SEQ.size:
                (seq,) = SEQ.unpack_from(buffer, at)
                n = length - SEQ.size
                self._conversation.chunk(seq, n)
                self._start = at + SEQ.size
                self._expect_data(n)
            return None
        if have < length:
            return None
        body = bytes(buffer[at : at + length])
        event = self._small(kind, body)
        self._start = at + length
        return event

    def _small(self, kind: int, body: bytes) -> Happened:
        conversation = self._conversation
        if kind == FrameKind.WELCOME:
            conversation.on(Event.WELCOME)
            return Welcome()
        if kind == FrameKind.HELLO:
            if not body.startswith(MAGIC):
                raise StreamCorrupt("A hello of another protocol")
            conversation.on(Event.HELLO)
            return Hello(body[len(MAGIC) :])
        conversation.on(Event.CLOSE)
        return Closed(body[0], body[1:].decode(errors="replace"))

    def _tensor(self, at: int, have: int, length: int) -> TensorMessage | None:
        """Begin a tensor once enough of its frame has come. Return the message if all of it is in the buffer, else None."""
        if have < TENSOR.size:
            return None
        seq, n_header, total, dtype_code, n_dimensions = TENSOR.unpack_from(self._buffer, at)
        dtype = DTYPES.get(dtype_code)
        if dtype is None or n_dimensions > MAX_DIMENSIONS:
            raise StreamCorrupt(f"A tensor of dtype {dtype_code} with {n_dimensions} dimensions")
        dimensions = SHAPES[n_dimensions]
        n_data = length - TENSOR.size - dimensions.size - n_header
        if n_header > MAX_HEADER_BYTES or n_data < 0 or n_header + n_data > MAX_CHUNK_BYTES:
            raise StreamCorrupt(f"A frame of {length} bytes with a header of {n_header}")
        if total > MAX_TENSOR_BYTES:
            raise TensorTooLarge(f"A tensor of {total} bytes; {MAX_TENSOR_BYTES} are taken")
        if have < TENSOR.size + dimensions.size:
            return None
        shape = dimensions.unpack_from(self._buffer, at + TENSOR.size)
        if prod(shape) * dtype.itemsize != total or (not total and prod(filter(None, shape)) > MAX_TENSOR_BYTES):
            raise StreamCorrupt(f"A tensor of shape {shape} and dtype {dtype_code} with {total} bytes")
        self._conversation.tensor(seq, total, n_data)
        at += TENSOR.size + dimensions.size
        if (dtype_code, shape) != self._form:
            self._make_room(dtype_code, shape, total)
        if total == n_data and at + n_header + total <= self._end:
            # A small tensor is nearly always in the buffer as a whole.
            self._start = at + n_header + total
            self._data[:total] = self._buffer[self._start - total : self._start]
            return TensorMessage(bytes(self._buffer[at : at + n_header]), self._array)
        self._start = at
        self._header = bytearray(n_header)
        self._parts.append(memoryview(self._header))
        self._filled = 0
        self._expect_data(n_data)
        return None

    def _make_room(self, dtype_code: int, shape: tuple[int, ...], total: int) -> None:
        """Make the array for a tensor of another shape or dtype than the one before. The memory grows only for a larger tensor."""
        if total > len(self._store):
            self._store = np.empty(total, np.uint8)
        self._form = dtype_code, shape
        self._array = self._store[:total].view(DTYPES[dtype_code]).reshape(shape)
        self._data = self._store.data

    def _expect_data(self, n: int) -> None:
        self._parts.append(self._data[self._filled : self._filled + n])
        self._filled += n
