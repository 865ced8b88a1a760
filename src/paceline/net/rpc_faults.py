"""Errors over gRPC keep their type: a status for any client of gRPC, and the error's kind and fields beside it for us.

One table for all services, `core.errors.ERROR_TABLE`. What is no `PacelineError` is a bug: it is logged where it happened, and the caller learns only that.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from paceline.core.errors import (
    ERROR_TABLE,
    ExecutorUnavailable,
    FleetError,
    InvalidRequest,
    NodeUnreachable,
    NotTrusted,
    OtherProtocol,
    Overloaded,
    PacelineError,
    PeerFloods,
    kind_of,
)
from paceline.core.text import printable

FAULT_KEY = "paceline-fault-bin"

_KINDS = {kind.__name__: kind for kind in ERROR_TABLE}
"""What a peer may make us raise."""
_DIALLED = "Failed to connect to remote host: "
"""What gRPC puts before a socket's own error, behind the address and how many it has tried."""
_WORDS = (
    ("refused", "nothing listens there"),
    (r"handshake.*(endpoint closing|time(d )?out|deadline)", "it does not answer"),
    ("handshake", "it is in another fleet, or no node"),
    ("time(d )?out|deadline", "it does not answer"),
    ("socket closed|connection reset|broken pipe|stream removed|goaway|end of file", "the connection broke off"),
    ("unreachable|no route", "no network leads there"),
    ("^$", "the connection was closed"),
)
"""What is found in gRPC's words, and what it means; the first that fits."""
_FIELDS: tuple[tuple[type[PacelineError], str, Callable[[Any], Any]], ...] = (
    (InvalidRequest, "field", lambda value: printable(str(value))),
    (Overloaded, "retry_after_s", int),
    (PeerFloods, "retry_after_s", float),
    (OtherProtocol, "spoken", int),
    (NotTrusted, "who", lambda value: printable(str(value))),
    (ExecutorUnavailable, "code", lambda value: printable(str(value), 60)),
)
"""What travels with errors of a type, and how it is read."""
_GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
MAX_TEXT = 2000
"""Of a peer's message, what is repeated."""

Metadata = Sequence[tuple[str, str | bytes]]


def status_of(error: PacelineError) -> grpc.StatusCode:
    """The status an error leaves as."""
    return grpc.StatusCode[ERROR_TABLE[kind_of(error)].grpc]


def metadata_of(error: PacelineError) -> Metadata:
    """The error's kind and fields, as trailing metadata."""
    fields = {name: value for of, name, _ in _FIELDS if isinstance(error, of) and (value := getattr(error, name)) is not None}
    fault = {"kind": kind_of(error).__name__, "message": error.message[:MAX_TEXT], "hint": error.hint[:MAX_TEXT], **fields}
    return ((FAULT_KEY, json.dumps(fault).encode()),)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PacelineError) -> NoReturn:
    """End an RPC with an error. Whether and where it is logged is the caller's affair."""
    details = error.message[:MAX_TEXT].encode("ascii", "replace").decode()
    await context.abort(status_of(error), details, metadata_of(error))
    raise AssertionError("abort raises")


def error_of(failed: grpc.aio.AioRpcError, peer: str) -> PacelineError:
    """What a failed RPC means here. A peer that can't be reached, or no longer, is `NodeUnreachable`."""
    trailing = cast("grpc.aio.Metadata | None", failed.trailing_metadata())
    value = None if trailing is None else trailing.get(FAULT_KEY)
    told = _told(value) if isinstance(value, bytes) else None
    if told is not None:
        return told
    details = printable((failed.details() or "").strip(), MAX_TEXT)
    code = failed.code()
    if code in _GONE:
        return NodeUnreachable(f"{peer} can't be reached ({_why(code, details)})", "Look at `paceline status`.")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return FleetError(f"{peer} refuses this node: {details}")
    return FleetError(f"{peer} refused ({code.name.lower()}): {details}")


def fleet_error_of(failed: grpc.aio.AioRpcError, peer: str) -> FleetError:
    """The same, where a peer has no business to name anything but an error of the fleet."""
    error = error_of(failed, peer)
    return error if isinstance(error, FleetError) else FleetError(f"{peer} refused: {error.message}", error.hint)


@contextmanager
def unless_closed(peer: str) -> Generator[None]:
    """Around every wait for a peer over a channel that others may close: it is closed under the calls on it when the peer leaves or starts anew.

    Law: the caller that waits learns that as an error. grpc has it look as if the waiting task were cancelled, which would end it unnoticed.

    Raises:
        NodeUnreachable: the channel was closed.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise NodeUnreachable(f"{peer} is gone") from None
    except grpc.aio.UsageError as error:
        raise NodeUnreachable(f"The connection to {peer} was closed") from error


def _why(code: grpc.StatusCode, details: str) -> str:
    """What gRPC says, in a person's words; what is none of these, as it says it."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it did not answer in time"
    reason = details.rpartition(_DIALLED)[2]
    return next((words for said, words in _WORDS if re.search(said, reason, re.IGNORECASE)), reason)


def _told(value: bytes) -> PacelineError | None:
    """The error a peer named, built from fields of known types only."""
    try:
        fault: Any = json.loads(value)
        kind = _KINDS[fault["kind"]]
        message, hint = (printable(str(fault[name]), MAX_TEXT) for name in ("message", "hint"))
        fields = {name: read(fault[name]) for of, name, read in _FIELDS if issubclass(kind, of) and name in fault}
        return kind(message, hint, **fields)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
