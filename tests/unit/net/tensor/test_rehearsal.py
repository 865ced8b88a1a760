"""What is done ahead of a message: reading one like it, writing what comes before its data. Neither changes what arrives."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.unit.net.tensor.meeting import Meeting, soon

from paceline.core.errors import TensorStreamError
from paceline.core.ids import BatchId, SequenceId
from paceline.core.model import ActivationDtype
from paceline.net.tensor.ends import MOST_BYTES, Rehearsal
from paceline.net.tensor.incoming import TensorMessage
from paceline.ways.pipeline.executor.stage import StageBatch
from paceline.ways.pipeline.host.ends import StreamSink, StreamSource

BF16 = np.dtype(np.uint16)


def bits(rows: int, width: int = 576) -> np.ndarray:
    return np.random.default_rng(rows).integers(1, 1 << 16, (rows, width), np.uint16)


def test_a_reader_rehearses_the_last_message_in_zeros_and_gets_the_next_whole(met: Meeting) -> None:
    sender, receiver = met.stream()
    receiver.look(20.0)
    sender.send(b"first", bits(3), soon())
    receiver.receive(soon())
    rehearsed: list[tuple[bytes, np.ndarray]] = []
    enough = threading.Event()

    def rehearse(message: TensorMessage) -> None:
        rehearsed.append((message.header, message.array.copy()))
        if len(rehearsed) == 3:
            enough.set()

    def send_then() -> None:
        assert enough.wait(20)
        sender.send(b"second", bits(5), soon())

    thread = threading.Thread(target=send_then)
    thread.start()
    message = receiver.receive(soon(), rehearse)
    thread.join()
    assert message.header == b"second"
    np.testing.assert_array_equal(message.array, bits(5))
    for header, array in rehearsed:
        assert header == b"first"
        assert array.shape == (3, 576)
        assert array.dtype == BF16
        assert not array.any()


def test_nothing_is_rehearsed_before_the_first_message_and_after_a_large_one() -> None:
    rehearsal = Rehearsal()
    assert rehearsal.again() is None
    rehearsal.came(TensorMessage(b"small", bits(1)))
    assert all(rehearsal.again() is not None for _ in range(40))
    rehearsal.came(TensorMessage(b"large", bits(MOST_BYTES // 1152 + 1)))
    assert rehearsal.again() is None


def test_prepared_tensors_arrive_as_others_do(met: Meeting) -> None:
    sender, receiver = met.stream()
    for n in range(40):
        x = bits(n % 5 + 1)
        header = bytes([n]) * n
        sender.prepare(header, BF16, x.shape)
        assert sender.send_prepared(x, soon())
        message = receiver.receive(soon())
        assert message.header == header
        np.testing.assert_array_equal(message.array, x)


def test_what_was_not_prepared_is_not_sent_as_if_it_were(met: Meeting) -> None:
    sender, receiver = met.stream()
    assert not sender.send_prepared(bits(1), soon())
    sender.prepare(b"for one row", BF16, (1, 576))
    assert not sender.send_prepared(bits(2), soon())
    sender.send(b"two rows", bits(2), soon())
    assert receiver.receive(soon()).header == b"two rows"
    assert not sender.send_prepared(bits(1), soon()), "a number in the sequence was given to another"
    sender.prepare(b"large", BF16, (512, 576))
    assert not sender.send_prepared(bits(512), soon())


def test_sending_what_was_prepared_on_a_broken_stream_raises(met: Meeting) -> None:
    sender, receiver = met.stream()
    sender.prepare(b"", BF16, (1, 576))
    sender.close()
    with pytest.raises(TensorStreamError):
        sender.send_prepared(bits(1), soon())
    receiver.close()


def batch(id_: int, rows: int) -> StageBatch:
    return StageBatch(BatchId(id_), [SequenceId(1)], [rows], [0], [0], [0], [])


@pytest.mark.parametrize("wire", [ActivationDtype.BF16, ActivationDtype.FP32])
def test_a_batch_that_was_not_the_prepared_one_goes_out_itself(met: Meeting, wire: ActivationDtype) -> None:
    sender, receiver = met.stream()
    sink, source = StreamSink(sender, wire), StreamSource(receiver, wire, 576)
    x = (bits(2) % 0x4000).astype(np.uint16)
    sink.prepare(batch(1, 2), 576)
    sink.send(batch(2, 2), x, soon())
    third = batch(3, 2)
    sink.prepare(third, 576)
    sink.send(third, x, soon())
    for id_ in (2, 3):
        came, rows = source.receive(soon())
        assert came.batch_id == id_
        np.testing.assert_array_equal(rows, x)
