"""Which node to fetch a model's weights from, as a fleet's cards say."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ModelNotFound
from paceline.core.ids import NodeId
from paceline.fleet.card import ModelOffer, NodeCard
from paceline.fleet.eligibility import MayGiveWeights
from paceline.fleet.machines import DIGEST_DIGITS, Links, live_cards


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A node that has all of a model."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """host:port, the best first."""
    model_id: str
    digest: str
    size_bytes: int
    files: str = ""
    """What its card says of all files together; empty: nothing."""


def weights_sources(givers: MayGiveWeights, model: str) -> tuple[WeightsSource, ...]:
    """Other nodes of those that may give weights, that have the whole model and stay, over the best link first. All have one digest and the same files
    beside, so one may go on where another stopped.

    Args:
        model: its id in any case (of `org/name`, any GGUF file in it), or at least twelve digits of its digest.

    Raises:
        ModelNotFound: the fleet has different models of that name, or other files beside the weights.
    """
    digests = digests_of(givers, model)
    if len(digests) > 1:
        listed = ", ".join(f"{name} {digest[:DIGEST_DIGITS]}" for digest, name in sorted(digests.items()))
        raise ModelNotFound(f"the fleet has different models called {model[:200]!r}: {listed}", "Name one by its digest")
    sources = sources_of(givers, next(iter(digests))) if digests else ()
    beside = {source.files: source.node_id for source in sources if source.files}
    if len(beside) > 1:
        listed = ", ".join(f"{node_id} {files[:DIGEST_DIGITS]}" for files, node_id in sorted(beside.items()))
        raise ModelNotFound(
            f"the fleet's nodes have other files beside the same weights of {model[:200]!r}: {listed}",
            "They differ in tokenizer or template: pull it from a hub, or remove it where it is wrong",
        )
    return tuple(source for source in sources if source.files or not beside)


def digests_of(givers: MayGiveWeights, model: str) -> dict[str, str]:
    """What nodes mean by a name: digests, and a name in full for each."""
    return {offer.digest: offer.model_id for _, offer in _whole(givers) if _is_named(offer, model)}


def sources_of(givers: MayGiveWeights, digest: str) -> tuple[WeightsSource, ...]:
    """As `weights_sources`, of one digest, whatever lies beside."""
    cards, own = live_cards(givers.cards), givers.own
    links = Links(cards)
    found: dict[NodeId, tuple[tuple[float, float, NodeId], WeightsSource]] = {}
    for card, offer in _whole(givers):
        if card.node_id == own or offer.digest != digest or not card.addresses:
            continue
        link = links.between(own, card.node_id)
        rank = (0.0 if link is None else -link.bytes_per_s, 0.0 if link is None else link.rtt_s, card.node_id)
        found[card.node_id] = (
            rank,
            WeightsSource(card.node_id, _addresses(cards.get(own), card), offer.model_id, offer.digest, offer.size_bytes, offer.files),
        )
    return tuple(source for _, source in sorted(found.values(), key=lambda pair: pair[0]))


def _whole(givers: MayGiveWeights) -> list[tuple[NodeCard, ModelOffer]]:
    cards = live_cards(givers.cards).values()
    return [(card, offer) for card in cards for offer in card.models if offer.runs_whole and offer.digest]


def _addresses(own: NodeCard | None, card: NodeCard) -> tuple[str, ...]:
    """The address that was measured best first, then the others as the node lists them."""
    best = [link.address for link in (own.links if own is not None else ()) if link.to == card.node_id and link.address in card.addresses]
    return tuple(dict.fromkeys([*best, *card.addresses]))


def _is_named(offer: ModelOffer, model: str) -> bool:
    asked, name = model.lower(), offer.model_id.lower()
    if asked in {name, name.partition(":")[0]}:
        return True
    return len(asked) >= DIGEST_DIGITS and offer.digest.startswith(asked)
