"""A TLS socket as compiled code sees it: the state that the TLS library has of it, and the library's functions.

Python's own socket and context stay as they are; who borrows them holds the pipe. Where this interpreter keeps them in another way, or hides
the library, there is nothing to be borrowed.
"""

from __future__ import annotations

import ctypes
import ssl
import weakref
from functools import cache
from typing import NamedTuple

_HEAD = object.__basicsize__
_WORD = ctypes.sizeof(ctypes.c_void_p)


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
    except (ImportError, AttributeError, OSError):
        return None
    return library


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
