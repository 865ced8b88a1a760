"""Weights between this machine and its fleet: what a node gives, and how a command finds who has a model.

A command asks the node that runs on this machine, which sees the whole fleet. Where none runs, it asks the members it knows of for their
own cards, all at once and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from paceline.core.background import run_interruptibly
from paceline.core.clock import SystemClock
from paceline.core.errors import DownloadError, FetchInProgress, MembershipError, PacelineError, SourceLost
from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard
from paceline.fleet.eligibility import FleetView, LiveCard, MayGiveWeights, Revocations, TrustPolicy, Use, Voids
from paceline.fleet.placement import WeightsSource, digests_of, sources_of, weights_sources
from paceline.machine.config_file import read_trust_policy
from paceline.machine.fetch import Dial, Fetch, fetch_model
from paceline.net.channels import ChannelPool, Purpose
from paceline.net.member.state import look
from paceline.net.server import Service
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context
from paceline.net.trust.seals import open_revocations
from paceline.net.weights_servicer import weights_service
from paceline.store.catalog import Library, LocalModel, ModelLocation
from paceline.store.home import Home
from paceline.store.hub import Listed
from paceline.store.pull import Progress
from paceline.store.selection import parse_ref

ASK_S: Final = 3.0
"""Longest wait for a card. Raising it finds slower nodes, and makes a pull of what the fleet does not have begin later."""
MOST_ASKED: Final = 32


def give_weights(home: Home, guard: PeerGuard, trust: TrustPolicy, beside: Sequence[ModelLocation] = ()) -> Service:
    """What a node's server registers, to give the models of `home`, and those that run here from elsewhere, to those that may take them."""

    def admit(context: Context) -> None:
        trust.check(guard.peer(context), Use.TAKE_WEIGHTS, guard.voids)

    return weights_service(Library(home, beside), admit)


def dial_through(pool: ChannelPool, trust: TrustPolicy, voids: Voids) -> Dial:
    """Channels of a node to exactly the members meant, as far as they may give weights."""

    @asynccontextmanager
    async def dial(source: WeightsSource, address: str) -> AsyncGenerator[grpc.aio.Channel]:
        try:
            member = await pool.meet(address, ASK_S)
            trust.check(member, Use.GIVE_WEIGHTS, voids)
            channel = pool.get(Purpose.WEIGHTS, address, member)
        except PacelineError as error:
            raise SourceLost(f"{source.node_id} can't be reached at {address}: {error.message}") from error
        if member.node_id != source.node_id:
            raise SourceLost(f"{member.node_id} is at {address}, where {source.node_id} should be")
        yield channel

    return dial


@dataclass(frozen=True, slots=True)
class Pulls:
    """What a command pulls from the fleet."""

    home: Home
    """Where it goes, and where this machine's identity is."""
    progress: Progress
    """Told after every piece; called in any thread."""
    announce: Callable[[str], None]
    """Told in words who sends, and who did not go on."""

    def run(self, bring: Callable[[MayGiveWeights, Dial], Coroutine[Any, Any, LocalModel | None]]) -> LocalModel | None:
        """Look at the fleet, and bring a model from it; None where this machine is in none."""
        folder = FleetFolder(self.home.fleet)
        if not folder.is_member:
            return None

        async def look_and_bring() -> LocalModel | None:
            identity = folder.identity()
            voids = Revocations(open_revocations(folder.sealed_revocations(), identity.root)).voids
            pool, trust = ChannelPool(identity, voids, SystemClock()), read_trust_policy(self.home)
            try:
                givers: MayGiveWeights = trust.eligible(await _fleet_view(self.home, identity.node_id, folder, pool), Use.GIVE_WEIGHTS)
                return await bring(givers, dial_through(pool, trust, voids))
            finally:
                await pool.close()

        return run_interruptibly(look_and_bring())

    def mirror(self, listed: Listed) -> LocalModel | None:
        """Bring what the hub lists from nodes that have the same files: whatever they say of it, those are what is taken.

        Returns:
            None where none has them, or could finish.

        Raises:
            FetchInProgress, ModelFileError, UnsupportedModel, ConfigError: as `fetch_model`.
        """

        async def bring(givers: MayGiveWeights, dial: Dial) -> LocalModel | None:
            digest = listed.digest
            for known in digests_of(givers, listed.ref.folder) if digest is None else (digest,):
                sources = sources_of(givers, known)
                try:
                    if sources:
                        return await fetch_model(Fetch(sources, dial, self.home, self.progress, self.announce, listed=listed))
                except FetchInProgress:
                    raise
                except DownloadError as error:
                    self.announce(error.message)
            return None

        return self.run(bring)


def pull_from_fleet(model: str, home: Home, progress: Progress, announce: Callable[[str], None]) -> LocalModel | None:
    """Bring a model here on the fleet's word alone, which is announced and noted: where no hub says what the name means.

    Args:
        model: as a person names it: `org/name`, with `:file` or a part of it where wanted, another id, or twelve digits of a digest.
        home, progress, announce: as of `Pulls`.

    Returns:
        None where this machine is in no fleet, or no other node there has the model.

    Raises:
        ModelNotFound: the fleet has different models of that name.
        DownloadError, FetchInProgress, ModelFileError, UnsupportedModel, ConfigError: as `fetch_model`.
        IdentityError: this machine's identity can't be used.
    """

    async def bring(givers: MayGiveWeights, dial: Dial) -> LocalModel | None:
        sources = weights_sources(givers, _full_name(model, givers.cards))
        if not sources:
            return None
        nodes = ", ".join(source.node_id for source in sources)
        announce(f"What {sources[0].model_id} is, no hub says but {nodes}: the digest is {sources[0].digest}")
        return await fetch_model(Fetch(sources, dial, home, progress, announce))

    return Pulls(home, progress, announce).run(bring)


async def _fleet_view(home: Home, own: NodeId, folder: FleetFolder, pool: ChannelPool) -> FleetView:
    """The fleet, as far as it can be seen now: as this machine's node sees it, else as members themselves say."""
    try:
        return (await look(FleetFolder(home.fleet))).sight.view
    except MembershipError:
        pass  # no node runs here
    asked = await asyncio.gather(*(_card_at(address, pool) for address in folder.peers()[:MOST_ASKED]))
    return FleetView(own, tuple(LiveCard(sealed.card, 0.0, trust=sealed.trust) for sealed in asked if sealed is not None))


async def _card_at(address: str, pool: ChannelPool) -> SealedCard | None:
    """The card of the fleet's node at an address; None where there is none."""
    try:
        return await pool.card_at(address, ASK_S)
    except PacelineError:
        return None


def _full_name(model: str, cards: Sequence[NodeCard]) -> str:
    """The one id of the fleet that `org/name:part-of-a-file` means; as it was given where it means none or several."""
    ref = parse_ref(model)
    if ref is None or ref.selector is None:
        return model
    folder, part = ref.folder.lower(), ref.selector.lower()
    ids = {offer.model_id for card in cards for offer in card.models if offer.runs_whole}
    split = [(model_id, *model_id.lower().split(":", 1)) for model_id in ids if ":" in model_id]
    fits = [model_id for model_id, of, file in split if of == folder and part in file]
    exact = [model_id for model_id, of, file in split if of == folder and part == file]
    return (exact or fits)[0] if len(exact or fits) == 1 else model
