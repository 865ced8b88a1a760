"""What KV at another node is worth: how far a prompt's prefix lies there, and from how many blocks on it is fetched sooner than it is computed here.

Law: pure. A link that was not measured, or a speed, is no reason to fetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from paceline.core.following import is_same_arithmetic
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerSpan, ModelRef
from paceline.engine.step_costs import BESIDE
from paceline.fleet.card import Link, ModelOffer, NodeCard, two_digits
from paceline.fleet.machines import Links
from paceline.machine.kv_spans import KvPart
from paceline.ways.kv.slices import kv_slices

MARK_BYTES = 8
"""Of a key, in what a node tells of its prefixes."""
FASTER = 1.25
"""By what factor fetching must be faster: estimates are rough, and the link is others' too. Raising it: more is computed again."""
SLOWER = 1.1
"""By what factor a prompt may take longer elsewhere where answers are written here: each of its steps here would hold them up, and they it."""
HELD_UP = BESIDE / (BESIDE - 1)
"""By what factor a block takes longer here, at most, while answers are written: prompts get the rest of a step at least. Raising it: a slow node is waited
for longer, and answers here are held up less by what computing its blocks here takes."""
MOST_PARTS = 6
"""Of a block, that one machine asks another for at once. Raising it: more peers are sent blocks at a time, each of them slower."""
OPENING_S, ROUND_TRIPS = 0.02, 4
"""From asking until the first block is on its way, beside the link's round trips: a call, and a connection with its handshake."""


LAST_TOKENS = 512
"""Of a prompt, whose blocks are on their way once all is computed: as many as one step runs."""


def marked(marks: Container[bytes], keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Marks that are of a chain, and how many blocks lie before the end of each."""
    return [(place, mark) for place, key in enumerate(keys, start=1) if (mark := key[:MARK_BYTES]) in marks]


def run_of(told: Container[bytes], found: Sequence[tuple[int, bytes]]) -> int:
    """How many blocks of a chain a node may have, from the first on, by the marks that it told and those that were found."""
    return max((place for place, mark in found if mark in told), default=0)


@dataclass(frozen=True, slots=True)
class KvPrice:
    """Of blocks of one model at one node."""

    opening_s: float
    fetched_s: float
    """One block over the link."""
    computed_s: float
    """One block here."""

    @property
    def least_blocks(self) -> int | None:
        """The fewest that are worth fetching; None: no number is."""
        gain_s = self.computed_s / FASTER - self.fetched_s
        return max(1, ceil(self.opening_s / gain_s)) if gain_s > 0 else None

    def here_s(self, n_writing: int) -> float:
        """One block here, beside so many answers."""
        return self.computed_s * (HELD_UP if n_writing else 1.0)

    def saved_s(self, n_blocks: int, n_writing: int = 0) -> float:
        """What fetching so many saves, to a prompt and to so many answers that are written here; 0 where it is not worth it."""
        least = self.least_blocks
        if least is None or n_blocks < least:
            return 0.0
        return n_blocks * ((1 + n_writing) * self.computed_s - self.fetched_s) - self.opening_s

    def words(self, block_tokens: int) -> str:
        """Why blocks are fetched, or not."""
        fetched, computed = (two_digits(block_tokens / seconds) for seconds in (self.fetched_s, self.computed_s))
        least = self.least_blocks
        if least is None:
            return f"its KV is not fetched: {fetched:g} tokens a second come from there, and {computed:g} are computed here"
        return f"its KV is fetched from {least * block_tokens} tokens on: {fetched:g} a second come from there, and {computed:g} are computed here"


def price(
    block_bytes: int, block_tokens: int, offer: ModelOffer | None, link: Link | None, seen_bytes_per_s: float | None = None
) -> KvPrice | None:
    """What blocks cost; None where too little is known.

    Args:
        offer: of the model, here: how fast prompts are computed.
        link: to the node.
        seen_bytes_per_s: what blocks that came from there took lately, in place of the link's.
    """
    if offer is None or link is None or offer.prefill_tokens_per_second <= 0:
        return None
    rate = seen_bytes_per_s or link.bytes_per_s
    return KvPrice(OPENING_S + ROUND_TRIPS * link.rtt_s, block_bytes / max(rate, 1.0), block_tokens / offer.prefill_tokens_per_second)


UNPRICED = KvPrice(0.0, 0.0, 0.0)
"""Of blocks that another node decided on."""


def parted_price(
    whole: KvPart,
    block_tokens: int,
    offer: ModelOffer | None,
    there: Sequence[LayerSpan] | NodeId,
    here: Sequence[LayerSpan] | NodeId,
    links: Links,
) -> KvPrice | None:
    """What blocks cost whose parts cross between several machines at once, each over its own link; None where too little is known, or they are more parts
    than are given at once.

    Args:
        there, here: where the layers lie.
    """
    if offer is None or offer.prefill_tokens_per_second <= 0:
        return None
    sources, targets = ((LayerSpan(spans, whole.layers),) if isinstance(spans, str) else tuple(spans) for spans in (there, here))
    ranges = [[range(span.layers.start, span.layers.stop) for span in spans] for spans in (sources, targets)]
    opening_s, each_s = OPENING_S, [0.0] * len(targets)
    try:
        slices = kv_slices(*ranges)
    except ValueError:
        return None  # it has moved
    asked = Counter(targets[one.target].node_id for one in slices)
    if max(asked.values(), default=0) > MOST_PARTS or asked.total() > 2 * MOST_PARTS:
        return None
    for one in slices:
        source, target = sources[one.source].node_id, targets[one.target].node_id
        if source == target:
            continue
        link = links.between(source, target)
        if link is None:
            return None
        opening_s = max(opening_s, OPENING_S + ROUND_TRIPS * link.rtt_s)
        each_s[one.target] += len(one.part) * whole.layer_bytes / max(link.bytes_per_s, 1.0)
    return KvPrice(opening_s, max(each_s), block_tokens / offer.prefill_tokens_per_second)


@dataclass(frozen=True, slots=True)
class PrefillPrice:
    """Of a prompt that another node computes, block by block."""

    opening_s: float
    moved_s: float
    """One block over the link."""
    there_s: float
    """To compute one there."""
    here_s: float
    last_blocks: int
    """That are on their way once all are computed."""

    def pushed_s(self, n_there: int, n_moved: int) -> float:
        """Until so many blocks are here, of so many that are computed there."""
        return self.opening_s + max(n_there * self.there_s, n_moved * self.moved_s) + min(n_moved, self.last_blocks) * self.moved_s

    def saved_s(self, n_there: int, n_moved: int, n_writing: int = 0) -> float:
        """What that saves, to a prompt and to so many answers that are written here; 0 where it is not worth it."""
        pushed_s, here_s = self.pushed_s(n_there, n_moved), n_moved * self.here_s
        pays = here_s >= (1 / SLOWER if n_writing else FASTER) * pushed_s
        return (1 + n_writing) * here_s - pushed_s if pays else 0.0

    @property
    def least_blocks(self) -> int | None:
        """The shortest prompt that is worth it, where all of it is new and no answer is written here; None: none is."""
        return self._least(FASTER)

    @property
    def least_beside(self) -> int | None:
        """The same, where answers are written here."""
        return self._least(1 / SLOWER)

    def _least(self, faster: float) -> int | None:
        each_s = self.here_s / faster - max(self.there_s, self.moved_s)
        if each_s - self.moved_s > 0 and (least := max(1, ceil(self.opening_s / (each_s - self.moved_s)))) <= self.last_blocks:
            return least
        return max(self.last_blocks, ceil((self.opening_s + self.last_blocks * self.moved_s) / each_s)) if each_s > 0 else None

    def words(self, block_tokens: int) -> str:
        """Why prompts are computed there, or not."""
        there, here = (two_digits(block_tokens / seconds) for seconds in (max(self.there_s, self.moved_s), self.here_s))
        least, beside = self.least_blocks, self.least_beside
        if beside is None:
            return f"prompts are not computed there: {there:g} tokens a second come from there, and {here:g} are computed here"
        if least is None:
            which = f"{beside * block_tokens} new tokens or more, while answers are written here,"
        else:
            also = f", or of {beside * block_tokens} while answers are written here,"
            which = f"{least * block_tokens} new tokens or more{also if beside < least else ''}"
        return f"prompts of {which} are computed there: {there:g} a second come, and {here:g} are computed here"


def explain_prompts(cards: Mapping[NodeId, NodeCard], at: NodeId, model: ModelRef, prompt_tokens: int) -> list[str]:
    """Which prompts a node that answers has computed elsewhere, and why: a line for each node that has the same model loaded.

    Args:
        cards: of those that may answer, and share KV with it.
        at: the node that answers.
        prompt_tokens: of a prompt, all new, of which is said whether it goes.
    """
    here, links = _loaded(cards.get(at), model), Links(cards)
    if here is None or here.shape is None:
        return []
    lines: list[str] = []
    block_bytes, n_blocks = (
        BLOCK_TOKENS * here.shape.n_layers * here.shape.kv_bytes_per_token_per_layer,
        (prompt_tokens - 1) // BLOCK_TOKENS,
    )
    for node_id in sorted(cards.keys() - {at}):
        there = _loaded(cards[node_id], model)
        if there is None or not is_same_arithmetic(there.numerics_id, here.numerics_id):
            continue
        cost = price(block_bytes, BLOCK_TOKENS, here, links.between(node_id, at))
        prefill = None if cost is None else prefill_price(cost, BLOCK_TOKENS, there)
        if prefill is None and there.tokens_per_second > 0 and not there.prefill_tokens_per_second:
            lines.append(
                f"{node_id}: whether prompts are computed there is in the log of {at}: cards don't say how fast several machines are"
            )
        elif prefill is None:
            lines.append(f"{node_id}: prompts are not computed there: its speed, or the link, is not measured")
        else:
            goes = "goes there" if prefill.saved_s(n_blocks, n_blocks) > 0 else f"stays at {at}"
            lines.append(f"{node_id}: {prefill.words(BLOCK_TOKENS)}; one of {prompt_tokens} {goes}")
    return lines


def _loaded(card: NodeCard | None, model: ModelRef) -> ModelOffer | None:
    offers = () if card is None else card.models
    return next((offer for offer in offers if offer.runs_whole and offer.warm and offer.numerics_id and offer.model.is_same(model)), None)


def prefill_price(cost: KvPrice, block_tokens: int, there: ModelOffer | None) -> PrefillPrice | None:
    """What it costs to have prompts computed at a node; None where too little is known.

    Args:
        cost: of its blocks that are computed already.
        there: of the model, at that node. What runs there takes its share.
    """
    if there is None or there.prefill_tokens_per_second <= 0:
        return None
    there_s = block_tokens / there.prefill_tokens_per_second * (1 + there.under_way)
    return PrefillPrice(cost.opening_s, cost.fetched_s, there_s, cost.computed_s, ceil(LAST_TOKENS / block_tokens))


def answers(offer: ModelOffer) -> bool:
    """Whether a model may be asked there for its KV."""
    return offer.runs_whole and offer.warm and bool(offer.digest and offer.numerics_id)


def offer_at(card: NodeCard | None, digest: str, numerics_id: str) -> ModelOffer | None:
    """Return a node's offer of a model whose KV may be shared: a block's name stands for bytes, whether or not a request is exact."""
    offers = () if card is None else card.models
    same = (offer for offer in offers if offer.digest == digest and is_same_arithmetic(offer.numerics_id, numerics_id))
    return next((offer for offer in same if answers(offer)), None)
