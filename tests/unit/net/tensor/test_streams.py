from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.tensor.meeting import Meeting, soon, until_it_breaks

from paceline.core.errors import StreamClosed, StreamCorrupt, StreamIdle, StreamStalled, TensorStreamError, TensorTooLarge
from paceline.net.tensor import pipe
from paceline.net.tensor.frames import MAX_TENSOR_BYTES, chunk_start, tensor_start
from paceline.net.tensor.pipe import LEAST_BYTES_PER_S, PipeSilence

SHORT_S = 0.2


def bits(rows: int, width: int = 576) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 1 << 16, (rows, width), np.uint16)


class InThread:
    """Something that blocks, and what came of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._result, self._error = work, None, None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except TensorStreamError as error:
            self._error = error

    def result(self) -> object:
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


@pytest.mark.parametrize(
    "array", [bits(1), bits(16), bits(512), bits(0), np.float32(3).reshape(()), bits(6)[::2], (bits(3) % 1000).astype(np.float16)]
)
def test_a_tensor_arrives_as_it_was_sent(met: Meeting, array: np.ndarray) -> None:
    sender, receiver = met.stream()
    assert (sender.peer, receiver.peer) == ("far", "near")
    for n in range(40):
        header = bytes([n]) * n
        sender.send(header, array, soon())
        message = receiver.receive(soon())
        assert message.header == header
        assert message.array.dtype == array.dtype
        np.testing.assert_array_equal(message.array, array)
    sender.close()


def test_a_small_tensor_is_one_write_and_nothing_is_answered(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = met.stream()
    writes: list[str] = []
    for name, end in (("data", sender), ("answer", receiver)):
        pipe = end._pipe
        monkeypatch.setattr(pipe, "send", lambda data, deadline, name=name, send=pipe.send: (writes.append(name), send(data, deadline)))
    for _ in range(16):
        sender.send(b"h", bits(1), soon())
        receiver.receive(soon())
    assert writes == ["data"] * 16


def test_the_largest_tensor_passes_and_a_larger_one_is_refused_here(met: Meeting) -> None:
    sender, receiver = met.stream()
    largest = np.arange(MAX_TENSOR_BYTES // 2, dtype=np.uint16)
    sending = InThread(lambda: sender.send(b"h", largest, soon()))
    np.testing.assert_array_equal(receiver.receive(soon()).array, largest)
    sending.result()
    with pytest.raises(TensorTooLarge):
        sender.send(b"", np.zeros(MAX_TENSOR_BYTES + 1, np.uint16), soon())
    with pytest.raises(StreamCorrupt, match="int64"):
        sender.send(b"", np.zeros(1, np.int64), soon())
    sender.send(b"still good", bits(1), soon())
    assert receiver.receive(soon()).header == b"still good"


def test_a_tensor_that_claims_too_much_ends_the_stream_and_its_sender_learns_why(met: Meeting) -> None:
    sender, receiver = met.stream()
    n = MAX_TENSOR_BYTES
    sender._pipe.send(tensor_start(0, 0, 2 * n, 1, (n,), 10) + bytes(10), soon())
    with pytest.raises(TensorTooLarge):
        receiver.receive(soon())
    assert receiver.closed
    with pytest.raises(TensorTooLarge, match="far ended"):
        until_it_breaks(sender)


def test_what_a_receiver_said_before_it_went_is_read_when_a_write_fails(met: Meeting) -> None:
    sender, receiver = met.stream()
    sending = InThread(lambda: sender.send(b"", np.zeros(MAX_TENSOR_BYTES // 2, np.uint16), soon()))
    while not sender._pipe._using.locked():
        os.sched_yield()
    receiver.refuse(TensorTooLarge("no more of it"))
    with pytest.raises(TensorTooLarge, match="far ended the tensor stream: no more of it"):
        sending.result()


def test_a_gap_ends_the_stream(met: Meeting) -> None:
    sender, receiver = met.stream()
    sender._pipe.send(tensor_start(0, 0, 20, 1, (10,), 10) + bytes(10) + chunk_start(2, 10) + bytes(10), soon())
    with pytest.raises(StreamCorrupt, match="Chunk 2 where 1"):
        receiver.receive(soon())
    with pytest.raises(StreamCorrupt):
        until_it_breaks(sender)
    with pytest.raises(StreamClosed, match="closed here"):
        receiver.receive(soon())


def test_a_reader_that_stops_reading_stalls_its_sender(met: Meeting) -> None:
    sender, _receiver = met.stream()
    with pytest.raises(StreamStalled, match="far takes nothing"):
        until_it_breaks(sender, SHORT_S)
    assert sender.closed


def test_a_reader_that_stops_within_a_large_tensor_stalls_its_sender(met: Meeting) -> None:
    sender, _receiver = met.stream()
    with pytest.raises(StreamStalled, match="far"):
        sender.send(b"", np.zeros(MAX_TENSOR_BYTES // 4, np.uint16), soon(SHORT_S))


SLOW_BYTES, WAIT_S = 2 << 20, 100.0


def test_a_link_that_takes_little_at_a_time_is_no_stall(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record takes nearly as long as nothing may move, and all of them take many times as long."""
    monkeypatch.setattr(pipe, "LEAST_BYTES_PER_S", 100)
    sender, receiver = met.stream()
    clock, write = FakeClock(), sender._pipe._write

    def write_slowly(data: memoryview) -> int:
        n = write(data[: 16 << 10])
        clock.advance(0.9 * WAIT_S if n else 0.0)
        return n

    sender._pipe.now, sender._pipe._write = clock.monotonic, write_slowly
    large = np.ones(SLOW_BYTES // 2, np.uint16)
    sending = InThread(lambda: sender.send(b"h", large, WAIT_S))
    np.testing.assert_array_equal(receiver.receive(soon()).array, large)
    sending.result()
    assert clock.monotonic() > 60 * WAIT_S


def test_a_link_that_gives_little_at_a_time_is_no_stall(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "LEAST_BYTES_PER_S", 100)
    sender, receiver = met.stream()
    data = bits(64).tobytes()
    whole = tensor_start(0, 1, len(data), 1, (64, 576), len(data)) + b"h" + data
    pieces = [whole[at : at + 1000] for at in range(0, len(whole), 1000)]
    clock, read = FakeClock(), receiver._pipe.receive_now

    def read_slowly(into: memoryview) -> int:
        n = read(into)
        if not n and pieces:
            clock.advance(0.9 * WAIT_S)
            sender._pipe.send(pieces.pop(0), soon())
        return n

    receiver._pipe.now, receiver._pipe.receive_now = clock.monotonic, read_slowly
    np.testing.assert_array_equal(receiver.receive(WAIT_S).array, bits(64))
    assert clock.monotonic() > 60 * WAIT_S


def test_silence_is_counted_from_the_last_byte_and_bytes_that_only_trickle_are_no_life_sign() -> None:
    clock = FakeClock()
    silence = PipeSilence(2.0, clock.monotonic, 10 * LEAST_BYTES_PER_S)
    ends: list[float] = []
    for _ in range(8):
        clock.advance(1.9)
        silence.moved()
        ends.append(silence.deadline)
    assert ends == pytest.approx([3.9, 5.8, 7.7, 9.6, 11.5, 12.0, 12.0, 12.0])
    unknown = PipeSilence(clock.monotonic() + 2.0, clock.monotonic)
    clock.advance(1.9)
    unknown.moved()
    assert unknown.deadline == pytest.approx(clock.monotonic() + 2.0)
    unknown.moved(10 * LEAST_BYTES_PER_S)
    clock.advance(11.5)
    unknown.moved(10 * LEAST_BYTES_PER_S)
    assert unknown.deadline == pytest.approx(clock.monotonic() + 0.5)


def test_a_sender_that_sends_nothing_is_waited_for_again(met: Meeting) -> None:
    sender, receiver = met.stream()
    with pytest.raises(StreamIdle, match="near sends nothing"):
        receiver.receive(soon(SHORT_S))
    data = bits(1).tobytes()
    sender._pipe.send(tensor_start(0, 1, len(data), 1, (1, 576), len(data)) + b"h" + data[:100], soon())
    with pytest.raises(StreamStalled) as stalled:
        receiver.receive(soon(SHORT_S))
    assert not isinstance(stalled.value, StreamIdle)
    sender._pipe.send(data[100:], soon())
    np.testing.assert_array_equal(receiver.receive(soon()).array, bits(1))


@pytest.mark.parametrize("look_s", [0.0, 5.0])
def test_closing_wakes_a_reader(met: Meeting, look_s: float) -> None:
    _sender, receiver = met.stream()
    receiver.look(look_s)
    reading = InThread(lambda: receiver.receive(soon()))
    while not receiver._pipe._using.locked():
        os.sched_yield()
    receiver.close()
    receiver.close()
    with pytest.raises(StreamClosed, match="closed here"):
        reading.result()
    assert receiver._pipe._sock.fileno() == -1


def test_closing_wakes_a_writer(met: Meeting) -> None:
    sender, receiver = met.stream()
    writing = InThread(lambda: sender.send(b"", np.zeros(MAX_TENSOR_BYTES // 2, np.uint16), soon()))
    while not sender._pipe._using.locked():
        os.sched_yield()
    sender.close()
    with pytest.raises(StreamClosed, match="closed here"):
        writing.result()
    assert not receiver.closed


def test_a_closed_stream_says_so_at_once(met: Meeting) -> None:
    sender, receiver = met.stream()
    sender.close()
    with pytest.raises(StreamClosed, match="near ended"):
        receiver.receive(soon())
    with pytest.raises(StreamClosed, match="closed here"):
        sender.send(b"", bits(1), soon())


def test_what_was_sent_before_a_close_arrives(met: Meeting) -> None:
    sender, receiver = met.stream()
    for _ in range(16):
        sender.send(b"h", bits(16), soon())
    sender.close()
    for _ in range(16):
        np.testing.assert_array_equal(receiver.receive(soon()).array, bits(16))
    with pytest.raises(StreamClosed, match="near ended"):
        receiver.receive(soon())


def test_looking_before_sleeping_changes_nothing_but_time(met: Meeting) -> None:
    sender, receiver = met.stream()
    receiver.look(SHORT_S / 10)
    for n in range(20):
        sender.send(b"%d" % n, bits(1), soon())
        assert receiver.receive(soon()).header == b"%d" % n
    with pytest.raises(StreamStalled):
        receiver.receive(soon(SHORT_S))


def test_who_is_interrupted_while_looking_sleeps_the_next_time(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    _sender, receiver = met.stream()
    receiver.look(SHORT_S / 10)
    pipe = receiver._pipe
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # as if it had not run at all meanwhile
    with pytest.raises(StreamStalled):
        receiver.receive(soon(SHORT_S))
    looked_until = pipe._looks_from
    assert looked_until > 0
    with pytest.raises(StreamStalled):
        receiver.receive(soon(SHORT_S / 10))
    assert pipe._looks_from == looked_until


CHILD = """
import sys, time
import numpy as np
from paceline.net.tensor.dialling import dial
from paceline.net.trust.certificates import FleetRoot
from paceline.net.trust.identity import Identity
own = Identity.from_pem(bytes.fromhex(sys.argv[1]))
member = own.root.member(bytes.fromhex(sys.argv[2]), time.time())
sender = dial([sys.argv[3]], member, bytes.fromhex(sys.argv[4]), own, lambda *_: False, time.perf_counter() + 20)
sender.send(b"alive", np.zeros((1, 4), np.uint16), time.perf_counter() + 20)
sys.stdin.read()
"""


def test_a_peer_that_is_killed_is_noticed_at_once(met: Meeting) -> None:
    expected = met.listener.expect()
    args = [met.near.to_pem().hex(), met.far.member.certificate.hex(), met.address, expected.ticket.hex()]
    with subprocess.Popen([sys.executable, "-c", CHILD, *args], stdin=subprocess.PIPE) as child:
        receiver = expected.wait(soon())
        assert receiver.receive(soon()).header == b"alive"
        child.send_signal(signal.SIGKILL)
        with pytest.raises(StreamClosed, match="near left"):
            receiver.receive(soon())
