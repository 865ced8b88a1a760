"""The output of an engine that this node started: one file for each start, the last lines for errors, and whether the engine ran out of memory."""

from __future__ import annotations

import os
import re
from collections import deque
from enum import StrEnum
from pathlib import Path
from typing import Final

from paceline.core.text import escaped

KEPT_LOGS: Final = 12
"""Log files of one engine. Raising it: older starts can be looked at; each file holds up to 1 MiB."""
HEAD_BYTES: Final = 768 << 10
"""Bytes at the beginning of a start's output that its file keeps. The load is there, with the model's properties and the split over devices."""
TAIL_BYTES: Final = 256 << 10
"""Bytes at the end of the output that the file keeps if the output is longer. Raising either: longer logs; more disk."""
SHOWN_LINES: Final = 12
"""Last lines that an error shows."""
_MAX_LINE: Final = 4096


class Memory(StrEnum):
    """The memory that was too small."""

    DEVICE = "device"
    HOST = "host"


_DEVICE = re.compile(
    r"cudaMalloc failed|CUDA error: out of memory|CUDA out of memory|hipMalloc failed|hipErrorOutOfMemory|HIP out of memory|ErrorOutOfDeviceMemory"
    r"|kIOGPUCommandBufferCallbackErrorOutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|Insufficient Memory"
    r"|(?:allocat\w+|alloc_buffer\w*)[^\n]*\b(?:CUDA|ROCm|HIP|Vulkan|Metal|MTL|SYCL|OpenCL|CANN)\d*(?:_Split)? buffer"
    r"|No available memory for the cache blocks|larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)"
    r"|Free memory on device [^\n]* is less than",
    re.IGNORECASE,
)
"""Lines of llama.cpp's backends (CUDA, HIP, Vulkan, Metal, SYCL), of torch and of vLLM, as of 2026-11."""
_HOST = re.compile(
    r"(?:failed|unable) to allocate[^\n]*\bCPU\w*[^\n]* buffer|std::bad_alloc|Cannot allocate memory|ErrorOutOfHostMemory"
    r"|DefaultCPUAllocator: can't allocate|MemoryError|failed to allocate compute buffers|failed to allocate buffer for kv cache",
    re.IGNORECASE,
)


_CAUSE = re.compile(
    r"(?:error loading model|CUDA error|what\(\)|RuntimeError|ValueError|ImportError|ModuleNotFoundError): +(\S.*)|(GGML_ASSERT.*)"
)
"""Words that llama.cpp, C++ and Python print before the reason for a failure."""


def memory_lacked(line: str) -> Memory | None:
    """Return the memory that a line of an engine's output says was too small; None if it says nothing like it."""
    if _DEVICE.search(line):
        return Memory.DEVICE
    return Memory.HOST if _HOST.search(line) else None


class EngineLog:
    """The output of one start.

    Args:
        folder: folder of the engine's logs; it is created.
        name: beginning of the files' names.
        at: time of the start in Unix seconds; files of one engine sort by it.
        secret: a text that is replaced in everything that is kept.
    """

    def __init__(self, folder: Path, name: str, at: float, secret: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        earlier = sorted(folder.glob(f"{name}-*.log"))
        for path in earlier[: max(0, len(earlier) - KEPT_LOGS + 1)]:
            path.unlink(missing_ok=True)
        self.path = folder / f"{name}-{int(at * 1000):015d}.log"
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)
        self._secret = secret
        self.n_bytes = 0
        """Bytes of output so far."""
        self._written = 0
        self._rest = b""
        self._late, self._late_bytes, self._n_dropped = deque[bytes](), 0, 0
        self._last = deque[str](maxlen=SHOWN_LINES)
        self.cause = ""
        """The first reason for a failure that the engine printed, safe to show; empty: none was recognised."""
        self.lacked: Memory | None = None
        """The memory that the engine said was too small. A device's counts before the machine's own: on failure both are often named."""

    def write(self, data: bytes) -> None:
        """Take output, in pieces of any size."""
        self.n_bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode(errors="replace").rstrip("\r")
        if self._secret:
            text = text.replace(self._secret, "[key]")
        if text.strip():
            self._last.append(text)
        if not self.cause and (found := _CAUSE.search(text)):
            self.cause = escaped((found[1] or found[2])[:300])
        lacked = memory_lacked(text)
        if lacked is not None and self.lacked is not Memory.DEVICE:
            self.lacked = lacked
        kept = text.encode() + b"\n"
        if self._written + len(kept) <= HEAD_BYTES:
            self._file.write(kept)
            self._written += len(kept)
            return
        self._written = HEAD_BYTES
        self._late.append(kept)
        self._late_bytes += len(kept)
        while self._late_bytes > TAIL_BYTES:
            gone = len(self._late.popleft())
            self._late_bytes -= gone
            self._n_dropped += gone

    def last_lines(self) -> str:
        """Return the last lines, safe to show."""
        return "\n".join(escaped(line[:400]) for line in self._last)

    def close(self) -> None:
        """Write what is still to be written. Idempotent."""
        if self._file.closed:
            return
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        if self._n_dropped:
            self._file.write(b"[... %d bytes are left out here ...]\n" % self._n_dropped)
        for kept in self._late:
            self._file.write(kept)
        self._late.clear()
        self._file.close()
