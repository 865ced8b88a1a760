"""The process that renders a model's chat template and runs its tokenizer: `python -m paceline.store.tokenizer_child`.

Both are untrusted programs of the model's maker. The system limits their memory and their time here, and no trick gets around that: it refuses more
memory, and ends the process when its time is up. On a system without a limit of memory (macOS), the parent measures it.

Input and output are frames of four bytes of length and a body. A request is JSON, except the first, which is the tokenizer. An answer is one letter, then
ids of four bytes, or an error in JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from array import array
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, Final

from paceline.core.errors import InvalidRequest, PacelineError, RequestError, TemplateRefused, UnsupportedModel
from paceline.core.text import Given

BUILD_BYTES: Final = 1 << 30
"""Memory to build a tokenizer; the largest, of 260,000 tokens, takes a third of it. Raising it: a hostile file may take more memory."""
BUILD_S: Final = 20.0
"""Seconds of CPU time to build a tokenizer; large ones take one second. Raising it: a hostile file occupies a processor for longer."""
RENDER_BYTES: Final = 64 << 20
"""Memory for one text, in addition to `PER_BYTE` for each of its bytes. Raising it: a hostile template may take more memory for a request."""
PER_BYTE: Final = 128
"""Bytes of memory for each byte of a request. For prose the library takes about ninety: the message, its rendered and normalised text, and the tokens.
Raising it: as for `RENDER_BYTES`."""
STATM: Final = Path("/proc/self/statm")
"""File with the size of a process. A system that has it also enforces limits of memory."""
HEAD: Final = struct.Struct("=I")
IDS, FAULT = b"I", b"F"


def limit_of(nbytes: int) -> float:
    """Return the seconds of CPU time that a request of `nbytes` bytes may take. On a busy machine that is longer by the clock."""
    return min(20.0, 2.0 + nbytes / 200_000)


def main() -> None:
    """Answer requests until the parent is gone, or sends none for the seconds in the first argument (0: no limit)."""
    idle_s, limits_memory = map(int, sys.argv[1:])
    # Private copies of stdin and stdout, so that nothing a library prints gets between the frames.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    for ends in (signal.SIGPROF, signal.SIGALRM):  # their default action ends the process at any point
        signal.signal(ends, signal.SIG_DFL)
    if limits_memory:
        _limit_memory(BUILD_BYTES)
    packed = _read(source)
    signal.setitimer(signal.ITIMER_PROF, BUILD_S)
    from paceline.store.tokenizer import unpack_tokenizer

    try:
        tokenizer = unpack_tokenizer(packed, Path("the model's tokenizer"))
    except PacelineError as error:
        _fail(sink, error)
        return
    del packed
    _write(sink, IDS, b"")
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(idle_s)
        data = _read(source)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, limit_of(len(data)))
        if limits_memory:
            _limit_memory(RENDER_BYTES + PER_BYTE * len(data))
        try:
            asked: dict[str, Any] = json.loads(data)
            if "compile" in asked:
                ids = []
                tokenizer.compile_template()
            elif "inside" in asked:
                ids = tokenizer.encode_inside(asked["inside"])
            elif "text" in asked:
                ids = tokenizer.encode(asked["text"], add_special=asked["add_special"])
            else:
                ids = tokenizer.render_chat(asked["messages"], _time(*asked["now"]), Given(**asked["given"]))
        except PacelineError as error:
            _fail(sink, error)
        else:
            _write(sink, IDS, array("I", ids).tobytes())


def write_time(now: datetime) -> tuple[str, str | None]:
    """Return a time in ISO format, and the name of its zone, which a template may show."""
    return now.isoformat(), now.tzname()


def _time(at: str, zone: str | None) -> datetime:
    moment = datetime.fromisoformat(at)
    offset = moment.utcoffset()
    return moment if offset is None or zone is None else moment.replace(tzinfo=timezone(offset, zone))


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its present size."""
    held = int(STATM.read_bytes().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = held + more
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _read(source: BinaryIO) -> bytes:
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        sys.exit()  # the parent is gone
    return source.read(HEAD.unpack(head)[0])


def _write(sink: BinaryIO, kind: bytes, data: bytes) -> None:
    sink.write(HEAD.pack(len(data) + 1) + kind + data)
    sink.flush()


def _fail(sink: BinaryIO, error: PacelineError) -> None:
    field = error.field if isinstance(error, InvalidRequest) else None
    kind = (
        "refused"
        if isinstance(error, TemplateRefused)
        else "request"
        if isinstance(error, RequestError)
        else "unsupported"
        if isinstance(error, UnsupportedModel)
        else "damaged"
    )
    told = {"kind": kind, "message": error.message[:4000], "hint": error.hint[:1000], "field": field}
    _write(sink, FAULT, json.dumps(told).encode())


if __name__ == "__main__":
    main()
