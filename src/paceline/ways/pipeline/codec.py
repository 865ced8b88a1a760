"""Sessions on the wire. What a caller sends is checked here against what any stage could mean; what fits this machine is its host's to say."""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.core.errors import BadPipelineRequest, FleetError
from paceline.core.ids import NodeId
from paceline.core.manifest import is_sha256
from paceline.core.model import WIDEST_BLOCK, ActivationDtype, LayerRange, WeightsFormat
from paceline.core.shown import printable
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.net.trust.certificates import is_address, is_node_id
from paceline.net.wire import shard_pb2 as wire
from paceline.ways.pipeline.executor.sessions import (
    KV_NAME_BYTES,
    SESSION_ID_BYTES,
    NextStage,
    StageEvent,
    StageFault,
    StageLoading,
    StageOpened,
    StageReport,
    StageRequest,
)

MAX_LAYERS = 4096
MAX_BLOCKS = 1 << 20
MAX_ROWS = 8192
MAX_NAME = 200
MAX_ADDRESSES = 32
MAX_TEXT = 2000
REPORT_MS = range(10, 60_001)


def write_open(request: StageRequest) -> wire.OpenStageRequest:
    """As a caller sends it."""
    return wire.OpenStageRequest(
        session_id=request.session_id,
        model_id=request.model_id,
        digest=request.digest,
        quantization=str(request.weights),
        first_layer=request.layers.start,
        stop_layer=request.layers.stop,
        n_blocks=request.n_blocks,
        least_blocks=request.least_blocks,
        max_rows=request.max_rows,
        activation_dtype=str(request.dtype),
        report_ms=round(request.report_s * 1000),
        kv=request.kv,
    )


def read_open(message: wire.OpenStageRequest) -> StageRequest:
    """What a caller asks.

    Raises:
        BadPipelineRequest: no stage could do it.
    """
    _bound(len(message.session_id) == SESSION_ID_BYTES, f"A session id has {SESSION_ID_BYTES} bytes")
    _bound(message.report_ms in REPORT_MS, f"A stage reports every {REPORT_MS.start} to {REPORT_MS.stop - 1} ms")
    try:
        dtype = ActivationDtype(message.activation_dtype)
    except ValueError:
        raise BadPipelineRequest("Activations of a format that is unknown here") from None
    layers = _read_layers(message)
    _bound(len(message.kv) in {0, KV_NAME_BYTES}, f"A name of KV has {KV_NAME_BYTES} bytes")
    return replace(layers, session_id=message.session_id, dtype=dtype, report_s=message.report_ms / 1000, kv=message.kv)


def write_warm(request: StageRequest) -> wire.WarmLayersRequest:
    """As a caller sends it."""
    return wire.WarmLayersRequest(
        model_id=request.model_id,
        digest=request.digest,
        quantization=str(request.weights),
        first_layer=request.layers.start,
        stop_layer=request.layers.stop,
        n_blocks=request.n_blocks,
        least_blocks=request.least_blocks,
        max_rows=request.max_rows,
    )


def read_warm(message: wire.WarmLayersRequest) -> StageRequest:
    """Layers that a caller may come to need; no session is asked for.

    Raises:
        BadPipelineRequest: no stage could have them.
    """
    return _read_layers(message)


def _read_layers(message: wire.OpenStageRequest | wire.WarmLayersRequest) -> StageRequest:
    _bound(0 < len(message.model_id) <= MAX_NAME, f"A model's name has 1 to {MAX_NAME} characters")
    _bound(is_sha256(message.digest), "A digest is 64 hexadecimal digits")
    first, stop = message.first_layer, message.stop_layer
    _bound(first < stop <= MAX_LAYERS, f"No model has layers {first} to {stop}")
    _bound(
        1 <= message.least_blocks <= message.n_blocks <= MAX_BLOCKS, f"A lease is of 1 to {MAX_BLOCKS} blocks, and no less than the least"
    )
    _bound(1 <= message.max_rows <= MAX_ROWS, f"A batch has 1 to {MAX_ROWS} rows")
    try:
        weights = WeightsFormat(message.quantization)
    except ValueError:
        raise BadPipelineRequest("Weights of a format that is unknown here") from None
    return StageRequest(
        session_id=bytes(SESSION_ID_BYTES),
        model_id=message.model_id,
        digest=message.digest,
        weights=weights,
        layers=LayerRange(first, stop),
        n_blocks=message.n_blocks,
        least_blocks=message.least_blocks,
        max_rows=message.max_rows,
    )


def write_event(event: StageEvent) -> wire.OpenStageResponse:
    """As a stage tells it."""
    match event:
        case StageLoading(done, total):
            return wire.OpenStageResponse(loading=wire.StageLoading(bytes_done=done, bytes_total=total))
        case StageOpened():
            return wire.OpenStageResponse(
                opened=wire.StageOpened(
                    tensor_port=event.tensor_port,
                    ticket=event.ticket,
                    n_blocks=event.n_blocks,
                    block_size=event.block_size,
                    numerics_id=event.numerics_id,
                    one_path=event.one_path,
                    holds_identity=event.holds_identity,
                    resumed=event.resumed,
                )
            )
        case StageReport():
            return wire.OpenStageResponse(
                report=wire.StageReport(
                    received=event.received,
                    computed=event.computed,
                    sent=event.sent,
                    queue_depth=event.queue_depth,
                    p95_latency_ms=event.p95_latency_ms,
                    busy_s=event.busy_s,
                )
            )
        case StageFault(code, message, blames):
            return wire.OpenStageResponse(fault=wire.StageFault(code=code, message=message[:MAX_TEXT], blames=blames or ""))


def read_event(message: wire.OpenStageResponse, request: StageRequest) -> StageEvent:
    """What a stage tells.

    Raises:
        FleetError: it contradicts what was asked, or itself.
    """
    match message.WhichOneof("event"):
        case "loading":
            return StageLoading(message.loading.bytes_done, message.loading.bytes_total)
        case "opened":
            told = message.opened
            sound = (
                0 < told.tensor_port < 1 << 16
                and len(told.ticket) == TICKET_BYTES
                and request.least_blocks <= told.n_blocks <= request.n_blocks
                and 0 < told.block_size <= 1 << 16
                and len(told.numerics_id) <= MAX_NAME
                and (request.kv or not told.resumed)
            )
            if sound:
                return StageOpened(
                    *(told.tensor_port, told.ticket, told.n_blocks, told.block_size, told.numerics_id, told.one_path, told.holds_identity),
                    resumed=told.resumed if told.HasField("resumed") else None,
                )
        case "report":
            told = message.report
            if math.isfinite(told.p95_latency_ms) and math.isfinite(told.busy_s):
                return StageReport(told.received, told.computed, told.sent, told.queue_depth, told.p95_latency_ms, told.busy_s)
        case "fault":
            told = message.fault
            blames = NodeId(told.blames) if is_node_id(told.blames) else None
            return StageFault(printable(told.code, MAX_NAME), printable(told.message, MAX_TEXT), blames)
        case None:
            pass
    raise FleetError("A stage tells what makes no sense")


def write_connect(session_id: bytes, to: NextStage) -> wire.ConnectStageRequest:
    """As a caller sends it."""
    return wire.ConnectStageRequest(
        session_id=session_id, node_id=to.node_id, tensor_addresses=to.addresses, ticket=to.ticket, block_size=to.block_size
    )


def read_connect(message: wire.ConnectStageRequest) -> NextStage:
    """Where results are to go.

    Raises:
        BadPipelineRequest: nowhere that exists.
    """
    _bound(is_node_id(message.node_id), "What should name a node names none")
    _bound(len(message.ticket) == TICKET_BYTES, f"A ticket has {TICKET_BYTES} bytes")
    addresses = tuple(message.tensor_addresses)
    _bound(1 <= len(addresses) <= MAX_ADDRESSES, f"A node has 1 to {MAX_ADDRESSES} addresses")
    _bound(all(is_address(address) for address in addresses), "What should be host:port is not")
    _bound(message.block_size <= WIDEST_BLOCK, f"Blocks have at most {WIDEST_BLOCK} tokens")
    block_size = message.block_size if message.HasField("block_size") else None
    return NextStage(NodeId(message.node_id), addresses, message.ticket, block_size)


def check_echo(message: wire.EchoRowsRequest) -> None:
    """Whether rows of a batch are asked for that could be.

    Raises:
        BadPipelineRequest: they could not.
    """
    _bound(message.n_rows >= 1 and message.first_row + message.n_rows <= MAX_ROWS, f"A batch has 1 to {MAX_ROWS} rows")


def _bound(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BadPipelineRequest(otherwise)
