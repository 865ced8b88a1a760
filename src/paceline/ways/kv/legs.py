"""Which prompt that a router had computed here is the one that another node waits for: the two sides of a request with two legs, in either order.

Law: pure; the time is an argument. A prefill leg is known from when its request came; a registration, until it is over. They are matched by request id,
then by what is left of both without the 8 hex digits that each engine put behind it; and only where the blocks asked for are the last ones of the
prompt. Either waits so long for the other, and no longer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from paceline.core.ids import NodeId
from paceline.ways.kv.lease import LEASE_S

MATCH_S: Final = 20.0
"""For which a registration waits for the prompt's own request. Raising it: where that never comes, an answer begins later."""
MOST_PROMPTS: Final = 64
"""Prompts that are remembered. Raising it: more routers' requests may be under way."""
_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")


def base_request_id(request_id: str) -> str:
    """An id without what its engine put behind it; the place of a prompt among those of its request stays."""
    return _SUFFIX.sub("", request_id)


class LegEnd(StrEnum):
    """How a prompt that was computed for a router's sake ended."""

    TAKEN = "taken"
    """A node has its blocks."""
    EXPIRED = "expired"
    """No node came for them in time."""
    LEFT = "left"
    """Its request ended before it was computed."""
    EVICTED = "evicted"
    """There were later ones, and no room."""


@dataclass(slots=True, eq=False)
class RoutedPrompt:
    """A prefill leg's prompt, and its lease."""

    request_id: str
    keys: tuple[bytes, ...]
    """Of all its whole blocks."""
    until_s: float = inf
    """While it is computed, its request bounds it."""
    takers: int = 0
    """Registrations that were matched, and are not over. It does not expire under them."""
    ended: LegEnd | None = None

    @property
    def is_computed(self) -> bool:
        return self.until_s < inf


@dataclass(slots=True, eq=False)
class AwaitedPrompt:
    """A node's registration of a prompt that a router has computed here."""

    holder: NodeId
    request_id: str
    keys: tuple[bytes, ...]
    until_s: float
    prompt: RoutedPrompt | None = None
    """What it was matched with."""
    is_over: bool = False
    """It waits no more: it was matched, or nothing it could be matched with comes."""


class LegTables:
    """Of one engine."""

    def __init__(self) -> None:
        self.prompts: dict[str, RoutedPrompt] = {}
        """By exact id; the oldest first."""
        self.awaited: list[AwaitedPrompt] = []
        """Those that wait; the oldest first."""

    def begin(self, request_id: str, keys: Sequence[bytes]) -> tuple[RoutedPrompt, Sequence[AwaitedPrompt]]:
        """A prefill leg came. Returns it, and who waits no more."""
        while len(self.prompts) >= MOST_PROMPTS:
            self.end(
                min(self.prompts.values(), key=lambda each: each.takers > 0), LegEnd.EVICTED
            )  # the oldest that no one takes, if there is one
        if (same := self.prompts.get(request_id)) is not None:
            self.end(same, LegEnd.EVICTED)
        prompt = self.prompts[request_id] = RoutedPrompt(request_id, tuple(keys))
        named = [one for one in self.awaited if one.request_id == request_id]
        named = named or [one for one in self.awaited if base_request_id(one.request_id) == base_request_id(request_id)]
        for one in named:
            self._decide(one, [prompt])
        return prompt, named

    def register(self, holder: NodeId, request_id: str, keys: Sequence[bytes], now: float) -> AwaitedPrompt:
        """A decode leg's node came."""
        one = AwaitedPrompt(holder, request_id, tuple(keys), now + MATCH_S)
        self.awaited.append(one)
        exact, base = self.prompts.get(request_id), base_request_id(request_id)
        found = [exact] if exact is not None else [each for name, each in self.prompts.items() if base_request_id(name) == base]
        if found:
            self._decide(one, found)
        return one

    def computed(self, prompt: RoutedPrompt, now: float) -> None:
        """All blocks of it stand: its lease begins."""
        prompt.until_s = now + LEASE_S

    def leave(self, one: AwaitedPrompt, *, has_all: bool) -> None:
        """A registration is over. What it has all blocks of is held for no one else."""
        one.is_over = True
        if one in self.awaited:
            self.awaited.remove(one)
        if one.prompt is not None:
            one.prompt.takers -= 1
            if has_all:
                self.end(one.prompt, LegEnd.TAKEN)

    def end(self, prompt: RoutedPrompt, why: LegEnd) -> None:
        """The first reason stands."""
        if prompt.ended is None:
            prompt.ended = why
            del self.prompts[prompt.request_id]

    def clear(self) -> None:
        """Nothing comes of any of them."""
        for prompt in tuple(self.prompts.values()):
            self.end(prompt, LegEnd.LEFT)
        for one in tuple(self.awaited):
            self.leave(one, has_all=False)

    def expire(self, now: float) -> tuple[Sequence[RoutedPrompt], Sequence[AwaitedPrompt]]:
        """What waited for too long, on either side."""
        prompts = [prompt for prompt in self.prompts.values() if now >= prompt.until_s and not prompt.takers]
        for prompt in prompts:
            self.end(prompt, LegEnd.EXPIRED)
        late = [one for one in self.awaited if now >= one.until_s]
        for one in late:
            self.leave(one, has_all=False)
        return prompts, late

    def next_s(self) -> float:
        """When `expire` finds something; infinite: never, as things are."""
        prompts = [prompt.until_s for prompt in self.prompts.values() if not prompt.takers]
        return min([*prompts, *(one.until_s for one in self.awaited)], default=inf)

    def _decide(self, one: AwaitedPrompt, named: Sequence[RoutedPrompt]) -> None:
        """Of prompts of its name, the first whose last blocks are those that it wants; where none is, none of them is waited for."""
        self.awaited.remove(one)
        one.is_over = True
        one.prompt = next((each for each in named if each.keys[-len(one.keys) :] == one.keys), None)
        if one.prompt is not None:
            one.prompt.takers += 1
