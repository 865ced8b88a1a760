"""A TLS socket as compiled code sees it: the state that the TLS library has of it, and the library's functions.

Python's own socket and context stay as they are; who borrows them holds the pipe. Where this interpreter keeps them in another way, or hides
the library, as one does that has it within itself, there is nothing to be borrowed.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

_HEAD = object.__basicsize__
_WORD = ctypes.sizeof(ctypes.c_void_p)
KNOWN_BELOW = (3, 14)
"""Below this CPython was seen to keep a socket as `native_of` reads it. Raising it without having tried that: a crash, where it changed."""
LENDERS = f"CPython older than {'.'.join(map(str, KNOWN_BELOW))} that has OpenSSL as a library beside it"
"""Whose sockets can be borrowed, for people."""


class NativeTls(NamedTuple):
    """Addresses, and the descriptor."""

    ssl: int
    fd: int
    read: int
    write: int
    error: int
    clear: int


@cache
def _library() -> ctypes.CDLL | None:
    """The one that `ssl` uses, which its own module leads to."""
    try:
        import _ssl

        library = ctypes.CDLL(_ssl.__file__)
        for name in ("SSL_read", "SSL_write", "SSL_get_error", "SSL_get_fd", "ERR_clear_error"):
            getattr(library, name)
        library.OpenSSL_version.restype = ctypes.c_char_p
        said = library.OpenSSL_version(0).decode()
    except (ImportError, AttributeError, OSError):
        return None
    is_known = sys.implementation.name == "cpython" and sys.version_info < KNOWN_BELOW
    return library if is_known and said == ssl.OPENSSL_VERSION else None


def lends_here() -> bool:
    """Whether this interpreter's sockets can be borrowed."""
    one, other = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with other, context.wrap_socket(one, server_side=True, do_handshake_on_connect=False) as sock:
        return native_of(sock) is not None


def reader_of(sock: ssl.SSLSocket) -> Callable[[int, memoryview], int]:
    """What reads up to a record of a socket, and raises as `recv_into`: without the layer above it, where there is one, as large tensors are read a record at a time."""
    held = getattr(sock, "_sslobj", None)
    return held.read if held is not None else lambda n, into: sock.recv_into(into, n)


def native_of(sock: ssl.SSLSocket) -> NativeTls | None:
    """None: there is nothing to be borrowed."""
    library, held = _library(), getattr(sock, "_sslobj", None)
    if library is None or held is None:
        return None
    # It begins with a weak reference to the socket, which Python keeps one of; if that is there, what follows is the library's state.
    if ctypes.c_void_p.from_address(id(held) + _HEAD).value != id(weakref.ref(sock)):
        return None
    state = ctypes.c_void_p.from_address(id(held) + _HEAD + _WORD).value
    library.SSL_get_fd.argtypes = [ctypes.c_void_p]
    if state is None or library.SSL_get_fd(state) != sock.fileno():
        return None
    functions = (library.SSL_read, library.SSL_write, library.SSL_get_error, library.ERR_clear_error)
    return NativeTls(state, sock.fileno(), *(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions))
