"""A network of namespaces joined by a switch in this process: real TCP over real interfaces, and latency, loss and partitions at will.

Each namespace has one interface, `eth0`, whose other end is a TAP device of ours. A frame that comes out of one goes into the others, later or
never, as a test has set. It needs no queueing discipline of the kernel's (`tc netem`), which small kernels lack; and losses are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
SUBNET = "10.99.0"
INSIDE = ("ip", "netns", "exec")
"""Before a namespace's name and a command."""


def why_not() -> str:
    """Why there can be no such network here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    probe = f"plprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class Network:
    """Namespaces by name. `delay_s`, `loss` and `sides` may be set at any time."""

    def __init__(self, names: Sequence[str]) -> None:
        self.delay_s = 0.0
        """One way, between any two of the machines."""
        self.bytes_per_s = 0.0
        """Of each machine's way to each other; 0: no limit."""
        self.loss = 0.0
        self.sides: tuple[frozenset[str], ...] = ()
        """Machines of different sides don't hear one another; who is on no side hears all."""
        self.dropped = 0
        self._names = list(names)
        self._random = random.Random(7)
        self._taps: dict[str, int] = {}
        # select() waits for microseconds, epoll for whole milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._free_s: dict[tuple[str, str], float] = {}
        """When a way has sent what was handed to it."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="switch")

    def namespace(self, name: str) -> str:
        return f"pl{os.getpid()}-{name}"

    def address(self, name: str) -> str:
        return f"{SUBNET}.{self._names.index(name) + 1}"

    def inside(self, name: str) -> tuple[str, ...]:
        """What to put before a command, to run it there."""
        return (*INSIDE, self.namespace(name))

    def open(self) -> None:
        for name in self._names:
            self._add(name)
        self._thread.start()

    def first(self) -> None:
        """Have frames go on before anything else that wants a processor."""
        os.sched_setscheduler(self._thread.native_id or 0, os.SCHED_FIFO, os.sched_param(1))

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        for tap in self._taps.values():
            os.close(tap)
        self._loop.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True, check=False)

    def _add(self, name: str) -> None:
        space = self.namespace(name)
        _ip("netns", "add", space)
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._taps[name] = tap
        device = f"plt{os.getpid() % 100_000}-{self._names.index(name)}"
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TAP | IFF_NO_PI))
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "link", "set", device, "name", "eth0")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        self._loop.add_reader(tap, self._read, name)

    def _read(self, name: str) -> None:
        while True:
            try:
                frame = os.read(self._taps[name], 65536)
            except BlockingIOError:
                return
            except OSError:
                self._loop.remove_reader(self._taps[name])
                return
            for other in self._names:
                if other != name and self._hear(name, other):
                    if self.delay_s or self.bytes_per_s:
                        self._loop.call_at(self._sent_s(name, other, len(frame)) + self.delay_s, self._write, other, frame)
                    else:
                        self._write(other, frame)

    def _sent_s(self, one: str, other: str, size: int) -> float:
        """When the last byte of a frame leaves."""
        now = self._loop.time()
        if not self.bytes_per_s:
            return now
        free_s = self._free_s[one, other] = max(now, self._free_s.get((one, other), 0.0)) + size / self.bytes_per_s
        return free_s

    def _hear(self, one: str, other: str) -> bool:
        side = next((side for side in self.sides if one in side), None)
        apart = side is not None and other not in side and any(other in another for another in self.sides)
        lost = self.loss > 0 and self._random.random() < self.loss
        self.dropped += apart or lost
        return not apart and not lost

    def _write(self, name: str, frame: bytes) -> None:
        try:
            os.write(self._taps[name], frame)
        except (BlockingIOError, OSError):
            self.dropped += 1  # a full queue loses frames, as a switch does


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """A network for as long as the block runs."""
    made = Network(names)
    try:
        made.open()
        yield made
    finally:
        made.close()


def enter(namespace: str) -> None:
    """Have this thread, and what it starts, be there for good."""
    with Path(f"/run/netns/{namespace}").open() as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)
