"""The bytes of a tensor stream. A frame is its kind (1 byte), the length of its body (4 bytes, as all numbers the first byte first), its body.

    who        kind     body
    sender     HELLO    magic, ticket (32 bytes)
    receiver   WELCOME
    sender     TENSOR   seq u32, header length u32, bytes of the whole tensor u64, dtype u8, dimensions u8, each u32, header, first data
    sender     CHUNK    seq u32, data
    receiver   ACK      seq u32: every chunk before it has arrived
    either     CLOSE    code u8, message (UTF-8)

Header and data of a TENSOR, or the data of a CHUNK, are at most 1 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct

import numpy as np

from paceline.core.errors import StreamClosed, StreamCorrupt, StreamStalled, TensorStreamError, TensorTooLarge
from paceline.core.shown import printable

TICKET_BYTES = 32
"""Drawn by who expects a stream, shown by who opens it."""
MAGIC = b"PLTS\x01"
"""The last byte is the version of all this."""
MAX_CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 512 << 10
MAX_TENSOR_BYTES = 64 << 20
MAX_DIMENSIONS = 4
MAX_MESSAGE_BYTES = 512
WINDOW = 16
"""Chunks that may be on their way, unacknowledged."""

HEAD = Struct("!BI")
TENSOR = Struct("!IIQBB")
SEQ = Struct("!I")
SHAPES = tuple(Struct(f"!{n}I") for n in range(MAX_DIMENSIONS + 1))
_TENSOR_START = tuple(Struct(f"!BIIIQBB{n}I") for n in range(MAX_DIMENSIONS + 1))
_CHUNK_START = Struct("!BII")
MAX_START_BYTES = max(start.size for start in _TENSOR_START)


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    TENSOR = 3
    CHUNK = 4
    ACK = 5
    CLOSE = 6


class CloseCode(IntEnum):
    """Why a stream ends."""

    DONE = 0
    REFUSED = 1
    CORRUPT = 2
    TOO_LARGE = 3
    STALLED = 4


LENGTHS: dict[int, tuple[int, int]] = {
    Kind.HELLO: (len(MAGIC) + TICKET_BYTES, len(MAGIC) + TICKET_BYTES),
    Kind.WELCOME: (0, 0),
    Kind.TENSOR: (TENSOR.size, TENSOR.size + 4 * MAX_DIMENSIONS + MAX_CHUNK_BYTES),
    Kind.CHUNK: (SEQ.size + 1, SEQ.size + MAX_CHUNK_BYTES),
    Kind.ACK: (SEQ.size, SEQ.size),
    Kind.CLOSE: (1, 1 + MAX_MESSAGE_BYTES),
}
"""The shortest and the longest body of each kind."""

BF16, FP16, FP32 = 1, 2, 3
DTYPES: dict[int, np.dtype[np.generic]] = {BF16: np.dtype(np.uint16), FP16: np.dtype(np.float16), FP32: np.dtype(np.float32)}
"""What an array of a code holds. numpy has no bf16: its bits are uint16."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

_ERRORS: dict[int, type[TensorStreamError]] = {
    CloseCode.CORRUPT: StreamCorrupt,
    CloseCode.TOO_LARGE: TensorTooLarge,
    CloseCode.STALLED: StreamStalled,
}


def hello(ticket: bytes) -> bytes:
    return HEAD.pack(Kind.HELLO, len(MAGIC) + len(ticket)) + MAGIC + ticket


WELCOME = HEAD.pack(Kind.WELCOME, 0)


def tensor_start(seq: int, header_bytes: int, total: int, dtype: int, shape: Sequence[int], n_data: int) -> bytes:
    """What comes before a TENSOR's header and its first `n_data` bytes of data."""
    n = len(shape)
    body = TENSOR.size + 4 * n + header_bytes + n_data
    return _TENSOR_START[n].pack(Kind.TENSOR, body, seq, header_bytes, total, dtype, n, *shape)


def chunk_start(seq: int, n_data: int) -> bytes:
    """What comes before a CHUNK's data."""
    return _CHUNK_START.pack(Kind.CHUNK, SEQ.size + n_data, seq)


def ack(seq: int) -> bytes:
    return _CHUNK_START.pack(Kind.ACK, SEQ.size, seq)


def close(code: int, message: str) -> bytes:
    text = message.encode()[:MAX_MESSAGE_BYTES]
    return HEAD.pack(Kind.CLOSE, 1 + len(text)) + bytes([code]) + text


def code_of(error: TensorStreamError) -> CloseCode:
    """How the other side is told of an error."""
    for code, kind in _ERRORS.items():
        if isinstance(error, kind):
            return CloseCode(code)
    return CloseCode.DONE


def error_of(code: int, message: str, who: str) -> TensorStreamError:
    """What a CLOSE of the other side means here."""
    said = printable(message)
    return _ERRORS.get(code, StreamClosed)(f"{who} ended the tensor stream" + (f": {said}" if said else ""))
