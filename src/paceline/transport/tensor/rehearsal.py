"""Reading a message like the last one again, so that what reads the next is at hand when it comes.

Law: nothing that was received is kept but its header; the made-up tensor is zeros. The stream itself is not touched.
"""

from __future__ import annotations

import numpy as np

from paceline.transport.tensor.conversation import Conversation, Event
from paceline.transport.tensor.frames import CODES, tensor_start
from paceline.transport.tensor.incoming import BUFFER_BYTES, FROM_SENDER, Array, Incoming, Message

MOST_BYTES = BUFFER_BYTES // 2
"""Of a message that is rehearsed. Larger ones take long anyway, and copying them would push other things out of the caches."""


class Rehearsal:
    """Of one receiver."""

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
