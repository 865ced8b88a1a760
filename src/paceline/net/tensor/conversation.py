"""What may follow what on a tensor stream, as a table that both ends keep, and the window. What is illegal raises and changes nothing."""

from __future__ import annotations

from enum import Enum, auto

from paceline.core.errors import StreamCorrupt
from paceline.net.tensor.frames import WINDOW

SEQ_MASK = 0xFFFFFFFF


class State(Enum):
    FRESH = auto()
    GREETED = auto()
    """The hello is said, not yet answered."""
    BETWEEN = auto()
    """No tensor is under way."""
    INSIDE = auto()
    """A tensor's first chunk has passed, its last has not."""
    CLOSED = auto()


class Event(Enum):
    HELLO = auto()
    WELCOME = auto()
    WHOLE = auto()
    """A tensor in one chunk."""
    FIRST = auto()
    NEXT = auto()
    LAST = auto()
    ACK = auto()
    CLOSE = auto()


TABLE: dict[tuple[State, Event], State] = {
    (State.FRESH, Event.HELLO): State.GREETED,
    (State.GREETED, Event.WELCOME): State.BETWEEN,
    (State.BETWEEN, Event.WHOLE): State.BETWEEN,
    (State.BETWEEN, Event.FIRST): State.INSIDE,
    (State.INSIDE, Event.NEXT): State.INSIDE,
    (State.INSIDE, Event.LAST): State.BETWEEN,
    (State.BETWEEN, Event.ACK): State.BETWEEN,
    (State.INSIDE, Event.ACK): State.INSIDE,
    (State.FRESH, Event.CLOSE): State.CLOSED,
    (State.GREETED, Event.CLOSE): State.CLOSED,
    (State.BETWEEN, Event.CLOSE): State.CLOSED,
    (State.INSIDE, Event.CLOSE): State.CLOSED,
}


class Conversation:
    """One stream's state, as this end knows it.

    Args:
        first_seq: of the first chunk.
    """

    __slots__ = ("next_seq", "remaining", "state", "unacknowledged")

    def __init__(self, first_seq: int = 0) -> None:
        self.state = State.FRESH
        self.next_seq = first_seq
        self.unacknowledged = 0
        """Chunks before `next_seq` that no ack has covered."""
        self.remaining = 0
        """Bytes of the tensor under way that are still to come."""

    @property
    def between(self) -> bool:
        """No tensor is under way."""
        return self.state is State.BETWEEN

    @property
    def over(self) -> bool:
        """A CLOSE has passed."""
        return self.state is State.CLOSED

    def on(self, event: Event) -> None:
        """Hello, welcome, close.

        Raises:
            StreamCorrupt: not now.
        """
        self.state = self._after(event)

    def tensor(self, seq: int, total: int, n_data: int) -> None:
        """A tensor's first chunk, which has `n_data` of its `total` bytes.

        Raises:
            StreamCorrupt: not now, a gap, beyond the window, or more than the tensor has.
        """
        if n_data > total or (not n_data and total):
            raise StreamCorrupt(f"A tensor of {total} bytes begins with {n_data}")
        state = self._after(Event.WHOLE if n_data == total else Event.FIRST)
        self._count(seq)
        self.state, self.remaining = state, total - n_data

    def chunk(self, seq: int, n_data: int) -> None:
        """One of its other chunks.

        Raises:
            StreamCorrupt: not now, a gap, beyond the window, or more than the tensor has.
        """
        remaining = self.remaining - n_data
        state = self._after(Event.LAST if not remaining else Event.NEXT)
        if remaining < 0 or n_data <= 0:
            raise StreamCorrupt(f"A chunk of {n_data} bytes where the tensor lacks {self.remaining}")
        self._count(seq)
        self.state, self.remaining = state, remaining

    def acknowledge(self, seq: int) -> None:
        """Every chunk before `seq` has arrived.

        Raises:
            StreamCorrupt: not now, or of chunks that were never sent.
        """
        state = self._after(Event.ACK)
        left = (self.next_seq - seq) & SEQ_MASK
        if left > self.unacknowledged:
            raise StreamCorrupt(f"An acknowledgement up to chunk {seq}, where {self.unacknowledged} before {self.next_seq} lack one")
        self.state, self.unacknowledged = state, left

    def _after(self, event: Event) -> State:
        state = TABLE.get((self.state, event))
        if state is None:
            raise StreamCorrupt(f"{event.name} on a tensor stream that is {self.state.name}")
        return state

    def _count(self, seq: int) -> None:
        if seq != self.next_seq:
            raise StreamCorrupt(f"Chunk {seq} where {self.next_seq} was to come")
        if self.unacknowledged >= WINDOW:
            raise StreamCorrupt(f"More than {WINDOW} chunks without an acknowledgement")
        self.next_seq = (seq + 1) & SEQ_MASK
        self.unacknowledged += 1
