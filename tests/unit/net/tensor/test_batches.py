from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.net.tensor.meeting import Meeting, soon, until_it_breaks

from paceline.core.errors import StreamCorrupt, TensorStreamError
from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.core.model import ActivationDtype
from paceline.ways.pipeline.executor.stage import StageBatch
from paceline.ways.pipeline.host.ends import StreamSink, StreamSource, from_bf16, read, read_batch, to_bf16, write_batch, written

IDS = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**32 - 1)
EVERY = np.arange(1 << 16, dtype=np.uint16)
NUMBERS = EVERY[~np.isnan(from_bf16(EVERY))]


@st.composite
def batches(draw: st.DrawFn) -> StageBatch:
    n = draw(st.integers(0, 8))

    def column(of: st.SearchStrategy[int], length: int = n) -> list[int]:
        return draw(st.lists(of, min_size=length, max_size=length))

    counts = column(st.integers(0, 5))
    return StageBatch(
        BatchId(draw(IDS)), [SequenceId(i) for i in column(IDS)], column(st.integers(1, 9)), column(SMALL), column(st.integers(0, 1)), counts,
        [BlockId(i) for i in column(SMALL, sum(counts))], [SequenceId(i) for i in draw(st.lists(IDS, max_size=4))],
        draw(st.integers(0, 200)),
    )  # fmt: skip


ONE = StageBatch(BatchId(7), [SequenceId(1), SequenceId(2)], [2, 1], [0, 9], [0, 1], [1, 0], [BlockId(4)], [SequenceId(3)])


@given(batches())
def test_batches_are_read_as_written(batch: StageBatch) -> None:
    assert read_batch(write_batch(batch)) == batch


@given(st.binary(max_size=200))
def test_noise_is_a_batch_or_a_typed_error(noise: bytes) -> None:
    try:
        batch = read_batch(noise)
    except StreamCorrupt:
        return
    assert write_batch(batch) == noise


@pytest.mark.parametrize("cut", [0, 8, 31, 33, 39, -8, -1])
def test_what_is_cut_off_or_goes_on_is_refused(cut: int) -> None:
    whole = write_batch(ONE)
    with pytest.raises(StreamCorrupt):
        read_batch(whole[:cut])
    for more in (bytes(8), whole[:16]):
        with pytest.raises(StreamCorrupt):
            read_batch(whole + more)


def test_counts_beyond_what_is_there_allocate_nothing() -> None:
    for place in range(3):
        lying = bytearray(write_batch(ONE))
        lying[8 * place : 8 * place + 8] = b"\xff" * 8
        with pytest.raises(StreamCorrupt, match="Batch 7"):
            read_batch(bytes(lying))


def test_bf16_there_and_back() -> None:
    np.testing.assert_array_equal(to_bf16(from_bf16(NUMBERS)), NUMBERS)
    assert np.isnan(from_bf16(to_bf16(from_bf16(EVERY)))).sum() == len(EVERY) - len(NUMBERS)


def test_bf16_is_rounded_to_the_nearest_and_halves_to_even() -> None:
    below = np.arange(0x3F80, 0x4080, dtype=np.uint16)
    low, high = from_bf16(below).astype(np.float64), from_bf16(below + 1).astype(np.float64)
    np.testing.assert_array_equal(to_bf16((low * 0.51 + high * 0.49).astype(np.float32)), below)
    np.testing.assert_array_equal(to_bf16((low * 0.49 + high * 0.51).astype(np.float32)), below + 1)
    np.testing.assert_array_equal(to_bf16(((low + high) / 2).astype(np.float32)), below + below % 2)


@pytest.mark.parametrize("kind", ActivationDtype)
def test_activations_travel_as_agreed(met: Meeting, kind: ActivationDtype) -> None:
    sender, receiver = met.stream()
    sink, source = StreamSink(sender, kind), StreamSource(receiver, kind, 4)
    x_TD = to_bf16(np.array([[0, 1, -2, 65280], [0.5, 3.25, -1e-3, 7], [-0.0, 1, 2, 3]], np.float32))
    assert written(x_TD, kind).dtype == {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}[kind]
    for _ in range(20):
        sink.send(ONE, x_TD, soon())
        batch, got_TD = source.receive(soon())
        assert batch == ONE
        np.testing.assert_array_equal(got_TD, x_TD)
    sink.close()
    source.close()


def test_fp32_loses_nothing_and_fp16_what_it_cannot_hold() -> None:
    np.testing.assert_array_equal(read(written(NUMBERS, ActivationDtype.FP32)), NUMBERS)
    assert np.isinf(written(to_bf16(np.array([1e30], np.float32)), ActivationDtype.FP16)).all()


@pytest.mark.parametrize("x", [np.zeros((3, 5), np.uint16), np.zeros(3, np.uint16), np.zeros((3, 4), np.float32)])
def test_what_is_no_batch_of_activations_ends_the_stream(met: Meeting, x: np.ndarray) -> None:
    sender, receiver = met.stream()
    source = StreamSource(receiver, width=4)
    sender.send(write_batch(ONE), x, soon())
    with pytest.raises(StreamCorrupt):
        source.receive(soon())
    assert receiver.closed
    with pytest.raises(TensorStreamError):
        until_it_breaks(sender)
