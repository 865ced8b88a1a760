"""Places go round among those that wait: no crowd holds up one that comes alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paceline.core.errors import Overloaded
from paceline.machine.turns import Turns

MOST = 4


class Crowd:
    """Parties that take turns, each until it is told to leave."""

    def __init__(self, places: int) -> None:
        self.turns, self.order, self.ends = Turns(places, MOST), list[str](), dict[str, asyncio.Event]()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """The first letter is the party."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._turn(name))
            await asyncio.sleep(0)

    async def leave(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await self.tasks[name]
            await asyncio.sleep(0)

    async def _turn(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.order.append(name)
            await self.ends[name].wait()


def with_crowd(places: int) -> Callable[[Callable[[Crowd], Awaitable[None]]], Callable[[], None]]:
    def wrap(work: Callable[[Crowd], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            await work(Crowd(places))

        return lambda: asyncio.run(main())

    return wrap


@with_crowd(1)
async def test_one_that_comes_alone_waits_for_one_turn(crowd: Crowd) -> None:
    await crowd.come("a1", "a2", "a3", "a4", "b1", "c1")
    for _ in range(6):
        await crowd.leave(crowd.order[-1])
    assert crowd.order == ["a1", "a2", "b1", "c1", "a3", "a4"]


@with_crowd(2)
async def test_one_party_has_all_places_only_while_no_other_wants_one(crowd: Crowd) -> None:
    await crowd.come("a1", "a2", "a3", "b1", "b2")
    await crowd.leave("a1")
    await crowd.come("a4")
    await crowd.leave("a2")
    assert crowd.order == ["a1", "a2", "b1", "a3"]
    await crowd.leave("a3")
    assert crowd.order[-1] == "a4"
    await crowd.leave("a4")
    assert crowd.order[-1] == "b2"
    await crowd.leave("b1", "b2")


@with_crowd(1)
async def test_only_so_many_of_one_party_wait(crowd: Crowd) -> None:
    await crowd.come("a0", *(f"a{n}" for n in range(1, MOST + 1)))
    with pytest.raises(Overloaded):
        async with crowd.turns.turn("a"):
            pass
    await crowd.come("b0")
    for _ in range(MOST + 2):
        await crowd.leave(crowd.order[-1])
    async with crowd.turns.turn("a"):
        pass


@with_crowd(1)
async def test_those_that_leave_the_line_take_no_place(crowd: Crowd) -> None:
    await crowd.come("a1", "a2", "b1", "b2")
    for name in ("a2", "b1"):
        crowd.tasks[name].cancel()
        await asyncio.wait({crowd.tasks[name]})
    await crowd.leave("a1", "b2")
    await crowd.turns._take("a")
    given = asyncio.create_task(crowd.turns._take("b"))
    await asyncio.sleep(0)
    crowd.turns._give_back("a")
    given.cancel()  # it has its place, and does not know yet
    await asyncio.wait({given})
    async with asyncio.timeout(10), crowd.turns.turn("c"):
        assert crowd.order == ["a1", "b2"]
