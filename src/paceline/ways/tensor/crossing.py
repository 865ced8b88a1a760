"""All exchanges of a command over one pair of tensor streams, in compiled code (`backends.cpu.crossing`): what a pump has it do where the streams can be lent to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import crossing as at
from paceline.backends.cpu.crossing import cross
from paceline.core.errors import StreamClosed, StreamCorrupt, StreamStalled
from paceline.net.tensor.ends import JOINED_BYTES, TensorReceiver, TensorSender
from paceline.net.tensor.frames import CODES, starts
from paceline.ways.tensor import frames
from paceline.ways.tensor.memory import GroupMemory

Words = npt.NDArray[np.int64]
Half = bool | None
"""Of a layer: attention's end False, the feed-forward's True; None: the head's end."""
_FP32: Final = CODES[np.dtype(np.float32)]
_STALLED: Final = -1


class CalledOff(Exception):
    """What the ranks are at is void."""


class SeesSums(Protocol):
    """Where a rank leaves what it does at an exchange, in this side's memory."""

    def __call__(self, half: Half, rows: int, rank: int) -> npt.NDArray[np.float32]: ...


def _extents(view: npt.NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Addresses and lengths of what lies in one piece."""
    if view.flags.c_contiguous:
        yield int(view.ctypes.data), view.nbytes
    else:
        for part in view:
            yield from _extents(part)


class Crossing:
    """Of one pump, and its thread's alone.

    Args:
        outs, ins: ranks whose sums go out at each exchange, and those whose come in, in their order.
        stalled_s: for which nothing may move once a message is under way.
    """

    def __init__(
        self,
        memory: GroupMemory,
        sender: TensorSender,
        receiver: TensorReceiver,
        outs: Sequence[int],
        ins: Sequence[int],
        view: SeesSums,
        *,
        look_s: float,
        stalled_s: float,
    ) -> None:
        self._memory, self._sender, self._receiver, self._outs, self._ins, self._view = memory, sender, receiver, outs, ins, view
        self._look_ns, self._stalled_s = int(1e9 * look_s), stalled_s
        self._joined, self._came = np.empty(JOINED_BYTES, np.uint8), np.empty(at.MOST_START, np.uint8)
        self._words = np.zeros(at.N_WORDS, np.int64)
        own, its = sender.native, receiver.native
        self.is_possible = own is not None and its is not None
        """Whether streams can be lent here."""
        if own is not None and its is not None:
            places = [at.OUT_SSL, at.IN_SSL, at.IN_FD, at.READ, at.WRITE, at.ERROR, at.CLEAR]
            self._words[places] = own.ssl, its.ssl, its.fd, own.read, own.write, own.error, own.clear
        places = [at.OUT_EACH, at.IN_EACH, at.ARRIVED, at.JOINED_AT, at.CAME_AT]
        addresses = (memory.arrived_address, self._joined.ctypes.data, self._came.ctypes.data)
        self._words[places] = len(outs), len(ins), *addresses
        self._rows = 0
        self._tapes = dict[tuple[Half, ...], tuple[Words, Words, Words, Words]]()
        self._kept = list[npt.NDArray[np.uint8]]()
        """Starts of frames that tapes lead to."""

    def run(self, first: int, halves: Sequence[Half], rows: int, check: Callable[[], None]) -> bool:
        """Exchanges from that number on. Returns whether all have crossed; else something else came than sums, which is the receiver's next message.

        Args:
            check: called now and then; what it raises ends this, `CalledOff` behind what is under way.

        Raises:
            CalledOff: as `check` says.
            TensorStreamError: a stream is broken.
        """
        tapes, words = self._tapes_of(tuple(halves[:2]), rows), self._words
        words[[at.FIRST_EXCHANGE, at.EXCHANGES, at.CROWDED]] = first, len(halves), self._memory.is_crowded
        words[[at.OUT_DONE, at.IN_DONE, at.OUT_BYTE, at.IN_BYTE, at.ENDS]] = 0
        words[[at.OUT_PIECE, at.IN_PIECE]] = -1
        is_start, other = True, b""
        with self._sender.lent() as words[at.OUT_SEQ], self._receiver.lent() as words[at.IN_SEQ]:
            how = self._cross(tapes, check)
            if how == at.OTHER:
                other = self._came[: words[at.CAME]].tobytes()
                is_start = bool(words[at.IN_PIECE] == tapes[2][words[at.IN_DONE] % len(tapes[2]), at.FIRST])
                words[[at.IN_DONE, at.IN_PIECE, at.ENDS]] = words[at.EXCHANGES] * len(self._ins), -1, 1
                how = self._cross(tapes, check)  # to the end of what it is sending
            self._sender.tell_lent(int(words[at.OUT_SEQ]))
            self._receiver.tell_lent(int(words[at.IN_SEQ]))
        if how == _STALLED:
            raise self._sender.broken(StreamStalled(f"{self._sender.peer} sends or takes nothing on a tensor stream"))
        if how == at.WRITE_FAILED:
            raise self._sender.broken(StreamClosed(f"{self._sender.peer} left a tensor stream"))
        if how == at.READ_FAILED:
            raise self._receiver.refuse(StreamClosed(f"{self._receiver.peer} left a tensor stream"))
        if not is_start:
            raise self._receiver.refuse(StreamCorrupt("What came within a tensor is no part of it"))
        if other:
            self._receiver.put_back(other)
        elif how == at.CALLED_OFF:
            raise CalledOff
        return not other

    def _cross(self, tapes: tuple[Words, Words, Words, Words], check: Callable[[], None]) -> int:
        words, since, moved = self._words, time.monotonic(), -1
        while True:
            words[at.LOOK_NS] = self._look_ns if words[at.MOVED] != moved else 0
            if words[at.MOVED] != moved:
                since, moved = time.monotonic(), int(words[at.MOVED])
            if (how := cross(words, *tapes)) != at.NOTHING_MOVES:
                return how
            under_way = words[at.OUT_PIECE] >= 0 or words[at.IN_PIECE] >= 0
            if under_way and words[at.MOVED] == moved and time.monotonic() - since > self._stalled_s:
                return _STALLED
            if not words[at.ENDS]:
                try:
                    check()
                except CalledOff:
                    words[at.ENDS] = 1

    def _tapes_of(self, halves: tuple[Half, ...], rows: int) -> tuple[Words, Words, Words, Words]:
        if rows != self._rows:
            self._rows = rows
            self._tapes.clear()
            self._kept.clear()
        if halves not in self._tapes:
            self._tapes[halves] = *self._tape(halves, rows, self._outs), *self._tape(halves, rows, self._ins)
        return self._tapes[halves]

    def _tape(self, halves: tuple[Half, ...], rows: int, ranks: Sequence[int]) -> tuple[Words, Words]:
        """Messages and pieces of so many exchanges."""
        messages, pieces = list[tuple[int, int, int, int]](), list[tuple[int, int, int]]()
        for half in halves:
            for rank in ranks:
                first = len(pieces)
                pieces += self._pieces(self._view(half, rows, rank))
                length = sum(piece[at.LENGTH] for piece in pieces[first:])
                messages.append((first, len(pieces), rank, length if length <= JOINED_BYTES else 0))
        return np.array(messages, np.int64), np.array(pieces, np.int64)

    def _pieces(self, view: npt.NDArray[np.float32]) -> Iterator[tuple[int, int, int]]:
        extents = list(_extents(view))[::-1] if view.size else []
        for number, (start, n) in enumerate(starts(frames.numbered(frames.SUMS, 0), view.nbytes, _FP32, view.shape)):
            kept = np.frombuffer(bytearray(start), np.uint8)
            self._kept.append(kept)
            yield int(kept.ctypes.data), len(start), at.NEXT if number else at.START
            left = n
            while left:
                address, length = extents.pop()
                part = min(left, length)
                yield address, part, at.DATA
                left -= part
                if part < length:
                    extents.append((address + part, length - part))
