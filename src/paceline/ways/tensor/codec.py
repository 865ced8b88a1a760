"""A rank on another machine, on the wire. What a caller sends is checked here against what any rank could mean; what fits the model is its host's to say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from paceline.core.errors import BadPipelineRequest, FleetError
from paceline.core.generation import Range
from paceline.core.ids import is_sha256
from paceline.core.model import WeightsFormat
from paceline.core.text import printable
from paceline.net.mapper import Codec, Length, Mapped, refuse_with
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.net.trust.certificates import is_address
from paceline.net.wire import rank_pb2 as wire

MAX_NAME = 200
MAX_TEXT = 2000
MAX_RANKS = 64
MAX_BLOCKS = 1 << 20
MAX_ROWS = 8192
MAX_ADDRESSES = 32
MAX_STOP = 1 << 24


@dataclass(frozen=True, slots=True)
class Stops:
    """Where a rank's share ends (`backends.cpu.shares.cut`)."""

    out: int
    down: int
    vocab: int


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A rank, as the machine that is the first asks another for it."""

    model_id: str
    digest: str
    weights: WeightsFormat
    rank: int
    stops: tuple[Stops, ...]
    """Of all ranks."""
    n_blocks: int
    max_rows: int
    logits_rows: int
    max_blocks: int
    addresses: tuple[str, ...]
    """Where the caller takes what the rank sends."""
    ticket: bytes


@dataclass(frozen=True, slots=True)
class RankLoading:
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class RankOpened:
    tensor_port: int
    ticket: bytes
    numerics_id: str


@dataclass(frozen=True, slots=True)
class RankFault:
    message: str


RankEvent = RankLoading | RankOpened | RankFault


def _at_odds(request: RankRequest) -> str:
    return "" if request.rank < len(request.stops) else "the rank is none of those that share the model"


_ASKED: Final = refuse_with(BadPipelineRequest)
_TOLD: Final = refuse_with(FleetError)
_TICKET: Final = Length(TICKET_BYTES, TICKET_BYTES)
_STOPS: Final = Codec(
    Stops,
    wire.RankShare,
    _ASKED,
    {name: Mapped(f"stop_{name}", Range(0, MAX_STOP)) for name in ("out", "down", "vocab")},
)
_OPEN: Final = Codec(
    RankRequest,
    wire.OpenRankRequest,
    _ASKED,
    {
        "model_id": Length(1, MAX_NAME),
        "digest": is_sha256,
        "weights": Mapped("quantization", None, str, WeightsFormat),
        "rank": Range(1, MAX_RANKS - 1),
        "stops": Mapped("shares", Length(2, MAX_RANKS), codec=_STOPS),
        "n_blocks": Range(1, MAX_BLOCKS),
        "max_rows": Range(1, MAX_ROWS),
        "logits_rows": Range(1, MAX_ROWS),
        "max_blocks": Range(1, MAX_BLOCKS),
        "addresses": Mapped("tensor_addresses", Length(1, MAX_ADDRESSES, is_address)),
        "ticket": _TICKET,
    },
    also=_at_odds,
)
_EVENTS: Final[dict[type[Any], tuple[str, Codec[Any, Any]]]] = {
    RankLoading: ("loading", Codec(RankLoading, wire.RankLoading, _TOLD)),
    RankOpened: (
        "opened",
        Codec(
            RankOpened,
            wire.RankOpened,
            _TOLD,
            {"tensor_port": Range(1, 65535), "ticket": _TICKET, "numerics_id": Length(1, MAX_NAME)},
        ),
    ),
    RankFault: (
        "fault",
        Codec(
            RankFault,
            wire.RankFault,
            _TOLD,
            {"message": Mapped(write=lambda text: text[:MAX_TEXT], read=lambda text: printable(text, MAX_TEXT))},
        ),
    ),
}
_READERS: Final = dict(_EVENTS.values())

write_open: Final = _OPEN.write
read_open: Final = partial(_OPEN.read_checked, what="A tensor rank is asked for")
"""What a caller asks. Raises BadPipelineRequest: no rank could be that."""


def write_event(event: RankEvent) -> wire.OpenRankResponse:
    name, codec = _EVENTS[type(event)]
    return wire.OpenRankResponse(**{name: codec.write(event)})


def read_event(message: wire.OpenRankResponse) -> RankEvent:
    """What a rank says.

    Raises:
        FleetError: it is no sense.
    """
    name = message.WhichOneof("event")
    if name is None:
        raise FleetError("A tensor rank said something unknown")
    event: RankEvent = _READERS[name].read_checked(getattr(message, name), "A tensor rank said")
    return event
