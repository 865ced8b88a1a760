"""Rows that a caller wants back as they arrive, to compare them with what should have been sent. Only what was asked for is kept."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from paceline.core.errors import BadPipelineRequest, ShardUnavailable
from paceline.core.ids import BatchId
from paceline.engine.local import WireBits

MOST = 32
"""Asked for at once in a session."""
MOST_BYTES = 1 << 20
"""Of one answer."""


class Echoes:
    """Of one session.

    Args:
        row_bytes: of a row as it arrives.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._lock = threading.Lock()
        self._asked: dict[BatchId, list[tuple[int, int, Future[bytes]]]] = {}
        self._last = -1
        self._closed = False

    def ask(self, batch_id: BatchId, first_row: int, n_rows: int) -> Future[bytes]:
        """Rows of a batch that did not come yet.

        Raises:
            BadPipelineRequest: it did, or too much is asked.
            ShardUnavailable: the session has ended.
        """
        if n_rows * self._row_bytes > MOST_BYTES:
            raise BadPipelineRequest(f"{n_rows} rows are more than are echoed at once")
        with self._lock:
            if self._closed:
                raise ShardUnavailable("The session has ended")
            if batch_id <= self._last:
                raise BadPipelineRequest(f"Batch {batch_id} came already")
            if sum(map(len, self._asked.values())) >= MOST:
                raise BadPipelineRequest(f"{MOST} batches are to be echoed already")
            future: Future[bytes] = Future()
            self._asked.setdefault(batch_id, []).append((first_row, n_rows, future))
            return future

    def came(self, batch_id: BatchId, x_TD: WireBits) -> None:
        """A batch is here."""
        with self._lock:
            self._last = max(self._last, batch_id)
            asked = self._asked.pop(batch_id, ())
        for first, n_rows, future in asked:
            if not future.set_running_or_notify_cancel():
                continue
            if first + n_rows > len(x_TD):
                future.set_exception(BadPipelineRequest(f"Batch {batch_id} has {len(x_TD)} rows"))
            else:
                future.set_result(x_TD[first : first + n_rows].tobytes())

    def forget(self, batch_id: BatchId, future: Future[bytes]) -> None:
        """The caller that asked waits no more."""
        future.cancel()
        with self._lock:
            left = [ask for ask in self._asked.pop(batch_id, ()) if ask[2] is not future]
            if left:
                self._asked[batch_id] = left

    def close(self) -> None:
        """No more batches come."""
        with self._lock:
            self._closed = True
            asked = [ask for asks in self._asked.values() for ask in asks]
            self._asked.clear()
        for _, _, future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(ShardUnavailable("The session ended before the batch came"))
