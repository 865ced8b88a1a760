"""Weights between this machine and its fleet: what a node gives, and how a command finds who has a model.

A command asks the node that runs on this machine, which sees the whole fleet. Where none runs, it asks the members it knows of for their
own cards, all at once and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc.aio

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import FleetError, MembershipError, SourceLost
from paceline.fleet.card import NodeCard, Role
from paceline.fleet.revocations import Revocations
from paceline.fleet.sources import WeightsSource, weights_sources
from paceline.node.fetch import Dial, Fetch, fetch_model
from paceline.node.fleet_look import look
from paceline.store.catalog import LocalModel
from paceline.store.home import Home
from paceline.store.library import Library
from paceline.store.pull import Progress
from paceline.store.selection import parse_ref
from paceline.transport.channels import CHANNEL_OPTIONS, ChannelPool, Purpose
from paceline.transport.trust.certificates import NODE_NAME
from paceline.transport.trust.credentials import channel_credentials
from paceline.transport.trust.folder import FleetFolder
from paceline.transport.trust.identity import Identity
from paceline.transport.trust.seals import Voids, open_card, open_revocations
from paceline.transport.weights_servicer import WeightsServicer
from paceline.transport.wire import fleet_pb2 as wire
from paceline.transport.wire.fleet_pb2_grpc import CapabilityServiceStub
from paceline.transport.wire.weights_pb2_grpc import add_WeightsServiceServicer_to_server

ASK_S: Final = 3.0
"""Longest wait for a card. Raising it finds slower nodes, and makes a pull of what the fleet does not have begin later."""
MOST_ASKED: Final = 32


def weights_service(home: Home) -> Callable[[grpc.aio.Server], None]:
    """What a node's server registers, to give the models of `home` to members."""
    servicer = WeightsServicer(Library(home))

    def register(server: grpc.aio.Server) -> None:
        add_WeightsServiceServicer_to_server(servicer, server)

    return register


def dial_through(pool: ChannelPool) -> Dial:
    """Channels of a node to exactly the members meant."""

    @asynccontextmanager
    async def dial(source: WeightsSource, address: str) -> AsyncGenerator[grpc.aio.Channel]:
        try:
            member = await pool.meet(address, ASK_S)
            channel = pool.get(Purpose.WEIGHTS, address, member)
        except FleetError as error:
            raise SourceLost(f"{source.node_id} can't be reached at {address}: {error.message}") from error
        if member.node_id != source.node_id:
            raise SourceLost(f"{member.node_id} is at {address}, where {source.node_id} should be")
        yield channel

    return dial


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told of a fetch as it goes on."""

    progress: Progress
    announce: Callable[[str], None]


def pull_from_fleet(model: str, home: Home, told: Told, clock: Clock | None = None) -> LocalModel | None:
    """Bring a model here from the fleet.

    Args:
        model: as a person names it: `org/name`, with `:file` or a part of it where wanted, another id, or twelve digits of a digest.
        home: where it goes, and where this machine's identity is.
        told: of progress.
        clock: for certificates.

    Returns:
        None where this machine is in no fleet, or nobody else there has the model.

    Raises:
        ModelNotFound: the fleet has different models of that name.
        DownloadError, FetchInProgress, ModelFileError, UnsupportedModel, ConfigError: as `fetch_model`.
        IdentityError: this machine's identity can't be used.
    """
    folder = FleetFolder(home.fleet)
    return asyncio.run(_pull(model, home, folder, told, clock or SystemClock())) if folder.is_member else None


async def _pull(model: str, home: Home, folder: FleetFolder, told: Told, clock: Clock) -> LocalModel | None:
    identity = folder.identity()
    voids = Revocations(open_revocations(folder.sealed_revocations(), identity.root)).voids
    pool = ChannelPool(identity, voids, clock)
    try:
        cards = await live_cards(home, identity, voids, clock)
        sources = weights_sources(identity.node_id, cards, _full_name(model, cards))
        if not sources:
            return None
        return await fetch_model(Fetch(sources, dial_through(pool), home, told.progress, told.announce))
    finally:
        await pool.close()


async def live_cards(home: Home, identity: Identity, voids: Voids, clock: Clock) -> Sequence[NodeCard]:
    """The fleet's cards, as far as they can be had now: from this machine's node, else from members themselves."""
    try:
        return (await look(home)).sight.view.cards
    except MembershipError:
        pass  # no node runs here
    folder = FleetFolder(home.fleet)
    asked = (_own_card(address, identity, voids, clock) for address in folder.peers()[:MOST_ASKED])
    return [card for card in await asyncio.gather(*asked) if card is not None]


async def _own_card(address: str, identity: Identity, voids: Voids, clock: Clock) -> NodeCard | None:
    """The card of whoever of the fleet is at an address; None where nobody is."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]
    async with grpc.aio.secure_channel(address, channel_credentials(identity), options) as channel:
        try:
            answer = await CapabilityServiceStub(channel).GetNodeCapability(wire.GetNodeCapabilityRequest(), timeout=ASK_S)
            return open_card(answer.card.card, root=identity.root, voids=voids, now=clock.wall()).card
        except (grpc.aio.AioRpcError, FleetError):
            return None


def _full_name(model: str, cards: Sequence[NodeCard]) -> str:
    """The one id of the fleet that `org/name:part-of-a-file` means; as it was given where it means none or several."""
    ref = parse_ref(model)
    if ref is None or ref.selector is None:
        return model
    folder, part = ref.folder.lower(), ref.selector.lower()
    ids = {offer.model_id for card in cards for offer in card.models if offer.role is Role.VERIFIER}
    split = [(model_id, *model_id.lower().split(":", 1)) for model_id in ids if ":" in model_id]
    fits = [model_id for model_id, of, file in split if of == folder and part in file]
    exact = [model_id for model_id, of, file in split if of == folder and part == file]
    return (exact or fits)[0] if len(exact or fits) == 1 else model
