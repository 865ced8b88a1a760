"""The two ends of a tensor stream. `TensorSender` sends tensors: a small one in one write, a large one in chunks. `TensorReceiver` receives whole
tensors. Each is for one thread; any thread may call `close`.

After the greeting the receiver sends nothing but a CLOSE, which the sender reads when a write fails.
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
    """Common part of both ends of a stream."""

    def __init__(self, pipe: Pipe, conversation: Conversation, incoming: IncomingBytes, on_close: Callable[[], None] | None = None) -> None:
        self._pipe, self._conversation, self._incoming = pipe, conversation, incoming
        self._on_close = on_close

    @property
    def peer(self) -> NodeId:
        """Id of the node at the other end, from its certificate."""
        return self._pipe.peer

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    def close(self, code: CloseCode = CloseCode.DONE, why: str = "") -> None:
        """Close the stream. Idempotent, from any thread; wakes the thread that reads or writes.

        Args:
            code: sent to the other side unless a thread is reading or writing.
            why: sent with the code.
        """
        self._pipe.close(close(code, why))
        if self._on_close is not None:
            self._on_close()

    def fail(self, error: TensorStreamError) -> None:
        """Close the stream because of an error, and send that error to the other side."""
        self.close(code_of(error), error.message)


JOINED_BYTES = 48 << 10
"""Largest frame that is joined into one write (bytes). Raising it: fewer system calls, and more bytes are copied."""


def _start_of_small(seq: int, header: bytes, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes | None:
    """Return everything that precedes a small tensor's data. A small tensor is one frame and one write; None: this tensor is not small."""
    code, total = CODES.get(dtype), prod(shape) * dtype.itemsize
    if code is None or len(shape) > MAX_DIMENSIONS or len(header) + total + MAX_START_BYTES > JOINED_BYTES:
        return None
    return tensor_start(seq, len(header), total, code, shape, total) + header


class TensorSender(End):
    """Sending end of a stream. `greet` opens the stream first."""

    def __init__(self, pipe: Pipe) -> None:
        conversation = Conversation()
        super().__init__(pipe, conversation, IncomingBytes(conversation, FROM_RECEIVER, 4096))
        self._joined = bytearray(JOINED_BYTES)
        self._ready_for: tuple[np.dtype[np.generic], tuple[int, ...]] | None = None
        """Dtype and shape of the prepared tensor; its start lies in `_joined`. None: no tensor is prepared."""
        self._ready_bytes = 0

    def greet(self, ticket: bytes, deadline: float) -> None:
        """Present a ticket, and wait until the other side accepts it.

        Args:
            ticket: 32 bytes, from the receiver's session.
            deadline: on the monotonic clock.

        Raises:
            TensorStreamError: the ticket is refused, or not accepted in time.
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
        """Write everything that precedes a tensor, so that `send_prepared` only adds the data. No-op for a tensor that is not small."""
        self._ready_for = None
        start = _start_of_small(self._conversation.next_seq, header, dtype, shape)
        if start is None:
            return
        self._joined[: len(start)] = start
        self._ready_for, self._ready_bytes = (dtype, shape), len(start)

    def send_prepared(self, array: Array, deadline: float) -> bool:
        """Send the tensor that was prepared. Returns: False if no tensor of this dtype and shape was prepared. Raises as `send` does."""
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
        """Send a tensor and its header. Returns once the system has the bytes; `array` may be reused then.

        Args:
            header: at most 512 KiB.
            array: uint16 (bf16 bits), float16 or float32, of at most four dimensions and 64 MiB.
            deadline: on the monotonic clock; it moves on with each byte that is taken (`pipe.PipeSilence`).

        Raises:
            TensorTooLarge: the tensor or its header exceeds these bounds. The stream stays usable.
            StreamCorrupt: the tensor has another dtype or more dimensions. The stream stays usable.
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
        """Raise TensorStreamError if either side has ended the stream. Does not wait."""
        try:
            with self._pipe:
                while n := self._pipe.receive_now(self._incoming.space()):
                    self._incoming.filled(n)
                    self._heard()
        except TensorStreamError as error:
            self.fail(error)
            raise

    def _put(self, start: bytes, data: memoryview, silence: PipeSilence) -> None:
        """Send a frame, with its start and its data in one write where copying is cheap."""
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
        """Read one event of the other side, if a whole one has arrived. Returns: whether there was one.

        Raises:
            TensorStreamError: it was a CLOSE.
        """
        event = self._incoming.next()
        if isinstance(event, Closed):
            raise error_of(event.code, event.message, self.peer)
        return event is not None

    def broken(self, error: TensorStreamError) -> TensorStreamError:
        """Close the stream after a failed write. Returns the error to raise: the other side's reason where it gave one."""
        told = self._told(error)
        self.fail(told)
        return told

    def _told(self, error: TensorStreamError) -> TensorStreamError:
        """Return the reason that the other side gave, if a write failed because it closed the stream; otherwise the error itself."""
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
    """Receiving end of a stream. The listener makes it from a connection that has been greeted."""

    def __init__(self, pipe: Pipe, conversation: Conversation, incoming: IncomingBytes, on_close: Callable[[], None] | None = None) -> None:
        super().__init__(pipe, conversation, incoming, on_close)

    def receive(self, deadline: float) -> TensorMessage:
        """Return the next tensor. Its array is valid until the next call.

        Args:
            deadline: on the monotonic clock; it moves on with each byte that arrives (`pipe.PipeSilence`).

        Raises:
            StreamIdle: no tensor has begun to arrive.
            StreamStalled: the tensor did not arrive whole in time. Another call continues where this one stopped.
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
        """Set how many seconds `receive` polls before it sleeps. Polling takes the core, unless other threads want it."""
        self._pipe.look_s = seconds

    def refuse(self, error: TensorStreamError) -> TensorStreamError:
        """Close the stream because its user can't make sense of the content, and send the reason to the other side. Returns the error, to be raised."""
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
