"""Which proposers could draft for this machine's model, the best first: the plan that every node computes, asked for drafts alone. And ways to them:
over the fleet's channels, or to this node's own pool.

Law: who drafts sees the text, so only those that may do (`fleet.eligibility`); and a draft model whose tokens are others than the model's is an error, never a slow draft.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from paceline.core.background import TaskSet, end_tasks
from paceline.core.errors import NodeUnreachable, PacelineError, PlacementError, RemoteProposerError, VocabularyMismatch
from paceline.core.ids import NodeId
from paceline.core.model import ModelRef
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import MayDraft, Use
from paceline.fleet.machines import Links, live_cards, sensible
from paceline.fleet.placement import plan
from paceline.fleet.plan import ALONE, Draft, Pin, PlanRequest
from paceline.fleet.ways import ASSUMED_RTT_S, Alone
from paceline.net.channels import Purpose
from paceline.net.member.node import FleetNode
from paceline.ways.draft.connection import OnBlock, RemoteConnection
from paceline.ways.draft.pool import BlockAsk, ProposerPool
from paceline.ways.draft.price import DRAFT, Drafted

LEAST_ASK_S = 5e-4
"""What asking takes where the way is short."""
MOST_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Drafter:
    """A proposer that may be asked, and how fast it should be."""

    node_id: NodeId
    instance: bytes
    model_id: str
    tokens_per_s: float
    prompt_tokens_per_s: float
    rtt_s: float

    @property
    def key(self) -> Key:
        return self.node_id, self.instance

    def is_same(self, other: Drafter) -> bool:
        """Whether it is that proposer, maybe with other figures."""
        return (self.key, self.model_id) == (other.key, other.model_id)

    @property
    def block(self) -> int:
        """Tokens that are drafted in the time that asking takes anyway."""
        return max(1, min(MOST_BLOCK, int(max(self.rtt_s, LEAST_ASK_S) * self.tokens_per_s)))

    def takes_s(self, new_tokens: int, length: int) -> float:
        return self.rtt_s + new_tokens / self.prompt_tokens_per_s + length / self.tokens_per_s


def drafter_of(node_id: NodeId, instance: bytes, model_id: str, offer: ModelOffer, rtt_s: float) -> Drafter:
    """A proposer as it is offered, whatever the offer says of its speed."""
    rate = sensible(offer.tokens_per_second, 1e-2, 1e9) or 1.0
    prompt_rate = sensible(offer.prefill_tokens_per_second, 1e-2, 1e9) or rate
    return Drafter(node_id, instance, model_id, rate, prompt_rate, rtt_s)


Key = tuple[NodeId, bytes]
"""A node's process: one that started anew is forgiven."""
Find = Callable[[Collection[Key]], Sequence[Drafter]]
"""Proposers but for those named, the best first. Raises PlacementError: there are none."""


class Connection(Protocol):
    """A way to a proposer: `ways.draft.connection.RemoteConnection`, or this machine's own pool."""

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None: ...
    async def close(self) -> None: ...


OnEnd = Callable[[RemoteProposerError], None]
OpenConnection = Callable[[Drafter, OnBlock, OnEnd], Connection]
"""Raises PacelineError: it can't be reached."""


class LocalConnection:
    """To proposers of this process. Lives on the event loop.

    Args:
        on_end: told why there will be no more.
    """

    def __init__(self, pool: ProposerPool, caller: str, on_block: OnBlock, on_end: OnEnd) -> None:
        self._pool, self._caller, self._on_block, self._on_end = pool, caller, on_block, on_end
        self._tasks = TaskSet()
        self._sessions: set[int] = set()

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        if ended:
            # Soon, so that asks sent before begin before.
            asyncio.get_running_loop().call_soon(self._pool.end, self._caller, ended)
        self._sessions.difference_update(ended)
        if ask is not None:
            self._sessions.add(ask.session)
            self._tasks.start(self._propose(ask))

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        self._pool.end(self._caller, tuple(self._sessions))

    async def _propose(self, ask: BlockAsk) -> None:
        try:
            block = await self._pool.propose(self._caller, ask)
        except PacelineError as error:
            self._on_end(RemoteProposerError(error.message, error.hint, status="FAILED_PRECONDITION"))
        except Exception as error:  # noqa: BLE001 - whatever a proposer fails of, drafts are not to be had from it
            self._on_end(RemoteProposerError(f"Drafting failed here: {type(error).__name__}: {error}", status="INTERNAL"))
        else:
            self._on_block(ask.session, block)


HERE = NodeId("here")


class OwnProposers:
    """Finds them and opens connections to them.

    Args:
        offers: what they promise, by the pool's names.
    """

    def __init__(self, pool: ProposerPool, offers: Mapping[str, ModelOffer]) -> None:
        self._pool, self._offers = pool, offers

    def find(self, model_id: str, left_out: Collection[Key]) -> Sequence[Drafter]:
        """As `Find`, of a model; empty: of any."""
        found = [drafter_of(HERE, b"", name, offer, 0.0) for name, offer in self._offers.items() if model_id in {"", name}]
        left = [one for one in found if one.key not in left_out]
        if not left:
            raise PlacementError(f"No node drafts with {model_id or 'a model'} here", f"Start with --propose {model_id or 'MODEL'}.")
        return left

    def open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> LocalConnection:
        return LocalConnection(self._pool, drafter.node_id, on_block, on_end)


@dataclass(frozen=True, slots=True)
class Verifier:
    """The model that is drafted for, on this machine."""

    node_id: NodeId
    model: ModelRef
    vocabulary: str
    """Hash of its tokens."""


def drafters(
    drafting: MayDraft, verifier: Verifier, model_id: str, left_out: Collection[Key] = (), on: NodeId | None = None
) -> Sequence[Drafter]:
    """Those that could draft, the best first; other machines before this one.

    Args:
        model_id: of the proposer; empty: any model whose drafts pay.
        left_out: not these processes.
        on: the one node that is to draft; None: any.

    Raises:
        VocabularyMismatch: those that have it have other tokens.
        PlacementError: no node has it.
    """
    here = live_cards(drafting.cards)
    own = verifier.node_id
    barred = {node_id for node_id, instance in left_out if node_id in here and here[node_id].instance == instance}
    able = {node_id: card for node_id, card in here.items() if node_id == own or node_id not in barred}
    offers = _offers(able.values(), verifier, model_id)
    # Without a model to name, any that pays: the plan is then free to say that none does.
    ways = frozenset({DRAFT} if model_id or on is not None else {DRAFT, ALONE})
    planned = plan(
        able.values(),
        PlanRequest(verifier.model.digest, verifier.model.weights, ways=ways, pins=(Pin(own),), proposer=on, draft_model=model_id),
        (Alone(), Drafted()),
    )
    links = Links(able)
    ranked: list[tuple[NodeId, str]] = []
    for choice in (planned.chosen, *planned.runners_up):
        if choice.draft is None:
            break
        ranked.append((choice.draft.node_id, choice.draft.model_id))
    # The plan names this machine only where there is no other; here it is what is left when the others fail.
    ranked += [key for key in offers if key[0] == own and model_id and on is None]
    keys = [key for key in dict.fromkeys(ranked) if key in offers and key[0] not in barred]
    if not keys:
        raise PlacementError(f"No node is left to draft with {model_id[:200]}" if model_id else "No node's drafts would save time")
    return [_drafter(here[node_id], offers[node_id, name], links, own) for node_id, name in keys]


def fitting_models(drafting: MayDraft, verifier: Verifier) -> frozenset[str]:
    """Ids of all that could draft. As `drafters`."""
    try:
        return frozenset(name for _, name in _offers(live_cards(drafting.cards).values(), verifier, ""))
    except PlacementError:
        return frozenset()


def placed(drafting: MayDraft, draft: Draft) -> Drafter:
    """The one that a plan names, as it is now.

    Raises:
        PlacementError: it is gone, drafts no more with that, or may not see texts.
    """
    able = live_cards(drafting.cards)
    card = able.get(draft.node_id)
    offers = (
        ()
        if card is None
        else (each for each in card.models if each.role is Role.PROPOSER and each.weights and each.model_id == draft.model_id)
    )
    offer = next(iter(offers), None)
    if card is None or offer is None:
        raise PlacementError(f"{draft.node_id} does not draft with {draft.model_id}", "Plan again: the fleet has changed.")
    return _drafter(card, offer, Links(able), drafting.own)


def _offers(cards: Collection[NodeCard], verifier: Verifier, model_id: str) -> dict[tuple[NodeId, str], ModelOffer]:
    """By node and model: those that could draft. Older nodes offer prompt lookup, which has no weights and which every node does for itself."""
    offers = {
        (card.node_id, offer.model_id): offer
        for card in cards
        for offer in card.models
        if offer.role is Role.PROPOSER and offer.weights and model_id in {"", offer.model_id}
    }
    if not offers:
        which, model = (f" with {model_id[:200]!r}", model_id[:200]) if model_id else ("", "MODEL")
        there = ", ".join(
            sorted({offer.model_id for card in cards for offer in card.models if offer.role is Role.PROPOSER and offer.weights})
        )
        hint = f"Start a machine with --propose {model}" + (f", or choose of what there is: {there[:200]}." if there else ".")
        raise PlacementError(f"No node in the fleet drafts{which}", hint)
    fitting = {key: offer for key, offer in offers.items() if offer.vocabulary == verifier.vocabulary}
    if not fitting:
        names = ", ".join(sorted({name for _, name in offers}))[:200]
        raise VocabularyMismatch(
            f"{names} can't draft: other tokens than those of the model it would draft for",
            "A draft model has the same tokenizer: mostly it is a smaller one of the same family.",
        )
    return fitting


def _drafter(card: NodeCard, offer: ModelOffer, links: Links, own: NodeId) -> Drafter:
    link = links.between(own, card.node_id)
    rtt_s = 0.0 if card.node_id == own else ASSUMED_RTT_S if link is None else link.rtt_s
    return drafter_of(card.node_id, card.instance, offer.model_id, offer, rtt_s)


class FleetConnections:
    """Opens connections.

    Args:
        own: this node's own proposers, asked without a call.
    """

    def __init__(self, fleet: FleetNode, own: ProposerPool | None = None) -> None:
        self._fleet, self._own = fleet, own

    def open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> Connection:
        if self._own is not None and drafter.node_id == self._fleet.node_id:
            return LocalConnection(self._own, drafter.node_id, on_block, on_end)
        return RemoteConnection(self.channel(drafter.node_id), drafter.node_id, on_block, on_end)

    def channel(self, node_id: NodeId) -> grpc.aio.Channel:
        """To a member, over the address that serves best.

        Raises:
            NodeUnreachable: it is not in view.
            FleetError: its certificate is not good.
        """
        fleet = self._fleet
        live = fleet.view().get(node_id)
        if live is None:
            raise NodeUnreachable(f"{node_id} is not in this fleet's view")
        return fleet.channel(node_id, live.card.addresses, Use.DRAFT, Purpose.DRAFTS)
