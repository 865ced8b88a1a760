"""The two ends of a tensor stream: one sends tensors (`TensorSender`: a small one in one write, a large one in chunks), the other receives whole
tensors (`TensorReceiver`). Each is for one thread; `close` is for any.

After the greeting nothing goes from the receiver to the sender but a CLOSE, which the sender reads when a write fails.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from paceline.core.errors import StreamCorrupt, StreamIdle, StreamStalled, TensorStreamError, TensorTooLarge
from paceline.core.ids import NodeId
from paceline.net.tensor.frames import (
    CODES,
    MAX_CHUNK_BYTES,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_START_BYTES,
    MAX_TENSOR_BYTES,
    CloseCode,
    Conversation,
    Event,
    chunk_start,
    close,
    code_of,
    error_of,
    hello,
    tensor_start,
)
from paceline.net.tensor.incoming import FROM_RECEIVER, Array, Closed, IncomingBytes, TensorMessage
from paceline.net.tensor.pipe import Pipe, PipeSilence


class End:
    """What both ends have in common."""

    def __init__(self, pipe: Pipe, conversation: Conversation, incoming: IncomingBytes, on_close: Callable[[], None] | None = None) -> None:
        self._pipe, self._conversation, self._incoming = pipe, conversation, incoming
        self._on_close = on_close

    @property
    def peer(self) -> NodeId:
        """Whose certificate the other end showed."""
        return self._pipe.peer

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    def close(self, code: CloseCode = CloseCode.DONE, why: str = "") -> None:
        """Idempotent, from any thread; wakes the one that reads or writes.

        Args:
            code: told to the other side where no thread is reading or writing.
        """
        self._pipe.close(close(code, why))
        if self._on_close is not None:
            self._on_close()

    def fail(self, error: TensorStreamError) -> None:
        """Close, for an error that the other side is told."""
        self.close(code_of(error), error.message)


JOINED_BYTES = 48 << 10
"""Frames up to here are put together, so that each is one write."""


def _start_of_small(seq: int, header: bytes, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes | None:
    """What comes before the data of a small tensor, which is one frame and one write; None: this one is not small."""
    code, total = CODES.get(dtype), prod(shape) * dtype.itemsize
    if code is None or len(shape) > MAX_DIMENSIONS or len(header) + total + MAX_START_BYTES > JOINED_BYTES:
        return None
    return tensor_start(seq, len(header), total, code, shape, total) + header


class TensorSender(End):
    """Sends tensors, once `greet` has opened the stream."""

    def __init__(self, pipe: Pipe) -> None:
        conversation = Conversation()
        super().__init__(pipe, conversation, IncomingBytes(conversation, FROM_RECEIVER, 4096))
        self._joined = bytearray(JOINED_BYTES)
        self._ready_for: tuple[np.dtype[np.generic], tuple[int, ...]] | None = None
        """Of what tensor the start lies in `_joined`."""
        self._ready_bytes = 0

    def greet(self, ticket: bytes, deadline: float) -> None:
        """Say which ticket this is, and wait until it is taken.

        Raises:
            TensorStreamError: it is not, or not in time.
        """
        try:
            with self._pipe:
                self._conversation.on(Event.HELLO)
                self._pipe.send(hello(ticket), deadline)
                while not self._heard():
                    self._incoming.filled(self._pipe.receive(self._incoming.space(), deadline))
        except TensorStreamError as error:
            self.fail(error)
            raise

    def prepare(self, header: bytes, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
        """Write what comes before a tensor, so that `send_prepared` has only its data to add. Does nothing where the tensor is not
        small.
        """
        self._ready_for = None
        start = _start_of_small(self._conversation.next_seq, header, dtype, shape)
        if start is None:
            return
        self._joined[: len(start)] = start
        self._ready_for, self._ready_bytes = (dtype, shape), len(start)

    def send_prepared(self, array: Array, deadline: float) -> bool:
        """Send the tensor that was prepared. False: none like this was. Raises as `send` does."""
        if (array.dtype, array.shape) != self._ready_for:
            return False
        self._ready_for = None
        at, total = self._ready_bytes, array.nbytes
        self._joined[at : at + total] = array.tobytes()
        try:
            with self._pipe:
                self._pipe.send(memoryview(self._joined)[: at + total], deadline)
                self._conversation.tensor(self._conversation.next_seq, total, total)
        except TensorStreamError as error:
            raise self.broken(error) from error
        return True

    def send(self, header: bytes, array: Array, deadline: float) -> None:
        """A tensor, and what is to be known of it. Returns once the system has it; `array` may be reused then.

        Args:
            header: at most 512 KiB.
            array: uint16 (bf16 bits), float16 or float32, of at most four dimensions and 64 MiB.
            deadline: on the monotonic clock, for as long as nothing is taken (`pipe.Silence`).

        Raises:
            TensorTooLarge: beyond these bounds. The stream is good for another.
            StreamCorrupt: of another dtype or with more dimensions. The stream is good for another.
            StreamStalled: the other side takes too little.
            TensorStreamError: the stream is broken.
        """
        code = CODES.get(array.dtype)
        total, n_header = array.nbytes, len(header)
        if code is None or array.ndim > MAX_DIMENSIONS:
            raise StreamCorrupt(f"A tensor of dtype {array.dtype} with {array.ndim} dimensions can't be sent")
        if total > MAX_TENSOR_BYTES or n_header > MAX_HEADER_BYTES:
            raise TensorTooLarge(
                f"A tensor of {total} bytes with a header of {n_header}; {MAX_TENSOR_BYTES} and {MAX_HEADER_BYTES} are taken"
            )
        self._ready_for = None
        data = (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data.cast("B") if total else memoryview(b"")
        conversation, silence = self._conversation, PipeSilence(deadline, self._pipe.now, total)
        try:
            with self._pipe:
                seq, at = conversation.next_seq, min(total, MAX_CHUNK_BYTES - n_header)
                conversation.tensor(seq, total, at)
                self._put(tensor_start(seq, n_header, total, code, array.shape, at) + header, data[:at], silence)
                while at < total:
                    seq, n = conversation.next_seq, min(total - at, MAX_CHUNK_BYTES)
                    conversation.chunk(seq, n)
                    self._put(chunk_start(seq, n), data[at : at + n], silence)
                    at += n
        except TensorStreamError as error:
            raise self.broken(error) from error

    def check(self) -> None:
        """Raises TensorStreamError where the other side has ended the stream, or this one. Does not wait."""
        try:
            with self._pipe:
                while n := self._pipe.receive_now(self._incoming.space()):
                    self._incoming.filled(n)
                    self._heard()
        except TensorStreamError as error:
            self.fail(error)
            raise

    def _put(self, start: bytes, data: memoryview, silence: PipeSilence) -> None:
        """A frame: its start and its data, in one write where that is cheap."""
        deadline = silence.deadline
        at, n = len(start), len(data)
        if at + n <= JOINED_BYTES:
            joined = self._joined
            joined[:at] = start
            joined[at : at + n] = data
            self._pipe.send(memoryview(joined)[: at + n], deadline)
        else:
            self._pipe.send(start, deadline)
            self._pipe.send(data, deadline)
        silence.moved()

    def _heard(self) -> bool:
        """Whether the other side has said something.

        Raises:
            TensorStreamError: it was a CLOSE.
        """
        event = self._incoming.next()
        if isinstance(event, Closed):
            raise error_of(event.code, event.message, self.peer)
        return event is not None

    def broken(self, error: TensorStreamError) -> TensorStreamError:
        """Close, for an error or for what the other side gave as its reason, which is returned."""
        told = self._told(error)
        self.fail(told)
        return told

    def _told(self, error: TensorStreamError) -> TensorStreamError:
        """What the other side gave as its reason, where a write failed; else the error itself."""
        if self.closed or self._conversation.over:
            return error
        try:
            with self._pipe:
                while not self._heard() and (n := self._pipe.receive_now(self._incoming.space())):
                    self._incoming.filled(n)
        except TensorStreamError as reason:
            return reason if self._conversation.over else error
        return error


class TensorReceiver(End):
    """Receives tensors. The listener makes it, from a connection that has been greeted."""

    def __init__(self, pipe: Pipe, conversation: Conversation, incoming: IncomingBytes, on_close: Callable[[], None] | None = None) -> None:
        super().__init__(pipe, conversation, incoming, on_close)

    def receive(self, deadline: float) -> TensorMessage:
        """The next tensor. Its array is good until the next call.

        Args:
            deadline: on the monotonic clock, for as long as nothing comes (`pipe.Silence`).

        Raises:
            StreamIdle: none has begun to come.
            StreamStalled: it was not all there in time. Calling again goes on where this left off.
            TensorStreamError: the stream is broken.
        """
        try:
            with self._pipe:
                event = self._next(deadline)
        except StreamStalled as error:
            if self._incoming.empty and self._conversation.between:
                raise StreamIdle(error.message) from error
            raise
        except TensorStreamError as error:
            self.fail(error)
            raise
        if isinstance(event, Closed):
            error = error_of(event.code, event.message, self.peer)
            self.fail(error)
            raise error
        return event

    def look(self, seconds: float) -> None:
        """Have `receive` look for so long before it sleeps. It takes the core meanwhile, unless others want it."""
        self._pipe.look_s = seconds

    def refuse(self, error: TensorStreamError) -> TensorStreamError:
        """What came makes no sense to its user: the stream ends, and the other side is told. Returns the error, to be raised."""
        self.fail(error)
        return error

    def _next(self, deadline: float) -> TensorMessage | Closed:
        incoming, pipe = self._incoming, self._pipe
        silence = PipeSilence(deadline, pipe.now)
        while True:
            event = incoming.next()
            if event is None:
                incoming.filled(pipe.receive(incoming.space(), silence.deadline))
                silence.moved(incoming.tensor_bytes)
            elif isinstance(event, TensorMessage | Closed):
                return event
