"""The output of an engine that this node started: one file for each start, the last lines for errors, and whether the engine ran out of memory.

Laws:
- An engine is never held up by its output: reading goes on if the disk is full, and costs little however much the engine prints.
- No part of the engine's key is kept.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final

from paceline.core.text import escaped
from paceline.engines.refusals import parts_of

logger = logging.getLogger(__name__)

KEPT_LOGS: Final = 12
"""Log files of one engine. Raising it: older starts can be looked at; each file holds up to 1 MiB."""
HEAD_BYTES: Final = 768 << 10
"""Bytes at the beginning of a start's output that its file keeps. The load is there, with the model's properties and the split over devices."""
TAIL_BYTES: Final = 256 << 10
"""Bytes at the end of the output that the file keeps if the output is longer. Raising either: longer logs; more disk."""
SHOWN_LINES: Final = 12
"""Last lines that an error shows."""
SHOWN_LETTERS: Final = 400
"""Letters of each of them."""
_MAX_LINE: Final = 4096
"""Bytes of a line until which its end is waited for."""


class Memory(StrEnum):
    """The memory that was too small."""

    DEVICE = "device"
    HOST = "host"


_DEVICE = re.compile(
    r"cudaMalloc failed|CUDA error: out of memory|CUDA out of memory|hipMalloc failed|hipErrorOutOfMemory|HIP out of memory|ErrorOutOfDeviceMemory"
    r"|kIOGPUCommandBufferCallbackErrorOutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|Insufficient Memory"
    r"|(?:allocat|alloc_buffer)[^\n]{1,80}\b(?:CUDA|ROCm|HIP|Vulkan|Metal|MTL|SYCL|OpenCL|CANN)\d*(?:_Split)? buffer"
    r"|No available memory for the cache blocks|larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)"
    r"|Free memory on device [^\n]{1,80} is less than",
    re.IGNORECASE,
)
"""Lines of llama.cpp's backends (CUDA, HIP, Vulkan, Metal, SYCL), of torch and of vLLM, as of 2026-11. Gaps have bounds: without them the
time grows with the square of a line's length."""
_HOST = re.compile(
    r"(?:failed|unable) to allocate[^\n]{1,80}\bCPU[^\n]{0,40} buffer|std::bad_alloc|Cannot allocate memory|ErrorOutOfHostMemory"
    r"|DefaultCPUAllocator: can't allocate|MemoryError|failed to allocate compute buffers|failed to allocate buffer for kv cache",
    re.IGNORECASE,
)


_CAUSE = re.compile(
    r"(?:error loading model|CUDA error|what\(\)|RuntimeError|ValueError|ImportError|ModuleNotFoundError): +(\S.*)|(GGML_ASSERT.*)"
)
"""Words that llama.cpp, C++ and Python print before the reason for a failure."""


def memory_lacked(lines: str) -> Memory | None:
    """Return the memory that lines of an engine's output say was too small, a device's first; None if they say nothing like it."""
    if not _has_any(("alloc", "memory", "kv cache"), lines):
        return None
    if _DEVICE.search(lines):
        return Memory.DEVICE
    return Memory.HOST if _HOST.search(lines) else None


def _has_any(words: tuple[str, ...], text: str) -> bool:
    """Return whether one of the words occurs in any case: a look that costs a fiftieth of the patterns, each of which holds one of them."""
    lower = text.lower()
    return any(word in lower for word in words)


class EngineLog:
    """The output of one start. Without room on the disk it is kept in memory alone.

    Args:
        folder: folder of the engine's logs; it is created.
        name: beginning of the files' names.
        at: time of the start in Unix seconds; files of one engine sort by it.
        secret: the engine's key. Every part of it that `refusals.parts_of` finds is replaced in what is kept.
    """

    def __init__(self, folder: Path, name: str, at: float, secret: str) -> None:
        self.path = folder / f"{name}-{int(at * 1000):015d}.log"
        parts = parts_of(secret)
        self._parts = parts
        self._part = re.compile(f"(?:(?={'|'.join(map(re.escape, parts))}).)+.{{0,{len(parts[0]) - 1}}}") if parts else None
        """Matches where parts begin one after the other, and the rest of the last one."""
        self.n_bytes = 0
        """Bytes of output so far."""
        self._written = 0
        self._rest = b""
        self._late, self._n_dropped = bytearray(), 0
        """Output after the head. It is not looked at until it is asked for."""
        self._last: list[str] = []
        """Last lines of the head."""
        self._cause, self._lacked = "", None
        self._file: BinaryIO | None = None
        try:
            self._file = self._open(folder, name)
        except OSError as error:
            self._give_up(error)

    _lacked: Memory | None

    def _open(self, folder: Path, name: str) -> BinaryIO:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        earlier = sorted(folder.glob(f"{name}-*.log"))
        for path in earlier[: max(0, len(earlier) - KEPT_LOGS + 1)]:
            path.unlink(missing_ok=True)
        return os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)

    @property
    def cause(self) -> str:
        """The first reason for a failure that the engine printed, safe to show; empty: none was recognised."""
        return self._cause or _cause_of(self._tail())

    @property
    def lacked(self) -> Memory | None:
        """The memory that the engine said was too small. A device's counts before the machine's own: on failure both are often named."""
        return self._lacked if self._lacked is Memory.DEVICE else memory_lacked(self._tail()) or self._lacked

    def write(self, data: bytes) -> None:
        """Take output, in pieces of any size."""
        self.n_bytes += len(data)
        if self._written >= HEAD_BYTES:
            self._put_late(self._rest + data)
            self._rest = b""
            return
        lines, end, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > _MAX_LINE:
            lines, end, self._rest = lines + end, self._rest, b""
        if lines or end:
            self._take(lines + end)

    def _take(self, lines: bytes) -> None:
        """Keep lines of the head. They are searched together: an engine may print millions."""
        text = self._shown(lines)
        self._cause = self._cause or _cause_of(text)
        if self._lacked is not Memory.DEVICE:
            self._lacked = memory_lacked(text) or self._lacked
        kept, room = text.encode(), HEAD_BYTES - self._written
        self._put(kept[:room])
        self._last = _last_of(self._last, kept[:room].decode(errors="replace"))
        self._put_late(kept[room:])
        self._written += len(kept[:room])

    def _put_late(self, data: bytes) -> None:
        self._late += data
        if len(self._late) > 2 * TAIL_BYTES:
            gone = len(self._late) - TAIL_BYTES
            del self._late[:gone]
            self._n_dropped += gone

    def _tail(self) -> str:
        """Return what is kept of the lines after the head. The first may have lost its beginning, and the last may not have ended yet."""
        return self._shown(bytes(self._late[-TAIL_BYTES:]) + self._rest)

    def _shown(self, lines: bytes) -> str:
        """Return lines as they are kept: without parts of the key."""
        text = lines.decode(errors="replace").replace("\r\n", "\n")
        if self._part is not None and any(part in text for part in self._parts):
            text = self._part.sub("[key]", text)
        return text

    def _put(self, data: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write no more to the file. Said once for each start."""
        logger.warning("%s can't be written, and the engine's output is dropped: %s", self.path, error.strerror or error)
        self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def last_lines(self) -> str:
        """Return the last lines, safe to show."""
        return "\n".join(escaped(line) for line in _last_of(self._last, self._tail()))

    def close(self) -> None:
        """Write what is still to be written. Idempotent."""
        rest, self._rest = self._rest, b""
        if rest:
            self._take(rest + b"\n")
        if self._file is None:
            return
        dropped = self._n_dropped + max(0, len(self._late) - TAIL_BYTES)
        if dropped:
            self._put(b"[... %d bytes are left out here ...]\n" % dropped)
        self._put(self._tail().encode()[-TAIL_BYTES:])
        self._shut()


def _cause_of(text: str) -> str:
    found = _CAUSE.search(text) if _has_any(("error", "what()", "ggml_assert"), text) else None
    return escaped((found[1] or found[2])[:300]) if found else ""


def _last_of(before: list[str], text: str) -> list[str]:
    """Return the last lines that say something, cut for an error."""
    lines = [line[:SHOWN_LETTERS] for line in text[-_MAX_LINE * SHOWN_LINES :].split("\n") if line.strip()]
    return [*before, *lines][-SHOWN_LINES:]
