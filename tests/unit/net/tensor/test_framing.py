"""The framing's laws: cuts don't matter, nothing illegal passes, and nothing is allocated on somebody's word beyond the bounds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import StreamClosed, StreamCorrupt, StreamStalled, TensorStreamError, TensorTooLarge
from paceline.net.tensor.frames import (
    BF16,
    CODES,
    DTYPES,
    FP32,
    HEAD,
    MAGIC,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    SEQ_MASK,
    TABLE,
    WELCOME,
    CloseCode,
    Conversation,
    Event,
    FrameKind,
    State,
    chunk_start,
    close,
    code_of,
    error_of,
    hello,
    tensor_start,
)
from paceline.net.tensor.incoming import FROM_RECEIVER, FROM_SENDER, Closed, Hello, IncomingBytes, TensorMessage

SMALL_BUFFER = 1024
ACKNOWLEDGEMENT = HEAD.pack(5, 4) + bytes(4)
"""Of version 1."""


def opened(first_seq: int = 0) -> Conversation:
    conversation = Conversation(first_seq)
    conversation.on(Event.HELLO)
    conversation.on(Event.WELCOME)
    return conversation


def frames(header: bytes, array: np.ndarray, pieces: list[int], seq: int) -> tuple[bytes, int]:
    """A tensor cut into chunks of given sizes, the last as long as it takes; and the sequence number after it."""
    data = array.tobytes()
    first = min(pieces[0], len(data)) if data else 0
    written = tensor_start(seq, len(header), len(data), CODES[array.dtype], array.shape, first) + header + data[:first]
    seq, at = seq + 1, first
    for size in itertools.chain(pieces[1:], itertools.repeat(100)):
        if at >= len(data):
            return written, seq
        piece = data[at : at + size]
        written += chunk_start(seq, len(piece)) + piece
        seq, at = seq + 1, at + len(piece)
    raise AssertionError("the repetition doesn't end")


@st.composite
def tensors(draw: st.DrawFn) -> tuple[bytes, np.ndarray]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    n = int(np.prod(shape)) * dtype.itemsize
    return draw(st.binary(max_size=1500)), np.frombuffer(draw(st.binary(min_size=n, max_size=n)), dtype).reshape(shape)


def fed(incoming: IncomingBytes, data: bytes, cuts: list[int]) -> list[object]:
    """What comes out when `data` comes in pieces; messages as bytes, as their arrays are used again."""
    out: list[object] = []
    sizes = itertools.cycle(cuts)
    at = 0
    while at < len(data):
        space = incoming.space()
        assert len(space)
        n = min(next(sizes), len(space), len(data) - at)
        space[:n] = data[at : at + n]
        incoming.filled(n)
        at += n
        while (event := incoming.next()) is not None:
            if isinstance(event, TensorMessage):
                out.append((event.header, event.array.dtype, event.array.shape, event.array.tobytes()))
            else:
                out.append(event)
    return out


PIECES = st.lists(st.integers(1, 300), min_size=1, max_size=4)
CUTS = st.lists(st.integers(1, 2000), min_size=1, max_size=8)


@given(st.lists(st.tuples(tensors(), PIECES), min_size=1, max_size=6), CUTS, st.integers(0, SEQ_MASK))
def test_any_cut_of_the_bytes_gives_the_same_messages(
    sent: list[tuple[tuple[bytes, np.ndarray], list[int]]], cuts: list[int], first: int
) -> None:
    data, seq = b"", 0
    for (header, array), pieces in sent:
        written, seq = frames(header, array, pieces, seq)
        data += written
    data += close(CloseCode.DONE, "over")
    got = fed(IncomingBytes(opened(), FROM_SENDER, SMALL_BUFFER), data, cuts)
    assert got == [*((header, array.dtype, array.shape, array.tobytes()) for (header, array), _ in sent), Closed(0, "over")]


@given(tensors(), PIECES, CUTS, st.data())
def test_damaged_bytes_give_messages_or_typed_errors(
    tensor: tuple[bytes, np.ndarray], pieces: list[int], cuts: list[int], draw: st.DataObject
) -> None:
    written, seq = frames(*tensor, pieces, 0)
    data = bytearray(written + frames(*tensor, pieces, seq)[0] + close(CloseCode.DONE, ""))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data) - 1))
        data[at : at + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=3))
        if not data:
            return
    incoming = IncomingBytes(opened(), FROM_SENDER, SMALL_BUFFER)
    with contextlib.suppress(StreamCorrupt, TensorTooLarge):
        fed(incoming, bytes(data), cuts)
    assert len(incoming._store) <= MAX_TENSOR_BYTES
    assert len(incoming._header) <= MAX_HEADER_BYTES


@given(st.binary(max_size=300), CUTS, st.booleans())
def test_noise_gives_typed_errors(noise: bytes, cuts: list[int], from_sender: bool) -> None:
    incoming = IncomingBytes(opened(), FROM_SENDER if from_sender else FROM_RECEIVER, SMALL_BUFFER)
    with contextlib.suppress(StreamCorrupt, TensorTooLarge):
        fed(incoming, noise, cuts)
    assert len(incoming._store) <= MAX_TENSOR_BYTES


def test_a_tensor_beyond_the_bound_is_refused_before_there_is_room_for_it() -> None:
    incoming = IncomingBytes(opened(), FROM_SENDER)
    n = MAX_TENSOR_BYTES // 4 + 1
    with pytest.raises(TensorTooLarge, match=str(4 * n)):
        fed(incoming, tensor_start(0, 0, 4 * n, FP32, (n,), 100), [1000])
    assert not len(incoming._store)


def raw_tensor(seq: int = 0, n_header: int = 0, total: int = 4, dtype: int = BF16, shape: tuple[int, ...] = (2,), n_data: int = 4) -> bytes:
    return tensor_start(seq, n_header, total, dtype, shape, n_data) + bytes(n_header + n_data)


@pytest.mark.parametrize(
    "data",
    [
        raw_tensor(seq=1),
        raw_tensor(total=6, n_data=6),
        raw_tensor(dtype=9),
        raw_tensor(n_data=6),
        raw_tensor(n_data=0),
        raw_tensor(shape=(0, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), total=0, n_data=0),
        raw_tensor(n_header=MAX_HEADER_BYTES + 1),
        raw_tensor(n_header=10, total=MAX_CHUNK_BYTES, shape=(MAX_CHUNK_BYTES // 2,), n_data=MAX_CHUNK_BYTES),
        raw_tensor(n_header=10)[: -4 - 10 - 4 - 4] + b"\0\0\0\0",
        raw_tensor() + chunk_start(1, 4) + bytes(4),
        raw_tensor(total=8, shape=(4,)) + raw_tensor(seq=1),
        raw_tensor(total=8, shape=(4,)) + chunk_start(2, 4) + bytes(4),
        raw_tensor(total=8, shape=(4,)) + chunk_start(0, 4) + bytes(4),
        raw_tensor(total=8, shape=(4,)) + chunk_start(1, 5) + bytes(5),
        HEAD.pack(FrameKind.CHUNK, 4),
        HEAD.pack(FrameKind.CHUNK, 5 + MAX_CHUNK_BYTES),
        HEAD.pack(FrameKind.TENSOR, 0xFFFFFFFF),
        HEAD.pack(FrameKind.CLOSE, 0),
        HEAD.pack(0, 0),
        HEAD.pack(77, 0),
        WELCOME,
        ACKNOWLEDGEMENT,
        hello(bytes(32)),
        close(0, "") + raw_tensor(),
    ],
)
def test_what_a_sender_may_not_say(data: bytes) -> None:
    with pytest.raises(StreamCorrupt):
        fed(IncomingBytes(opened(), FROM_SENDER), data, [50_000])


@pytest.mark.parametrize("data", [ACKNOWLEDGEMENT, WELCOME, raw_tensor(), hello(bytes(32)), chunk_start(0, 1) + b"x"])
def test_what_a_receiver_may_not_say(data: bytes) -> None:
    with pytest.raises(StreamCorrupt):
        fed(IncomingBytes(opened(), FROM_RECEIVER), data, [7])


def test_a_hello_of_another_protocol_is_refused() -> None:
    with pytest.raises(StreamCorrupt, match="another protocol"):
        fed(IncomingBytes(Conversation(), FROM_SENDER), hello(bytes(32)).replace(MAGIC, b"HTTP"), [100])


def test_a_hello_brings_its_ticket() -> None:
    assert fed(IncomingBytes(Conversation(), FROM_SENDER), hello(bytes(range(32))), [3]) == [Hello(bytes(range(32)))]


def test_sequence_numbers_go_round() -> None:
    sender, receiver = opened(SEQ_MASK - 1), opened(SEQ_MASK - 1)
    incoming = IncomingBytes(receiver, FROM_SENDER)
    for _ in range(4):
        data = raw_tensor(sender.next_seq)
        sender.tensor(sender.next_seq, 4, 4)
        assert len(fed(incoming, data, [100])) == 1
    assert (sender.next_seq, receiver.next_seq) == (2, 2)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_the_table_does_not_have_raises_and_changes_nothing(state: State, event: Event) -> None:
    conversation = opened()
    conversation.state, conversation.remaining, conversation.next_seq = state, 100, 7
    acts = {
        Event.HELLO: lambda: conversation.on(event),
        Event.WELCOME: lambda: conversation.on(event),
        Event.CLOSE: lambda: conversation.on(event),
        Event.WHOLE: lambda: conversation.tensor(7, 10, 10),
        Event.FIRST: lambda: conversation.tensor(7, 10, 5),
        Event.NEXT: lambda: conversation.chunk(7, 10),
        Event.LAST: lambda: conversation.chunk(7, 100),
    }
    if (state, event) in TABLE:
        acts[event]()
        assert conversation.state is TABLE[state, event]
        return
    with pytest.raises(StreamCorrupt):
        acts[event]()
    assert (conversation.state, conversation.remaining, conversation.next_seq) == (state, 100, 7)


@pytest.mark.parametrize("illegal", [lambda c: c.tensor(8, 10, 10), lambda c: c.tensor(7, 10, 11)])
def test_numbers_that_do_not_fit_change_nothing(illegal: Callable[[Conversation], None]) -> None:
    conversation = opened(7)
    with pytest.raises(StreamCorrupt):
        illegal(conversation)
    assert (conversation.state, conversation.next_seq) == (State.BETWEEN, 7)


@pytest.mark.parametrize("error", [StreamCorrupt("x"), TensorTooLarge("x"), StreamStalled("x"), StreamClosed("x")])
def test_errors_cross_the_wire(error: TensorStreamError) -> None:
    (closed,) = fed(IncomingBytes(opened(), FROM_SENDER), close(code_of(error), "why\n\x1b[31m"), [10])
    assert isinstance(closed, Closed)
    there = error_of(closed.code, closed.message, "near-1")
    assert type(there) is type(error)
    assert there.message == "near-1 ended the tensor stream: why??[31m"
