"""Errors over gRPC that keep their type: a status for any gRPC client, and metadata with the error's kind and fields for Paceline nodes.

All services use one table, `core.errors.ERROR_TABLE`. Any exception that is not a `PacelineError` is a bug: it is logged where it happened, and the
caller learns only that there was one.
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
"""Types of error that a peer may cause here, by name."""
_DIALLED = "Failed to connect to remote host: "
"""Text of gRPC before the error of a socket. Before it stand the addresses and how many were tried."""
_WORDS = (
    ("refused", "nothing listens there"),
    (r"handshake.*(endpoint closing|time(d )?out|deadline)", "it does not answer"),
    ("handshake", "it is in another fleet, or no node"),
    ("time(d )?out|deadline", "it does not answer"),
    ("socket closed|connection reset|broken pipe|stream removed|goaway|end of file", "the connection broke off"),
    ("unreachable|no route", "no network leads there"),
    ("^$", "the connection was closed"),
)
"""Patterns in the text of gRPC, with the words for a person. The first that matches counts."""
_FIELDS: tuple[tuple[type[PacelineError], str, Callable[[Any], Any]], ...] = (
    (InvalidRequest, "field", lambda value: printable(str(value))),
    (Overloaded, "retry_after_s", int),
    (PeerFloods, "retry_after_s", float),
    (OtherProtocol, "spoken", int),
    (NotTrusted, "who", lambda value: printable(str(value))),
    (ExecutorUnavailable, "code", lambda value: printable(str(value), 60)),
)
"""Fields that travel with errors of a type, and the functions that read them."""
_GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
MAX_TEXT = 2000
"""Maximum length, in characters, of a message or hint that goes to a peer or comes from one."""

Metadata = Sequence[tuple[str, str | bytes]]


def status_of(error: PacelineError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return grpc.StatusCode[ERROR_TABLE[kind_of(error)].grpc]


def metadata_of(error: PacelineError) -> Metadata:
    """Return an error's kind and fields as trailing metadata."""
    fields = {name: value for of, name, _ in _FIELDS if isinstance(error, of) and (value := getattr(error, name)) is not None}
    fault = {"kind": kind_of(error).__name__, "message": error.message[:MAX_TEXT], "hint": error.hint[:MAX_TEXT], **fields}
    return ((FAULT_KEY, json.dumps(fault).encode()),)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PacelineError) -> NoReturn:
    """End an RPC with an error. Logging it is left to the caller."""
    details = error.message[:MAX_TEXT].encode("ascii", "replace").decode()
    await context.abort(status_of(error), details, metadata_of(error))
    raise AssertionError("abort raises")


def error_of(failed: grpc.aio.AioRpcError, peer: str) -> PacelineError:
    """Return the error for a failed RPC: `NodeUnreachable` if the peer can't be reached, or its connection was lost."""
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
    """Return the error for a failed RPC by which a peer may report only a `FleetError`. Other types are wrapped in one."""
    error = error_of(failed, peer)
    return error if isinstance(error, FleetError) else FleetError(f"{peer} refused: {error.message}", error.hint)


@contextmanager
def unless_closed(peer: str) -> Generator[None]:
    """Wrap each wait for a peer over a channel that other code may close, as happens when the peer leaves or restarts.

    Law: the waiting caller gets an error. grpc raises CancelledError as if the waiting task were cancelled, which would end the task unnoticed.

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
    """Return the reason of a failed RPC in plain words; the text of gRPC if no pattern matches."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it did not answer in time"
    reason = details.rpartition(_DIALLED)[2]
    return next((words for said, words in _WORDS if re.search(said, reason, re.IGNORECASE)), reason)


def _told(value: bytes) -> PacelineError | None:
    """Return the error that a peer sent, built from known types and fields only; None if it can't be read."""
    try:
        fault: Any = json.loads(value)
        kind = _KINDS[fault["kind"]]
        message, hint = (printable(str(fault[name]), MAX_TEXT) for name in ("message", "hint"))
        fields = {name: read(fault[name]) for of, name, read in _FIELDS if issubclass(kind, of) and name in fault}
        return kind(message, hint, **fields)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
