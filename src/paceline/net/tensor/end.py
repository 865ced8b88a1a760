"""What the two ends of a tensor stream have in common: one sends tensors (`sender`), one receives them (`receiver`). Each is for one thread; `close`
is for any.

Acknowledgements stay off the path of a message: the receiver sends one when half the window lacks it, and after its user says that the result is
passed on; the sender looks for them when half the window is used, and waits for them when all of it is.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import TensorStreamError
from paceline.core.ids import NodeId
from paceline.net.tensor.conversation import Conversation
from paceline.net.tensor.frames import WINDOW, CloseCode, close, code_of
from paceline.net.tensor.incoming import Incoming
from paceline.net.tensor.pipe import Pipe

HALF = WINDOW // 2


class End:
    """What both ends have in common."""

    def __init__(self, pipe: Pipe, conversation: Conversation, incoming: Incoming, on_close: Callable[[], None] | None = None) -> None:
        self._pipe, self._conversation, self._incoming = pipe, conversation, incoming
        self._on_close = on_close

    @property
    def peer(self) -> NodeId:
        """Whose certificate the other end showed."""
        return self._pipe.peer

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    def close(self, code: CloseCode = CloseCode.DONE, why: str = "") -> None:
        """Idempotent, from any thread; wakes the one that reads or writes.

        Args:
            code: told to the other side where no thread is reading or writing.
        """
        self._pipe.close(close(code, why))
        if self._on_close is not None:
            self._on_close()

    def fail(self, error: TensorStreamError) -> None:
        """Close, for an error that the other side is told."""
        self.close(code_of(error), error.message)
