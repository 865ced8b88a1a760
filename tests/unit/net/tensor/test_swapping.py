"""A tensor stays good while the next one comes, where its reader asks for that."""

from __future__ import annotations

import numpy as np

from paceline.net.tensor.frames import BF16, Conversation, Event, tensor_start
from paceline.net.tensor.incoming import FROM_SENDER, IncomingBytes, TensorMessage


def test_a_tensor_that_was_swapped_away_is_not_written_until_the_next_swap() -> None:
    conversation = Conversation()
    conversation.on(Event.HELLO)
    conversation.on(Event.WELCOME)
    incoming = IncomingBytes(conversation, FROM_SENDER)

    def next_one(value: int) -> TensorMessage:
        array = np.full(100, value, np.uint16)
        frame = tensor_start(value, 0, array.nbytes, BF16, array.shape, array.nbytes) + array.tobytes()
        incoming.space()[: len(frame)] = frame
        incoming.filled(len(frame))
        message = incoming.next()
        assert isinstance(message, TensorMessage)
        assert message.array.tolist() == [value] * 100
        return message

    first = next_one(0)
    for value in range(1, 5):
        incoming.swap()
        second = next_one(value)
        assert first.array.tolist() == [value - 1] * 100
        first = second
    next_one(5)  # without a swap it is the same memory
    assert first.array.tolist() == [5] * 100
