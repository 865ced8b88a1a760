"""NIXL between two processes of one user on one host: one process reads the other's memory, without a socket in between.

Law: UCX, the transport below NIXL, authenticates no peer. Over TCP, any peer that reaches its port can write this process's memory, and the parser
of an agent's description trusts its input. So an agent here has only shared-memory transports and no port. It connects only to a process that proved
(`HostDoor`) to run as this user on this host: such a process may read and write this one's memory anyway. The only thing written into another
process is the token that says what was read.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hmac
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from asyncio.trsock import TransportSocket
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.core.errors import NixlFailed
from paceline.core.ids import NodeId

PACKAGE: Final = "nixl_cu12"
"""The only build of NIXL that is used. For memory of processors it needs no part of CUDA."""
PROOF_BYTES: Final = 32
TOKEN_BYTES: Final = 16
PIECE_BYTES: Final = 1 << 20
"""Bytes of one read, which holds the interpreter lock. Raising it: fewer calls, and other threads wait longer; lowering it: more calls for each slot."""
KNOCK_S: Final = 1.0
PAUSE_S: Final = 200e-6
"""Seconds between two checks of an unfinished read. Raising it: each read ends later; lowering it: more time goes into checks."""
_PEER = struct.Struct("3i")
_SETTINGS = {
    "UCX_TLS": "posix,cma,self",
    "UCX_MODULES": "cma",  # no other modules are loaded: those of network cards would search for cards
    "UCX_HANDLE_ERRORS": "none",  # signals stay Python's
    "UCX_MEM_EVENTS": "n",  # malloc stays the system's
    "UCX_VFS_ENABLE": "n",
    "UCX_LOG_LEVEL": "fatal",  # errors are raised instead
    "NIXL_LOG_LEVEL": "FATAL",
}
_FOLDERS_SETTINGS = "ucx.conf"
"""File from which UCX reads settings in the current folder. Another user may have written it, and it can name libraries to load and files to write."""


def is_installed() -> bool:
    """Return whether this system can have an agent. Loads nothing."""
    return sys.platform == "linux" and find_spec(PACKAGE) is not None


class HostDoor:
    """Socket that gives a proof of presence to processes of this user on this host, if this process may read their memory. Lives on the event loop.

    A proof is for one node and one ticket. A proof that is passed on is useless to another node, and for another stream.
    """

    def __init__(self) -> None:
        self.name, self._secret = secrets.token_hex(16), secrets.token_bytes(PROOF_BYTES)
        self._listening: asyncio.Server | None = None

    async def open(self) -> None:
        """Open the socket. Raises OSError if the system has no abstract Unix sockets."""
        self._listening = await asyncio.start_unix_server(self._answer, _path(self.name))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def proof(self, node_id: NodeId, ticket: bytes) -> bytes:
        """Return the proof (`PROOF_BYTES` bytes) that the node with this ticket must present. Any thread."""
        return self._seal(_visit(node_id, ticket))

    def _seal(self, visit: bytes) -> bytes:
        return hmac.digest(self._secret, visit, "sha256")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, EOFError):  # the process that knocked is gone, or sends nothing
                if (process := _own_process(writer.get_extra_info("socket"))) and _may_be_read(process):
                    async with asyncio.timeout(KNOCK_S):
                        writer.write(self._seal(await reader.readexactly(PROOF_BYTES)))
        finally:
            writer.close()


def knock(name: str, node_id: NodeId, ticket: bytes) -> bytes | None:
    """Get a proof for this node and a ticket from the door called `name`. Blocks, for at most `KNOCK_S` a step.

    Returns:
        The proof; None if no such door of this user is on this host.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(KNOCK_S)
        try:
            sock.connect(_path(name))
            if not _own_process(sock):
                return None
            sock.sendall(_visit(node_id, ticket))
            proof = sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
        except OSError:
            return None
        return proof if len(proof) == PROOF_BYTES else None


def _visit(node_id: NodeId, ticket: bytes) -> bytes:
    """Return the digest that names the node that knocks and its ticket. All tickets have one length, so the two can't run into each other."""
    return blake2b(ticket + node_id.encode(), digest_size=PROOF_BYTES).digest()


def _path(name: str) -> str:
    """Return the address of a door in Linux's abstract namespace, which belongs to the network namespace. No file is left behind."""
    return f"\0paceline-{name}"


def _own_process(sock: socket.socket | TransportSocket) -> int:
    """Return the id of the process at the other end, if it is this user's; 0 otherwise, and for a process out of sight in another container."""
    process, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process if user == os.geteuid() else 0


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _may_be_read(process: int) -> bool:
    """Return whether the kernel lets this process read another's memory. If not, UCX makes the other process send it, which then must neither end nor
    sleep.
    """
    try:
        if any(Path(f"/proc/{process}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink() for kind in ("pid", "user")):
            return False
    except OSError:
        return False
    into, at_nothing = ctypes.create_string_buffer(1), 8
    here, there = _Span(ctypes.addressof(into), 1), _Span(at_nothing, 1)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    ctypes.CDLL(None, use_errno=True).process_vm_readv(process, ctypes.byref(here), one, ctypes.byref(there), one, none)
    return ctypes.get_errno() == errno.EFAULT  # the kernel looked at the address, and nothing is mapped there


class StagedMemory:
    """Memory in slots, which an agent's peer may read or which receives a peer's data. Made by `NixlAgent.stage`."""

    def __init__(self, agent: NixlAgent, n_slots: int, slot_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self._memory = memoryview(mmap.mmap(-1, n_slots * slot_bytes, flags=flags))
        self.n_slots, self.slot_bytes = n_slots, slot_bytes
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._agent = agent
        self._registered = [agent.call("register_memory", [(self.address, len(self._memory), 0, "")], "DRAM")]

    def slot(self, place: int) -> memoryview:
        return self._memory[place * self.slot_bytes : (place + 1) * self.slot_bytes]

    def describe(self) -> bytes:
        """Return the description that a peer needs to open this memory."""
        return self._agent.call("get_partial_agent_metadata", self._registered[0], True, ["UCX"])

    def close(self) -> None:
        """Stop peers from reading it. The memory itself is freed with the last slot in use. Idempotent, from any thread."""
        with suppress(IndexError):
            self._agent.call("deregister_memory", self._registered.pop())


class NixlAgent:
    """NIXL agent of one node. Thread-safe.

    Raises:
        NixlFailed: the library is missing, or can't be used here. All methods raise it, too.
    """

    def __init__(self) -> None:
        os.environ.update(_SETTINGS)
        if Path(_FOLDERS_SETTINGS).exists():
            raise NixlFailed(f"NIXL is not used: UCX would take settings from {_FOLDERS_SETTINGS} in the current folder")
        try:
            api = import_module(f"{PACKAGE}._api")
            bindings = import_module(f"{PACKAGE}._bindings")
            self.version = metadata.version(PACKAGE)
        except (ImportError, OSError) as error:
            raise NixlFailed(f"NIXL can't be loaded: {error}") from error
        made = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = (*made, RuntimeError, ValueError)
        self._lock = threading.Lock()
        self._read = Counter[bytes]()
        """Slots of each transfer that its peer has read, by the transfer's token."""
        self._met = Counter[str]()
        """Open readings of each peer's memory, by the peer's name."""
        self._lost: list[object] = []
        """Handles and memory of reads that did not end. The library may still write into them, so they are never reused or freed."""
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
        try:
            self._agent: Any = api.nixl_agent(f"paceline-{secrets.token_hex(8)}", config)
        except self._errors as error:
            raise NixlFailed(f"NIXL makes no agent: {error}") from error
        # UCX's shared memory has no other mode. The reader notices a peer that is gone, and so does the tensor stream next to it.
        self.call("create_backend", "UCX", {"ucx_error_handling_mode": "none"})

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library; its errors become NixlFailed."""
        try:
            return getattr(self._agent, name)(*arguments)
        except self._errors as error:
            raise NixlFailed(f"NIXL's {name} failed: {error}") from error

    def stage(self, n_slots: int, slot_bytes: int) -> StagedMemory:
        """Allocate and register memory for one transfer."""
        return StagedMemory(self, n_slots, slot_bytes)

    # ------------------------------------------------------------------------------------------------------------- whose memory is read

    def listen(self, token: bytes) -> None:
        """Begin to count what a peer reads of a transfer."""
        with self._lock:
            self._read[token] = 0

    def n_read(self, token: bytes) -> int:
        """Return how many slots of a transfer its peer has read so far."""
        with self._lock:
            for tokens in self.call("get_new_notifs").values():
                self._read.update(one for one in tokens if one in self._read)
            return self._read[token]

    def forget(self, token: bytes) -> None:
        with self._lock:
            self._read.pop(token, None)

    # -------------------------------------------------------------------------------------------------------------------- who reads

    def meet(self, described: bytes) -> str:
        """Open a peer's memory for reading. The peer must have proved to be on this host (`HostDoor`). Returns the name for `part`."""
        with self._lock:
            name: str = self.call("add_remote_agent", described)
            self._met[name] += 1
            return name

    def part(self, name: str) -> None:
        """Undo one `meet`. The last one closes the peer's memory."""
        with self._lock:
            self._met[name] -= 1
            if not self._met[name]:
                del self._met[name]
                self.call("remove_remote_agent", name)

    def keep_for_good(self, *parts: object) -> None:
        """Keep the parts of a read that did not end, so that they are never reused."""
        self._lost += parts


class NixlReading:
    """Reader of a peer's slots, one slot at a time. For one thread.

    Args:
        described, address, n_slots, slot_bytes: the peer's memory, as its `StagedMemory` describes it.
        token: sent to the peer with each slot that was read.
    """

    def __init__(self, agent: NixlAgent, described: bytes, address: int, n_slots: int, slot_bytes: int, token: bytes) -> None:
        self._agent, self._token = agent, token
        self._each = -(-slot_bytes // PIECE_BYTES)
        self._handles: list[Any] = []
        self._under_way: Any = None
        self._name = agent.meet(described)
        try:
            self._into = agent.stage(1, slot_bytes)
        except NixlFailed:
            agent.part(self._name)
            raise
        try:
            for owner, start, n in (("NIXL_INIT_AGENT", self._into.address, 1), (self._name, address, n_slots)):
                ends = [(at, min(PIECE_BYTES, slot_bytes - at)) for at in range(0, slot_bytes, PIECE_BYTES)]
                pieces = [(start + slot * slot_bytes + at, length, 0) for slot in range(n) for at, length in ends]
                self._handles.append(agent.call("prep_xfer_dlist", owner, np.array(pieces, np.uint64), "DRAM"))
        except NixlFailed:
            self.close()
            raise

    def read(self, slot: int, deadline: float) -> memoryview:
        """Read one slot, by a deadline on the monotonic clock. The result is valid until the next call.

        Raises:
            NixlFailed: the peer is gone, or the read took too long. No other slot can be read then.
        """
        agent, n = self._agent, self._each
        local, remote = self._handles
        for place in range(n):
            token = self._token if place == n - 1 else b""
            transfer = agent.call("make_prepped_xfer", "READ", local, [place], remote, [slot * n + place], token)
            state = agent.call("transfer", transfer)
            self._under_way = transfer if state == "PROC" else None
            while self._under_way is not None and time.perf_counter() < deadline:
                time.sleep(PAUSE_S)
                state = agent.call("check_xfer_state", transfer)
                self._under_way = transfer if state == "PROC" else None
            if self._under_way is None:
                agent.call("release_xfer_handle", transfer)
            if state != "DONE":
                raise NixlFailed("NIXL reads nothing more of a peer's memory")
        return self._into.slot(0)

    def close(self) -> None:
        """Close the reading. Memory and handles that an unfinished read may still use are kept. Raises NixlFailed if the library can't end the reading."""
        if self._under_way is not None:
            self._agent.keep_for_good(self._under_way, *self._handles, self._into)
            return
        for handle in self._handles:
            with suppress(NixlFailed):
                self._agent.call("release_dlist_handle", handle)
        try:
            self._agent.part(self._name)
        finally:
            self._into.close()
