"""Sums of tensor ranks cross a pair of TLS streams in compiled code: between two exchanges runs no Python, which would come cold from memory each time.

What crosses is a tape each way: messages, one or more an exchange, each of pieces in memory that lie on the wire one behind the other. A piece that begins a
frame has its sequence number, and its exchange's, written into it; of what comes, it must be what was expected. Both tapes run as far as they
can, by turns: so neither side waits for the other to read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu import sync
from paceline.backends.cpu.lowering import lowered, write
from paceline.backends.cpu.simd import I32, I64, Emit, Value
from paceline.backends.kernel_cache import in_use

DATA: Final = 0
START: Final = 1
"""A tensor's first frame: its sequence number from the fifth byte on, first byte first, and its exchange's in the last eight, last byte first."""
NEXT: Final = 2
"""A later frame of the same tensor, which has a sequence number alone."""
SEQ_AT: Final = 5
MOST_START: Final = 64
"""Bytes of a piece that begins a frame."""

ADDRESS, LENGTH, KIND = 0, 1, 2
"""Of a piece."""
FIRST, STOP, RANK, JOINED = 0, 1, 2, 3
"""Of a message: its pieces, whose it is, and its length where the pieces are put together, so that they are one record; 0: they are not."""

ALL, NOTHING_MOVES, OTHER, READ_FAILED, WRITE_FAILED, CALLED_OFF = range(6)
"""Why `cross` returned: everything has crossed; nothing moved for a while, and whoever called looks whether there is anything to be waited for, and calls again;
something else came than what was expected, CAME bytes of which are at CAME_AT; a stream is broken; it was called off, between two messages of each tape."""

# Places of the words that `cross` works by. FIRST_EXCHANGE, and EXCHANGES from it on; OUT_EACH and IN_EACH, messages of an exchange; what it reads and writes, and by
# which functions of the library; ARRIVED, as `places` has it; CROWDED, that who waits for a rank sleeps; JOINED_AT and CAME_AT, room for a small message, and for
# the start of what comes; LOOK_NS, how long to look at a stream that brings nothing before it is slept at; ENDS, set to have no further message begin.
# What follows changes: the tapes' sequence numbers, messages done, and piece (-1: none is under way) and byte that each is at; CAME; and bytes MOVED both ways.
(FIRST_EXCHANGE, EXCHANGES, OUT_EACH, IN_EACH, OUT_SSL, IN_SSL, IN_FD, READ, WRITE, ERROR, CLEAR, ARRIVED, CROWDED, JOINED_AT, CAME_AT, LOOK_NS, ENDS,
 OUT_SEQ, IN_SEQ, OUT_DONE, IN_DONE, OUT_PIECE, IN_PIECE, OUT_BYTE, IN_BYTE, BEHIND_IN, CAME, MOVED, N_WORDS) = range(29)  # fmt: skip

_WANT_READ, _WANT_WRITE = 2, 3
_SLEEP_MS = 20
_POLL_IN = 1
_MONOTONIC = time.CLOCK_MONOTONIC
_LOOKS_A_YIELD = 16
_AWAIT_NS = 4_000_000
"""For this side's rank."""

_poll = types.ExternalFunction("poll", types.int32(types.intp, types.uint64, types.int32))
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_copy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uint64))
_differ = types.ExternalFunction("memcmp", types.int32(types.intp, types.intp, types.uint64))


@intrinsic
def _move(_, function, ssl, address, n):
    """SSL_read or SSL_write."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        kind = ir.FunctionType(I32, [I64, I64, I32])
        function, ssl, address, n = args
        return e.b.sext(e.b.call(e.b.inttoptr(function, kind.as_pointer()), [ssl, address, e.b.trunc(n, I32)]), I64)

    return lowered(body, types.int64, types.int64, types.int64, types.int64, types.int64)


@intrinsic
def _error(_, function, ssl, returned):
    """SSL_get_error."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        kind = ir.FunctionType(I32, [I64, I32])
        function, ssl, returned = args
        return e.b.sext(e.b.call(e.b.inttoptr(function, kind.as_pointer()), [ssl, e.b.trunc(returned, I32)]), I64)

    return lowered(body, types.int64, types.int64, types.int64, types.int64)


@intrinsic
def _clear(_, function):
    """ERR_clear_error."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        e.b.call(e.b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])

    return lowered(body, types.void, types.int64)


@inner
def _tried(w, function, ssl, address, n):
    """Bytes that were read or written; 0: none can be now; less: the stream is broken."""
    moved = _move(w[function], w[ssl], address, n)
    if moved > 0:
        w[MOVED] += moved
        return moved
    why = _error(w[ERROR], w[ssl], moved)
    if why in (_WANT_READ, _WANT_WRITE):
        return 0
    _clear(w[CLEAR])
    return -1


@inner
def _mark(piece, seq, exchange):
    """Write into a piece that begins a frame what is its own."""
    at = piece[ADDRESS] + SEQ_AT
    for byte in range(4):
        write(8, at + byte, seq >> (24 - 8 * byte))
    if piece[KIND] == START:
        at = piece[ADDRESS] + piece[LENGTH] - 8
        for byte in range(8):
            write(8, at + byte, exchange >> (8 * byte))


@inner
def _begin(pieces, message, seq, exchange):
    """Mark a message's frames. Returns the sequence number behind them."""
    for i in range(message[FIRST], message[STOP]):
        if pieces[i, KIND] != DATA:
            _mark(pieces[i], seq, exchange)
            seq = (seq + 1) & 0xFFFFFFFF
    return seq


@inner
def _send(w, messages, pieces):
    """What can be sent now of the message that is next. Returns bytes, or less than 0."""
    message = messages[w[OUT_DONE] % len(messages)]
    if w[OUT_PIECE] < 0:
        exchange = w[FIRST_EXCHANGE] + w[OUT_DONE] // w[OUT_EACH]
        if w[ENDS] or sync.load_acquire(w[ARRIVED] + 8 * sync.WORD * message[RANK]) < exchange:
            return 0
        w[OUT_SEQ] = _begin(pieces, message, w[OUT_SEQ], exchange)
        w[OUT_PIECE], w[OUT_BYTE] = message[FIRST], 0
        if message[JOINED]:
            at = w[JOINED_AT]
            for i in range(message[FIRST], message[STOP]):
                _copy(at, pieces[i, ADDRESS], pieces[i, LENGTH])
                at += pieces[i, LENGTH]
    if message[JOINED]:
        address, length = w[JOINED_AT], message[JOINED]
    else:
        address, length = pieces[w[OUT_PIECE], ADDRESS], pieces[w[OUT_PIECE], LENGTH]
    n = _tried(w, WRITE, OUT_SSL, address + w[OUT_BYTE], length - w[OUT_BYTE])
    if n > 0:
        w[OUT_BYTE] += n
        if w[OUT_BYTE] == length:
            w[OUT_BYTE] = 0
            w[OUT_PIECE] += 1
            if message[JOINED] or w[OUT_PIECE] == message[STOP]:
                w[OUT_PIECE] = -1
                w[OUT_DONE] += 1
    return n


@inner
def _take(w, messages, pieces):
    """What is there of the message that is to come next. Returns bytes; -1 where the stream is broken, -2 where something else came."""
    message = messages[w[IN_DONE] % len(messages)]
    exchange = w[FIRST_EXCHANGE] + w[IN_DONE] // w[IN_EACH]
    begins = w[IN_PIECE] < 0
    if begins and w[ENDS]:
        return 0
    piece = pieces[message[FIRST] if begins else w[IN_PIECE]]
    at, is_data = w[IN_BYTE], piece[KIND] == DATA
    n = _tried(w, READ, IN_SSL, (piece[ADDRESS] if is_data else w[CAME_AT]) + at, piece[LENGTH] - at)
    if n <= 0:
        return n
    if begins:
        w[BEHIND_IN] = _begin(pieces, message, w[IN_SEQ], exchange)
        w[IN_PIECE] = message[FIRST]
    if not is_data and _differ(w[CAME_AT] + at, piece[ADDRESS] + at, n):
        w[CAME] = at + n
        return -2
    w[IN_BYTE] += n
    if w[IN_BYTE] == piece[LENGTH]:
        w[IN_BYTE] = 0
        w[IN_PIECE] += 1
        if w[IN_PIECE] == message[STOP]:
            w[IN_PIECE], w[IN_SEQ] = -1, w[BEHIND_IN]
            w[IN_DONE] += 1
            word = w[ARRIVED] + 8 * sync.WORD * message[RANK]
            sync.store_release(word, exchange)
            if w[CROWDED]:
                sync.wake_at(word)
    return n


@inner
def _now(scratch):
    _clock(_MONOTONIC, scratch.ctypes.data)
    return scratch[0] * 1_000_000_000 + scratch[1]


@njit(nogil=True, cache=in_use())
def cross(w, out_messages, out_pieces, in_messages, in_pieces):
    """Have what ranks leave cross, both ways, as far as it goes. Returns why it does not go on; calling again goes on where this left off.

    Args:
        out_messages, in_messages: of the first exchanges, which are repeated.
    """
    scratch = np.zeros(3, np.int64)
    _clear(w[CLEAR])
    outs, ins = w[EXCHANGES] * w[OUT_EACH], w[EXCHANGES] * w[IN_EACH]
    looked, idle_from = 0, 0
    while True:
        moved = 0
        if w[OUT_DONE] < outs:
            n = _send(w, out_messages, out_pieces)
            if n < 0:
                return WRITE_FAILED
            moved += n
        if w[IN_DONE] < ins:
            n = _take(w, in_messages, in_pieces)
            if n < 0:
                return READ_FAILED if n == -1 else OTHER
            moved += n
        if w[OUT_DONE] == outs and w[IN_DONE] == ins:
            return ALL
        if w[ENDS] and w[OUT_PIECE] < 0 and w[IN_PIECE] < 0:
            return CALLED_OFF
        if moved:
            looked = 0
            continue
        looked += 1
        now = _now(scratch)
        if looked == 1:
            idle_from = now
        # The rank of this side is waited for where it has all that it needs for what is to be sent next.
        if w[OUT_DONE] < outs and w[OUT_PIECE] < 0 and w[OUT_DONE] // w[OUT_EACH] <= w[IN_DONE] // w[IN_EACH]:
            message = out_messages[w[OUT_DONE] % len(out_messages)]
            word, exchange = w[ARRIVED] + 8 * sync.WORD * message[RANK], w[FIRST_EXCHANGE] + w[OUT_DONE] // w[OUT_EACH]
            seen = sync.load_acquire(word)
            if w[CROWDED] and seen < exchange:
                sync.sleep_at(word, seen)
            elif looked % _LOOKS_A_YIELD == 0:
                sync.give_way()
            else:
                sync.pause()
            if now - idle_from > _AWAIT_NS:
                return NOTHING_MOVES
        elif now - idle_from <= w[LOOK_NS]:
            if looked % _LOOKS_A_YIELD == 0:
                sync.give_way()
            else:
                sync.pause()
        else:
            if w[OUT_PIECE] < 0:  # else it is the peer that takes nothing
                scratch[2] = w[IN_FD] | _POLL_IN << 32
                _poll(scratch.ctypes.data + 16, 1, _SLEEP_MS)
            else:
                sync.give_way()
            return NOTHING_MOVES


def prepare() -> None:
    """Compile it, or read what was compiled: before others wait for it."""
    table = types.Array(types.int64, 2, "C")
    cross.compile((types.Array(types.int64, 1, "C"), table, table, table, table))
