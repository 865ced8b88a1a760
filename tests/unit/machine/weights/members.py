"""A member that gives weights and shows its card, and a PACELINE_HOME that belongs to its fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from tests.fakes.fleets import TestFleet
from tests.unit.machine.weights.nodes import WatchedLibrary

from paceline.core.ids import Trust
from paceline.fleet.card import ModelOffer, NodeCard
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.credentials import server_credentials
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import sign_card
from paceline.net.weights_servicer import WeightsServicer
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceServicer, add_CapabilityServiceServicer_to_server
from paceline.net.wire.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from paceline.store.home import Home


class OwnCard(CapabilityServiceServicer):
    """Says who it is, and nothing else."""

    def __init__(self, identity: Identity, offers: tuple[ModelOffer, ...]) -> None:
        self._identity, self._offers = identity, offers
        self.address = ""

    async def ExchangeCapabilities(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    async def MeasureLink(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    async def GetNodeCapability(self, request: Any, context: Any) -> wire.GetNodeCapabilityResponse:
        card = NodeCard(self._identity.node_id, 1, (self.address,), b"instance", 120, 1_800_000_000, models=self._offers)
        sealed = sign_card(self._identity, card)
        signed = wire.SignedCard.FromString(sealed.sealed)
        signed.certificate = sealed.certificate
        return wire.GetNodeCapabilityResponse(card=wire.PassedCard(card=signed), protocol=PROTOCOL_VERSION)


@asynccontextmanager
async def member(
    fleet: TestFleet, name: str, home: Home, *offers: ModelOffer, trust: Trust = Trust.MEMBER
) -> AsyncIterator[tuple[str, WatchedLibrary]]:
    """A member that serves; its address, and what it gave."""
    identity = fleet.member(name, trust=trust)
    card, library = OwnCard(identity, offers), WatchedLibrary(home)
    server = grpc.aio.server()
    add_CapabilityServiceServicer_to_server(card, server)
    add_WeightsServiceServicer_to_server(WeightsServicer(library, lambda _: None), server)
    card.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_credentials(identity))}"
    await server.start()
    try:
        yield card.address, library
    finally:
        await server.stop(None)


def belongs(home: Home, fleet: TestFleet, name: str, *peers: str) -> None:
    """Make `home` a member's that knows these addresses."""
    folder = FleetFolder(home.fleet)
    folder.write_secret(folder.identity_file, fleet.member(name).to_pem())
    folder.keep_peers(peers)
