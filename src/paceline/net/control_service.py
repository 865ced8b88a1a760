"""ControlService: the fleet as a node sees it, told to its own machine alone: the caller must have the node's own certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc
import grpc.aio

from paceline.core.errors import FleetError
from paceline.core.ids import NodeId, Trust
from paceline.core.stats import DraftUse
from paceline.fleet.eligibility import Clash, FleetView, LiveCard
from paceline.net.card_codec import read_card, write_card
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.discovery import Failure
from paceline.net.mapper import Codec, Mapped, from_ms, milliseconds, refuse_with, to_ms
from paceline.net.rpc_faults import error_of
from paceline.net.server import KIB, Service
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context, Limit
from paceline.net.trust.identity import Identity
from paceline.net.wire import control_pb2 as wire
from paceline.net.wire.control_pb2_grpc import ControlServiceServicer, ControlServiceStub, add_ControlServiceServicer_to_server


@dataclass(frozen=True, slots=True)
class Sight:
    """What a node sees at one moment."""

    view: FleetView
    failures: tuple[Failure, ...]
    """Addresses that do not answer; their times are seconds before now, negative."""
    rounds: int
    """Of exchanges, begun by this node."""
    drafts: tuple[DraftUse, ...] = ()
    """For the model that this node runs."""
    revocations_as_of: int = 0
    """Unix seconds: revocations from before then are known here; 0 where that was not told."""
    certificate_ends: int = 0
    plans: tuple[tuple[str, str], ...] = ()
    """By model: what runs it, in words."""


Look = Callable[[], Sight]


def fleet_id(identity: Identity) -> str:
    """The same on every node of a fleet, and on no other's."""
    return identity.root.fingerprint.hex()[:16]


class ControlServicer(ControlServiceServicer):
    """Answers this machine's own commands."""

    def __init__(self, identity: Identity, guard: PeerGuard, look: Look) -> None:
        self._identity, self._guard, self._look = identity, guard, look

    async def GetFleetView(self, request: wire.GetFleetViewRequest, context: Context) -> wire.GetFleetViewResponse:
        del request
        if self._guard.peer(context).certificate != self._identity.member.certificate:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "a node tells its view to its own machine only")
        return write_sight(fleet_id(self._identity), self._look())


_REFUSE: Final = refuse_with(FleetError)
_SHORT: Final = Mapped(write=lambda text: text[:500])
_LIVE: Final = Codec(
    LiveCard,
    wire.SeenNode,
    _REFUSE,
    {
        "card": Mapped(write=write_card, read=read_card),
        "age_s": milliseconds("age_ms"),
        "trust": Mapped(write=str, read=lambda trust: Trust(trust or Trust.MEMBER)),
    },
    given=["beat"],
)
_CLASH: Final = Codec(Clash, wire.SeenClash, _REFUSE, {"node_id": "", "seen_s_ago": milliseconds("seen_ms_ago")})
_FAILURE: Final = Codec(
    Failure,
    wire.FailingPeer,
    _REFUSE,
    {"error": _SHORT, "since": Mapped("since_ms", None, lambda since: to_ms(-since), lambda ms: -from_ms(ms))},
)
_DRAFTS: Final = Codec(DraftUse, wire.SeenDrafts, _REFUSE, {"trouble": _SHORT})


def write_sight(fleet: str, sight: Sight) -> wire.GetFleetViewResponse:
    view = sight.view
    return wire.GetFleetViewResponse(
        own_node_id=view.own,
        fleet_id=fleet,
        nodes=_LIVE.write_all(view.nodes),
        clashes=_CLASH.write_all(view.clashes),
        revoked_node_ids=view.revoked,
        failing_peers=_FAILURE.write_all(sight.failures),
        rounds=sight.rounds,
        revocations_as_of_unix=sight.revocations_as_of,
        certificate_ends_unix=sight.certificate_ends,
        drafts=_DRAFTS.write_all(sight.drafts),
        plans=[wire.RunningPlan(model=model, words=words[:2000]) for model, words in sight.plans],
    )


def sight_of(message: wire.GetFleetViewResponse) -> Sight:
    return Sight(
        FleetView(
            NodeId(message.own_node_id),
            _LIVE.read_all(message.nodes),
            _CLASH.read_all(message.clashes),
            tuple(map(NodeId, message.revoked_node_ids)),
        ),
        _FAILURE.read_all(message.failing_peers),
        message.rounds,
        _DRAFTS.read_all(message.drafts),
        message.revocations_as_of_unix,
        message.certificate_ends_unix,
        tuple((plan.model, plan.words) for plan in message.plans),
    )


def control_channel(identity: Identity, address: str) -> grpc.aio.Channel:
    """To the node of this identity, and to no other."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", identity.member.tls_name)]
    return grpc.aio.secure_channel(address, channel_credentials(identity), options)


async def read_sight(channel: grpc.aio.Channel, timeout_s: float) -> Sight:
    """What a node sees, over a `control_channel`.

    Raises:
        NodeUnreachable: no node of this identity runs there.
        FleetError: it refuses.
    """
    try:
        message = await ControlServiceStub(channel).GetFleetView(wire.GetFleetViewRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, "The node of this machine") from error
    return sight_of(message)


def control_service(identity: Identity, guard: PeerGuard, look: Look) -> Service:
    servicer = ControlServicer(identity, guard, look)
    return Service(partial(add_ControlServiceServicer_to_server, servicer), {"ControlService/GetFleetView": Limit(KIB, 8)})
