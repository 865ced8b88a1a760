"""ControlService: the fleet as a node sees it, told to its own machine alone: the caller must have the node's own certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from paceline.core.ids import NodeId
from paceline.core.stats import DraftUse
from paceline.core.trust import Trust
from paceline.fleet.view import Clash, FleetView, LiveCard
from paceline.net.card_codec import read_card, write_card
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.discovery import Failure
from paceline.net.rpc_faults import error_of
from paceline.net.server import KIB, Service
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Limit
from paceline.net.trust.identity import Identity
from paceline.net.wire import control_pb2 as wire
from paceline.net.wire.control_pb2_grpc import ControlServiceServicer, ControlServiceStub, add_ControlServiceServicer_to_server

Context = grpc.aio.ServicerContext[Any, Any]


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


def write_sight(fleet: str, sight: Sight) -> wire.GetFleetViewResponse:
    """What a node tells."""
    view = sight.view
    return wire.GetFleetViewResponse(
        own_node_id=view.own,
        fleet_id=fleet,
        nodes=[wire.SeenNode(card=write_card(live.card), age_ms=round(live.age_s * 1000), trust=str(live.trust)) for live in view.nodes],
        clashes=[
            wire.SeenClash(
                node_id=clash.node_id,
                addresses=clash.addresses,
                other_addresses=clash.other_addresses,
                seen_ms_ago=round(clash.seen_s_ago * 1000),
            )
            for clash in view.clashes
        ],
        revoked_node_ids=view.revoked,
        failing_peers=[
            wire.FailingPeer(address=failure.address, error=failure.error[:500], since_ms=round(-failure.since * 1000))
            for failure in sight.failures
        ],
        rounds=sight.rounds,
        revocations_as_of_unix=sight.revocations_as_of,
        certificate_ends_unix=sight.certificate_ends,
        drafts=[
            wire.SeenDrafts(
                by=use.by,
                drafts=use.drafts,
                drafted_tokens=use.drafted_tokens,
                accepted_tokens=use.accepted_tokens,
                node_id=use.node_id,
                model_id=use.model_id,
                blocks=use.blocks,
                hop_s=use.hop_s,
                failures=use.failures,
                trouble=use.trouble[:500],
            )
            for use in sight.drafts
        ],
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


def sight_of(message: wire.GetFleetViewResponse) -> Sight:
    """What a node told."""
    view = FleetView(
        own=NodeId(message.own_node_id),
        nodes=tuple(LiveCard(read_card(seen.card), seen.age_ms / 1000, trust=Trust(seen.trust or Trust.MEMBER)) for seen in message.nodes),
        clashes=tuple(
            Clash(NodeId(seen.node_id), tuple(seen.addresses), tuple(seen.other_addresses), seen.seen_ms_ago / 1000)
            for seen in message.clashes
        ),
        revoked=tuple(NodeId(node_id) for node_id in message.revoked_node_ids),
    )
    failures = tuple(Failure(failing.address, failing.error, -failing.since_ms / 1000) for failing in message.failing_peers)
    drafts = tuple(
        DraftUse(
            seen.by,
            seen.drafts,
            seen.drafted_tokens,
            seen.accepted_tokens,
            seen.node_id,
            seen.model_id,
            seen.blocks,
            seen.hop_s,
            seen.failures,
            seen.trouble,
        )
        for seen in message.drafts
    )
    return Sight(view, failures, message.rounds, drafts, message.revocations_as_of_unix, message.certificate_ends_unix)


def control_service(identity: Identity, guard: PeerGuard, look: Look) -> Service:
    """What a node's server registers."""
    servicer = ControlServicer(identity, guard, look)
    return Service(partial(add_ControlServiceServicer_to_server, servicer), {"ControlService/GetFleetView": Limit(KIB, 8)})
