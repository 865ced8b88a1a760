"""Errors keep their type over gRPC, and a peer can make us raise none but those we know."""

from __future__ import annotations

import inspect
import json

import grpc
import grpc.aio
import pytest

from paceline.core import errors
from paceline.core.errors import (
    BadPipelineRequest,
    ContextOverflow,
    EngineGone,
    ExecutorUnavailable,
    FleetError,
    InvalidRequest,
    MessageTooLarge,
    ModelAway,
    NodeUnreachable,
    NotTrusted,
    OtherProtocol,
    Overloaded,
    PacelineError,
    PeerFloods,
    PipelineDisabled,
    PipelineStalled,
    ShardCorrupt,
    ShardUnavailable,
    UnknownModel,
    WayNotAllowed,
    WeightsMismatch,
    goes_elsewhere,
    kind_of,
)
from paceline.net.rpc_faults import FAULT_KEY, error_of, fleet_error_of, metadata_of, status_of
from paceline.server.faults import fault_of_error


def travelled(error: PacelineError) -> PacelineError:
    trailing = grpc.aio.Metadata(*metadata_of(error))
    return error_of(grpc.aio.AioRpcError(status_of(error), grpc.aio.Metadata(), trailing, error.message), "b")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownModel("no such", "look"), grpc.StatusCode.NOT_FOUND),
        (InvalidRequest("bad", field="top_p"), grpc.StatusCode.INVALID_ARGUMENT),
        (ContextOverflow("long", "less", field="messages"), grpc.StatusCode.OUT_OF_RANGE),
        (Overloaded("full", retry_after_s=7), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (PeerFloods("often", retry_after_s=0.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (MessageTooLarge("much"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (BadPipelineRequest("odd"), grpc.StatusCode.INVALID_ARGUMENT),
        (ShardUnavailable("full", "ask another"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (WeightsMismatch("others"), grpc.StatusCode.FAILED_PRECONDITION),
        (PipelineDisabled("off"), grpc.StatusCode.FAILED_PRECONDITION),
        (PipelineStalled("still"), grpc.StatusCode.ABORTED),
        (ShardCorrupt("NaN"), grpc.StatusCode.DATA_LOSS),
        (NotTrusted("a guest", who="n"), grpc.StatusCode.PERMISSION_DENIED),
        (OtherProtocol("newer", "Update", spoken=9), grpc.StatusCode.FAILED_PRECONDITION),
        (WayNotAllowed("otherwise", "Allow more.", field="ways"), grpc.StatusCode.INVALID_ARGUMENT),
        (ModelAway("soon"), grpc.StatusCode.UNAVAILABLE),
        (ExecutorUnavailable("no memory", code="load_failed"), grpc.StatusCode.UNAVAILABLE),
        (EngineGone("failed"), grpc.StatusCode.UNAVAILABLE),
        (FleetError("refused"), grpc.StatusCode.FAILED_PRECONDITION),
        (PacelineError("broken"), grpc.StatusCode.INTERNAL),
    ],
)
def test_an_error_keeps_its_type_and_fields(error: PacelineError, status: grpc.StatusCode) -> None:
    arrived = travelled(error)
    assert status_of(error) is status
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PacelineError)}
ARGUMENTS = {
    "retry_after_s": 7,
    "busy": ("m",),
    "who": "b",
    "status": "UNAVAILABLE",
    "code": "load_failed",
    "field": "ways",
    "spans": (),
    "spoken": 7,
}
"""What constructors of errors take beside a message."""


def made(kind: type[PacelineError]) -> PacelineError:
    wanted = {name: value for name, value in ARGUMENTS.items() if name in inspect.signature(kind).parameters}
    return kind("what happened", **wanted)


@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
def test_a_client_is_told_the_same_whether_an_error_arose_here_or_at_another_node(kind: type[PacelineError]) -> None:
    error = made(kind)
    arrived = travelled(error)
    assert type(arrived) is kind_of(error)
    assert fault_of_error(arrived) == fault_of_error(error)
    assert goes_elsewhere(arrived) is goes_elsewhere(error)
    assert status_of(arrived) is status_of(error)


def test_what_is_wrong_with_a_request_is_wrong_everywhere_and_what_a_machine_lacks_is_not() -> None:
    stays = {name for name, kind in ERRORS.items() if not goes_elsewhere(made(kind))}
    assert {"InvalidRequest", "RequestError", "DrawFailed", "PacelineError", "OutOfMemory"} <= stays
    assert not stays & {
        "WayNotAllowed",
        "ContextOverflow",
        "UnknownModel",
        "ModelAway",
        "NoRoom",
        "EngineGone",
        "NodeStopping",
        "RevokedNode",
    }
    assert not any(issubclass(ERRORS[name], FleetError) for name in stays)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED])
def test_a_node_that_is_gone_is_unreachable(code: grpc.StatusCode) -> None:
    failed = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why")
    assert isinstance(error_of(failed, "b"), NodeUnreachable)


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused",
            "nothing listens there",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "the connection broke off"),
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (recvmsg:Connection timed out (110))", "it does not answer"),
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (ping timeout)", "it does not answer"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "last error: UNKNOWN: ipv4:127.0.0.1:9: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:CERTIFICATE",
            "it is in another fleet, or no node",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "last error: UNAVAILABLE: ipv4:127.0.0.1:9: Handshake read failed (Endpoint closing)",
            "it does not answer",
        ),
        (grpc.StatusCode.UNAVAILABLE, "last error: UNKNOWN: ipv6:[::1]:9: Handshaker timed out", "it does not answer"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "it did not answer in time"),
        (grpc.StatusCode.CANCELLED, "", "the connection was closed"),
        (grpc.StatusCode.UNAVAILABLE, "Too many pings", "Too many pings"),
    ],
)
def test_what_grpc_says_is_said_in_plain_words(code: grpc.StatusCode, details: str, said: str) -> None:
    failed = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert error_of(failed, "b").message == f"b can't be reached ({said})"


@pytest.mark.parametrize(
    "fault",
    [
        b"",
        b"{",
        b"[]",
        json.dumps({"kind": "KeyboardInterrupt", "message": "", "hint": ""}).encode(),
        json.dumps({"kind": "Overloaded", "message": "", "hint": ""}).encode(),
        json.dumps({"kind": "Overloaded", "message": "", "hint": "", "retry_after_s": "soon"}).encode(),
    ],
)
def test_a_fault_that_is_none_of_ours_is_the_status_it_came_with(fault: bytes) -> None:
    trailing = grpc.aio.Metadata((FAULT_KEY, fault))
    arrived = error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), trailing, "odd"), "b")
    assert type(arrived) is FleetError
    assert "odd" in arrived.message


@pytest.mark.parametrize(
    "fault",
    [
        b'{"kind": "Overloaded", "message": "m", "hint": "", "retry_after_s": Infinity}',
        b'{"kind": "Overloaded", "message": "m", "hint": "", "retry_after_s": NaN}',
        b'{"kind": "InvalidRequest", "message": "\\u001b]0;pwned\\u0007\\nall is well", "hint": "\\u001b[2J", "field": "\\u001b"}',
        b"[" * 8000,
        b"\xff",
    ],
)
def test_nothing_a_peer_names_breaks_or_commands_anything(fault: bytes) -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), grpc.aio.Metadata((FAULT_KEY, fault)), details="\x1b]0;pwned\x07\n"
    )
    error = error_of(failed, "b")
    assert str(error).isprintable()
    assert isinstance(fleet_error_of(failed, "b"), FleetError)
