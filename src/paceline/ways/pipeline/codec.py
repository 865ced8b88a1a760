"""Sessions on the wire. What a caller sends is checked here against what any stage could mean; what fits this machine is its host's to say."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

from paceline.core.errors import BadPipelineRequest, FleetError
from paceline.core.generation import Range
from paceline.core.ids import NodeId, is_sha256
from paceline.core.model import WIDEST_BLOCK, ActivationDtype, WeightsFormat
from paceline.core.text import printable
from paceline.machine.kv_spans import KvMove
from paceline.net.mapper import Codec, Length, Mapped, layer_span, milliseconds, refuse_with, split_bytes
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.net.trust.certificates import is_address, is_node_id
from paceline.net.wire import shard_pb2 as wire
from paceline.ways.pipeline.executor.route import (
    KV_NAME_BYTES,
    SESSION_ID_BYTES,
    BlocksAsked,
    BlocksUse,
    NextStage,
    PipelineFault,
    StageEvent,
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
REPORT_S = Range(0.01, 60)
KEY_BYTES = 16
MAX_KEYS = 8192
"""Of blocks in a message."""
WITHIN_S = Range(0.001, 600)

_ASKED: Final = refuse_with(BadPipelineRequest)
_TOLD: Final = refuse_with(FleetError)


def _at_odds(request: StageRequest) -> str:
    return "" if request.least_blocks <= request.n_blocks else "least_blocks are more than the blocks of the lease"


_LAYERS: Final = {
    "model_id": Length(1, MAX_NAME),
    "digest": is_sha256,
    "weights": Mapped("quantization", None, str, WeightsFormat),
    "layers": layer_span(lambda layers: layers.start < layers.stop <= MAX_LAYERS),
    "n_blocks": Range(1, MAX_BLOCKS),
    "least_blocks": Range(1, MAX_BLOCKS),
    "max_rows": Range(1, MAX_ROWS),
}
_OPEN: Final = Codec(
    StageRequest,
    wire.OpenStageRequest,
    _ASKED,
    {
        "session_id": Length(SESSION_ID_BYTES, SESSION_ID_BYTES),
        "dtype": Mapped("activation_dtype", None, str, ActivationDtype),
        "report_s": milliseconds("report_ms", REPORT_S),
        "kv": Mapped(bound=lambda name: len(name) in {0, KV_NAME_BYTES}),
        **_LAYERS,
    },
    also=_at_odds,
)
_WARM: Final = Codec(
    StageRequest, wire.WarmLayersRequest, _ASKED, {**_LAYERS}, also=_at_odds, given=["session_id", "dtype", "report_s", "kv"]
)
_NEXT: Final = Codec(
    NextStage,
    wire.ConnectStageRequest,
    _ASKED,
    {
        "node_id": is_node_id,
        "addresses": Mapped("tensor_addresses", Length(1, MAX_ADDRESSES, is_address)),
        "ticket": Length(TICKET_BYTES, TICKET_BYTES),
        "block_size": Range(0, WIDEST_BLOCK),
    },
    beside=["session_id"],
)
_MOVE: Final = Codec(
    KvMove,
    wire.KvMove,
    _ASKED,
    {
        "node_id": is_node_id,
        "layout": Length(KEY_BYTES, KEY_BYTES),
        "stops": Length(0, MAX_LAYERS),
        "layers": layer_span(lambda layers: layers.start <= layers.stop <= MAX_LAYERS),
        "tensor_port": Range(0, 65535),
        "ticket": Mapped(bound=lambda ticket: len(ticket) in {0, TICKET_BYTES}),
    },
)


def _sense(asked: BlocksAsked) -> str:
    if len(asked.blocks) != (0 if asked.use is BlocksUse.FIND else len(asked.keys)):
        return "blocks are not one a key"
    if len(asked.parents) not in {0, len(asked.keys)}:
        return "parents are not one a key"
    if (asked.move is not None) is not asked.use.moves:
        return "a move is named where nothing moves, or none where something does"
    if asked.use is BlocksUse.GIVE and asked.move is not None and not (asked.move.layers and asked.move.tensor_port and asked.move.ticket):
        return "it is not said what goes where"
    if asked.use is BlocksUse.COMPARE and len(asked.blocks) != 2:
        return "two blocks are compared"
    return ""


def _is_key(name: bytes) -> bool:
    return len(name) == KEY_BYTES


_BLOCKS: Final = Codec(
    BlocksAsked,
    wire.KvBlocksRequest,
    _ASKED,
    {
        "use": Mapped("use", None, str, BlocksUse),
        "keys": Mapped("keys", Length(1, MAX_KEYS, _is_key), b"".join, partial(split_bytes, size=KEY_BYTES)),
        "parents": Mapped(
            "parents",
            Length(0, MAX_KEYS, lambda key: key is None or _is_key(key)),
            lambda parents: b"".join(parent or bytes(KEY_BYTES) for parent in parents),
            lambda joined: tuple(key if any(key) else None for key in split_bytes(joined, KEY_BYTES)),
        ),
        "blocks": Mapped("blocks", Length(0, MAX_KEYS)),
        "within_s": milliseconds("within_ms", WITHIN_S),
        "move": _MOVE,
    },
    also=_sense,
    beside=["session_id"],
)
_FINITE: Final = Mapped(bound=math.isfinite)
_EVENTS: Final[dict[type[Any], tuple[str, Codec[Any, Any]]]] = {
    StageLoading: ("loading", Codec(StageLoading, wire.StageLoading, _TOLD)),
    StageOpened: (
        "opened",
        Codec(
            StageOpened,
            wire.StageOpened,
            _TOLD,
            {
                "tensor_port": Range(1, 65535),
                "ticket": Length(TICKET_BYTES, TICKET_BYTES),
                "block_size": Range(1, 1 << 16),
                "numerics_id": Length(0, MAX_NAME),
            },
        ),
    ),
    StageReport: ("report", Codec(StageReport, wire.StageReport, _TOLD, dict.fromkeys(("p95_latency_ms", "busy_s", "latency_s"), _FINITE))),
    PipelineFault: (
        "fault",
        Codec(
            PipelineFault,
            wire.StageFault,
            _TOLD,
            {
                "node_id": Mapped("blames", None, None, lambda name: NodeId(name) if is_node_id(name) else None),
                "code": Mapped(read=lambda code: printable(code, MAX_NAME)),
                "message": Mapped(write=lambda text: text[:MAX_TEXT], read=lambda text: printable(text, MAX_TEXT)),
            },
            given=["reported"],
        ),
    ),
}
_READERS: Final = dict(_EVENTS.values())

write_open: Final = _OPEN.write
read_open: Final = partial(_OPEN.read_checked, what="A stage is asked for")
"""What a caller asks. Raises BadPipelineRequest: no stage could do it."""
write_warm: Final = _WARM.write
read_warm: Final = partial(_WARM.read_checked, what="Layers are asked for", session_id=bytes(SESSION_ID_BYTES))
"""Layers that a caller may come to need; no session is asked for. Raises BadPipelineRequest: no stage could have them."""
read_connect: Final = partial(_NEXT.read_checked, what="A way to the next stage")
"""Where results are to go. Raises BadPipelineRequest: nowhere that exists."""
write_blocks: Final = _BLOCKS.write
read_blocks: Final = partial(_BLOCKS.read_checked, what="KV blocks are asked for")
"""What is wanted of blocks. Raises BadPipelineRequest: it makes no sense."""


def write_event(event: StageEvent) -> wire.OpenStageResponse:
    name, codec = _EVENTS[type(event)]
    return wire.OpenStageResponse(**{name: codec.write(event)})


def read_event(message: wire.OpenStageResponse, request: StageRequest) -> StageEvent:
    """What a stage tells.

    Raises:
        FleetError: it contradicts what was asked, or itself.
    """
    said = message.WhichOneof("event")
    if said is None:
        raise FleetError("A stage tells what makes no sense")
    event: StageEvent = _READERS[said].read_checked(getattr(message, said), f"A stage tells of {said}")
    if isinstance(event, StageOpened) and (
        not request.least_blocks <= event.n_blocks <= request.n_blocks or (event.resumed and not request.kv)
    ):
        raise FleetError("A stage opens something else than was asked for")
    return event


def write_connect(session_id: bytes, to: NextStage) -> wire.ConnectStageRequest:
    return _NEXT.write(to, session_id=session_id)
