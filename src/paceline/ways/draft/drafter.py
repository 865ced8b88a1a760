"""The node that could draft for this machine's model: the plan's answer, and how to reach them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import RemoteProposerError
from paceline.core.ids import NodeId
from paceline.fleet import cost
from paceline.fleet.card import ModelOffer
from paceline.fleet.machines import sensible
from paceline.ways.draft.blocks import OnBlock
from paceline.ways.draft.desk import BlockAsk

LOOKUP_PROMPT_RATE = 1e6
"""Tokens a second that prompt lookup takes in."""
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
        """What a block should take."""
        return self.rtt_s + new_tokens / self.prompt_tokens_per_s + length / self.tokens_per_s


def drafter_of(node_id: NodeId, instance: bytes, model_id: str, offer: ModelOffer, rtt_s: float) -> Drafter:
    """A proposer as it is offered, whatever the offer says of its speed."""
    lookup = not offer.weights
    rate = sensible(offer.tokens_per_second, 1e-2, 1e9) or (cost.LOOKUP_RATE if lookup else 1.0)
    prompt_rate = sensible(offer.prefill_tokens_per_second, 1e-2, 1e9) or (LOOKUP_PROMPT_RATE if lookup else rate)
    return Drafter(node_id, instance, model_id, rate, prompt_rate, rtt_s)


Key = tuple[NodeId, bytes]
"""A node's process: one that started anew is forgiven."""
Find = Callable[[Collection[Key]], Sequence[Drafter]]
"""Proposers but for those named, the best first. Raises PlacementError: there are none."""


class Line(Protocol):
    """A way to a proposer: `ways.draft.line.RemoteLine`, or this machine's own desk."""

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None: ...
    async def close(self) -> None: ...


OnEnd = Callable[[RemoteProposerError], None]
OpenLine = Callable[[Drafter, OnBlock, OnEnd], Line]
"""Raises PacelineError: it can't be reached."""
