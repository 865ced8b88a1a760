"""The end of a tensor stream that receives: whole tensors, acknowledged once their user is done with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.core.errors import StreamClosed, StreamIdle, StreamStalled, TensorStreamError
from paceline.net.tensor.conversation import Conversation, Event
from paceline.net.tensor.end import HALF, End
from paceline.net.tensor.frames import CODES, ack, error_of, tensor_start
from paceline.net.tensor.incoming import BUFFER_BYTES, FROM_SENDER, Array, Closed, Incoming, Message
from paceline.net.tensor.pipe import Pipe, Silence

MOST_BYTES = BUFFER_BYTES // 2
"""Of a message that is rehearsed. Larger ones take long anyway, and copying them would push other things out of the caches."""


class Rehearsal:
    """Reads a message like the last one again, so that what reads the next is at hand when it comes.

    Law: nothing that was received is kept but its header; the made-up tensor is zeros. The stream itself is not touched.
    """

    def __init__(self) -> None:
        conversation = Conversation()
        conversation.on(Event.HELLO)
        conversation.on(Event.WELCOME)
        self._conversation = conversation
        self._incoming = Incoming(conversation, FROM_SENDER)
        self._header = b""
        self._zeros: Array | None = None

    def came(self, message: Message) -> None:
        """A message to be like."""
        array, zeros = message.array, self._zeros
        self._header = message.header
        if zeros is None or zeros.shape != array.shape or zeros.dtype != array.dtype:
            small = len(message.header) + array.nbytes <= MOST_BYTES
            self._zeros = np.zeros(array.shape, array.dtype) if small else None

    def again(self) -> Message | None:
        """Read one; None where there is nothing to be like, or it was large."""
        zeros, conversation, incoming = self._zeros, self._conversation, self._incoming
        if zeros is None:
            return None
        start = tensor_start(conversation.next_seq, len(self._header), zeros.nbytes, CODES[zeros.dtype], zeros.shape, zeros.nbytes)
        frame = start + self._header + zeros.tobytes()
        incoming.space()[: len(frame)] = frame
        incoming.filled(len(frame))
        message = incoming.next()
        conversation.acknowledge(conversation.next_seq)
        return message if isinstance(message, Message) else None


class TensorReceiver(End):
    """Receives tensors. The listener makes it, from a connection that has been greeted."""

    def __init__(self, pipe: Pipe, conversation: Conversation, incoming: Incoming, on_close: Callable[[], None] | None = None) -> None:
        super().__init__(pipe, conversation, incoming, on_close)
        self._rehearsal = Rehearsal()

    def receive(self, deadline: float, rehearse: Callable[[Message], None] | None = None) -> Message:
        """The next tensor. Its array is good until the next call.

        Args:
            deadline: on the monotonic clock, for as long as nothing comes (`pipe.Silence`).
            rehearse: called now and then while this looks, with a message like the last one, of zeros.

        Raises:
            StreamIdle: none has begun to come.
            StreamStalled: it was not all there in time. Calling again goes on where this left off.
            TensorStreamError: the stream is broken.
        """
        try:
            with self._pipe:
                event = self._next(deadline, self._rehearsing(rehearse) if rehearse else None)
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
        self._rehearsal.came(event)
        return event

    def look(self, seconds: float) -> None:
        """Have `receive` look for so long before it sleeps. It takes the core meanwhile, unless others want it."""
        self._pipe.look_s = seconds

    def refuse(self, error: TensorStreamError) -> TensorStreamError:
        """What came makes no sense to its user: the stream ends, and the other side is told. Returns the error, to be raised."""
        self.fail(error)
        return error

    def acknowledge(self) -> None:
        """The user is done with what it received, so more may come.

        Raises:
            TensorStreamError: the stream is broken.
        """
        if self._conversation.unacknowledged >= HALF:
            try:
                with self._pipe:
                    self._ack(None)
            except TensorStreamError as error:
                self.fail(error)
                raise

    def _rehearsing(self, rehearse: Callable[[Message], None]) -> Callable[[], None]:
        """Read a message like the last one, and do with it what is done with the next."""

        def again() -> None:
            message = self._rehearsal.again()
            if message is not None:
                rehearse(message)

        return again

    def _next(self, deadline: float, rehearse: Callable[[], None] | None) -> Message | Closed:
        incoming, pipe, conversation = self._incoming, self._pipe, self._conversation
        if conversation.unacknowledged > HALF + HALF // 2:
            # Nothing is acknowledged; but asking for more says as much.
            self._ack(deadline)
        silence = Silence(deadline, pipe.now)
        while True:
            event = incoming.next()
            if event is None:
                incoming.filled(pipe.receive(incoming.space(), silence.deadline, rehearse))
                silence.moved(incoming.tensor_bytes)
            elif isinstance(event, Message | Closed):
                return event
            elif conversation.unacknowledged >= HALF:
                self._ack(silence.deadline)

    def _ack(self, deadline: float | None) -> None:
        """For every chunk that has come. It is a few bytes: who can't take them takes nothing any more."""
        seq = self._conversation.next_seq
        self._conversation.acknowledge(seq)
        try:
            self._pipe.send(ack(seq), deadline)
        except StreamStalled as error:
            raise StreamClosed(f"{self.peer} takes no acknowledgements") from error
