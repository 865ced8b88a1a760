"""KV that is read out of the giver's memory, with the real library: the same bytes as through the stream, whatever goes wrong, and nothing held after."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.kv.apart import APART, apart
from tests.unit.ways.kv.sharers import Sharer, sharer, sharers
from tests.unit.ways.kv.test_faulty_peers import FIRST, Send, Turn, another, damaged, dies, twice
from tests.unit.ways.kv.test_sharing_kv import PROMPT, WHOLE, alone

from paceline.core.errors import NixlFailed
from paceline.core.ids import NodeId
from paceline.net import nixl
from paceline.net.nixl import HostDoor, NixlAgent, NixlReading, is_installed, knock
from paceline.ways.kv import fetching, giving, prefilling, staged

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install --no-deps nixl-cu12")

FAST, SLOW = 10_000.0, 1.0
MIDDLE = staged.MOST_SLOTS + 4
"""Of a prompt's blocks: of more than are staged at a time some were read."""


@asynccontextmanager
async def pair(root: Path, speed: float = SLOW, *, both: bool = True) -> AsyncGenerator[tuple[Sharer, Sharer]]:
    """A giver and an asker. The giver has NIXL where both have."""
    async with sharers(root, sharer("a", speed=speed, nixl=both), sharer("b", speed=SLOW, nixl=True)) as (a, b):
        await until(lambda: all(one.sharing.nixl.agent is not None for one in ([a, b] if both else [b])))
        yield a, b
        await until(lambda: not a.loans.out and not b.loans.out)


def through(sharer: Sharer) -> dict[tuple[str, str], int]:
    """Blocks, by what they went through."""
    return {key: n // sharer.kv.block_bytes for key, n in sharer.sharing.meter.moved.items()}


@in_loop
async def test_blocks_of_a_node_on_this_host_are_read_out_of_its_memory(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        first = await a.answer("1", PROMPT)
        await b.knows(a)
        second = await b.answer("1", PROMPT)
        assert (second.token_ids, second.cached_tokens) == (first.token_ids, 4 * WHOLE)
        await until(lambda: b.sharing.meter.fetches == {"whole": 1} and a.sharing.meter.blocks["given"] == WHOLE)
        assert through(b) == {("taken", "nixl"): WHOLE}
        assert through(a) == {("given", "nixl"): WHOLE}
        assert not b.sharing.meter.nixl_failures


@in_loop
async def test_where_the_giver_has_a_part_all_of_it_is_read(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        part = WHOLE * 2 // 3
        await a.answer("1", PROMPT[: 4 * part + 1])
        await b.knows(a)
        answer = await b.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 4 * part)
        await until(lambda: b.sharing.meter.fetches == {"whole": 1})
        assert through(b) == {("taken", "nixl"): part}
        assert not b.sharing.meter.nixl_failures


@in_loop
async def test_a_prompt_computed_elsewhere_comes_the_same_way(tmp_path: Path) -> None:
    async with pair(tmp_path, FAST) as (p, d):
        await p.computes_for(d)
        answer = await d.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 4 * WHOLE)
        await until(lambda: p.sharing.meter.prefills == {"whole": 1} and d.sharing.meter.pushes == {"whole": 1})
        assert through(d) == {("taken", "nixl"): WHOLE}


@pytest.mark.parametrize("asker", [True, False], ids=["asker", "giver"])
@in_loop
async def test_where_one_of_two_has_it_blocks_go_through_the_stream(tmp_path: Path, asker: bool) -> None:
    async with pair(tmp_path, both=False) as (plain, having):
        giver, taker = (plain, having) if asker else (having, plain)
        await giver.answer("1", PROMPT)
        await taker.knows(giver)
        assert (await taker.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: taker.sharing.meter.fetches == {"whole": 1})
        assert through(taker) == {("taken", "stream"): WHOLE}


@pytest.mark.parametrize("fault", [damaged, another, twice], ids=lambda fault: fault.__name__)
@in_loop
async def test_a_block_that_is_another_or_damaged_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Send) -> None:
    async with pair(tmp_path) as (a, b):
        await a.answer("1", PROMPT)
        await b.knows(a)
        monkeypatch.setattr(giving, "send_block", Turn(fault))
        assert (await b.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: b.sharing.meter.fetches == {"wrong": 1})
        assert FIRST <= through(b)["taken", "nixl"] <= FIRST + 1


@in_loop
async def test_a_giver_that_goes_in_the_middle_costs_what_was_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path, FAST) as (p, d):
        await p.computes_for(d)
        monkeypatch.setattr(prefilling, "send_block", Turn(dies))
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"write_failed": 1})
        assert 0 < through(d)["taken", "nixl"] <= FIRST


@in_loop
async def test_what_cannot_be_read_is_asked_for_again_through_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as (a, b):
        n, read = 0, NixlReading.read

        def fails(*of: object) -> memoryview:
            nonlocal n
            n += 1
            if n > FIRST:
                raise NixlFailed("as where its process is gone")
            return read(*of)  # type: ignore[arg-type]

        monkeypatch.setattr(NixlReading, "read", fails)
        await a.answer("1", PROMPT)
        await b.knows(a)
        assert (await b.answer("1", PROMPT)).cached_tokens == 4 * WHOLE
        await until(lambda: b.sharing.meter.fetches == {"whole": 1})
        assert through(b) == {("taken", "nixl"): FIRST, ("taken", "stream"): WHOLE - FIRST}
        assert b.sharing.meter.nixl_failures == 1
        monkeypatch.undo()
        # It is left be with that node for a while.
        other = PROMPT[::-1]
        await a.answer("2", other)
        await b.knows(a)
        assert (await b.answer("2", other)).cached_tokens == 4 * WHOLE
        await until(lambda: b.sharing.meter.fetches == {"whole": 2})
        assert through(b)["taken", "nixl"] == FIRST


@in_loop
async def test_a_reader_that_is_not_heard_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "SEND_S", 0.3)
    async with pair(tmp_path) as (a, b):
        monkeypatch.setattr(NixlAgent, "n_read", lambda *of: 0)
        await a.answer("1", PROMPT)
        await b.knows(a)
        assert (await b.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: not a.loans.out and not a.sharing._servicer._served.total())  # pyright: ignore[reportPrivateUsage]
        assert through(a)["given", "nixl"] == staged.MOST_SLOTS
        # It has read them, and was not heard: it hears that, and has the next ones sent through the stream.
        await until(lambda: b.sharing.meter.nixl_failures == 1 and b.sharing.meter.fetches == {"lost": 1})


FORGED = {
    "proof": lambda *of: bytes(32),
    "proof of another node": lambda name, node_id, ticket: knock(name, NodeId("another"), ticket),
    "proof of another transfer": lambda name, node_id, ticket: knock(name, node_id, ticket[::-1]),
}


@pytest.mark.parametrize("wrong", [*FORGED, "garbage", "another agent"])
@in_loop
async def test_what_describes_another_s_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Who did not see the door is not believed; what the library can't read comes through the stream."""
    async with pair(tmp_path) as (a, b):
        described = secrets.token_bytes(200) if wrong == "garbage" else NixlAgent().stage(2, 64).describe()
        if wrong in FORGED:
            monkeypatch.setattr(staged, "knock", FORGED[wrong])
        else:
            monkeypatch.setattr(nixl.StagedMemory, "describe", lambda memory: described)
        await a.answer("1", PROMPT)
        await b.knows(a)
        assert (await b.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: b.sharing.meter.fetches.total() == 1)
        assert b.sharing.meter.fetches == ({"wrong": 1} if wrong in FORGED else {"whole": 1})
        assert through(b) == ({} if wrong in FORGED else {("taken", "stream"): WHOLE})


@in_loop
async def test_a_door_that_is_not_this_user_s_or_is_not_there_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    door = HostDoor()
    await door.open()
    knocks = partial(asyncio.to_thread, knock, door.name, NodeId("giver"), bytes(32))
    assert await knocks() == door.proof(NodeId("giver"), bytes(32))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert await knocks() is None
    monkeypatch.undo()
    monkeypatch.setattr(nixl, "_may_be_read", lambda process: False)
    assert await knocks() is None
    monkeypatch.undo()
    door.close()
    assert await knocks() is None


@in_loop
async def test_a_giver_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    async with apart(tmp_path, SLOW, SLOW) as (there, here):
        there.ask("answer", PROMPT)
        await there.hear()
        there.ask("blocks", MIDDLE, Signals.SIGKILL)
        await there.hear()
        await until(lambda: APART in here.sharing.meter.least_tokens and here.sharing.meter.marks > 0)
        assert (await here.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: here.sharing.meter.fetches == {"lost": 1})
        assert MIDDLE - staged.MOST_SLOTS <= through(here)["taken", "nixl"] <= MIDDLE
        assert there.process.exitcode == -Signals.SIGKILL


@in_loop
async def test_a_giver_that_is_stopped_in_the_middle_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SILENCE_S", 0.5)
    async with apart(tmp_path, SLOW, SLOW) as (there, here):
        there.ask("answer", PROMPT)
        await there.hear()
        there.ask("blocks", MIDDLE, Signals.SIGSTOP)
        await there.hear()
        await until(lambda: APART in here.sharing.meter.least_tokens and here.sharing.meter.marks > 0)
        assert (await here.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: here.sharing.meter.fetches.total() == 1)
        assert through(here)["taken", "nixl"] == MIDDLE
        os.kill(there.process.pid or 0, Signals.SIGCONT)
        there.ask("answer", PROMPT)
        await there.hear()  # it was not hurt


@in_loop
async def test_one_that_computes_a_prompt_is_killed_in_the_middle(tmp_path: Path) -> None:
    async with apart(tmp_path, FAST, SLOW) as (there, here):
        there.ask("blocks", MIDDLE, Signals.SIGKILL)
        await there.hear()
        await until(lambda: APART in here.sharing.meter.least_pushed)
        assert (await here.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: here.sharing.meter.pushes == {"write_failed": 1})
        assert MIDDLE - staged.MOST_SLOTS <= through(here)["taken", "nixl"] <= MIDDLE


@pytest.mark.parametrize("signal", [Signals.SIGKILL, Signals.SIGSTOP], ids=["killed", "stopped"])
@in_loop
async def test_one_that_takes_blocks_goes_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: Signals) -> None:
    monkeypatch.setattr(staged, "SEND_S", 0.5)
    async with apart(tmp_path, SLOW, SLOW) as (there, here):
        await here.answer("1", PROMPT)
        there.ask("blocks", MIDDLE, signal)
        await there.hear()
        there.ask("fetch", PROMPT)
        await until(lambda: here.sharing.meter.blocks["given"] > 0)
        assert MIDDLE <= through(here)["given", "nixl"] < WHOLE
        await until(lambda: not here.loans.out and not here.sharing._servicer._served.total())  # pyright: ignore[reportPrivateUsage]
        # What was staged for it is nobody's: another is served as before.
        agent = here.sharing.nixl.agent
        assert agent is not None
        assert not agent._read  # pyright: ignore[reportPrivateUsage]


def test_whose_memory_the_kernel_has_read_is_known() -> None:
    assert nixl._may_be_read(os.getpid())  # pyright: ignore[reportPrivateUsage]
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert nixl._may_be_read(child.pid)  # pyright: ignore[reportPrivateUsage]
    finally:
        child.kill()
        child.wait()
    assert not nixl._may_be_read(child.pid)  # pyright: ignore[reportPrivateUsage]
    assert not nixl._may_be_read(0)  # pyright: ignore[reportPrivateUsage]


def sockets() -> set[str]:
    """Inodes of this process's."""
    found = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}  # noqa: PTH115 - it may name no file
    return {name[len("socket:[") : -1] for name in found if name.startswith("socket:")}


def test_an_agent_has_no_port() -> None:
    before, agent = sockets(), NixlAgent()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        ports = {line.split()[9] for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]}
        assert not (sockets() - before) & ports, kind
    del agent


@pytest.mark.parametrize("state", ["ERR", "PROC"])
def test_a_read_that_fails_is_released_and_one_that_did_not_end_is_kept(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    giver, reader = NixlAgent(), NixlAgent()
    there = giver.stage(2, 64)
    reading = NixlReading(reader, there.describe(), there.address, 2, 64, secrets.token_bytes(nixl.TOKEN_BYTES))
    call, released = NixlAgent.call, Counter[str]()

    def said(agent: NixlAgent, name: str, *of: Any) -> Any:
        found = call(agent, name, *of)
        released[name] += 1
        if name == "release_dlist_handle":
            raise NixlFailed("as where the library has lost it")
        return state if name in ("transfer", "check_xfer_state") else found

    monkeypatch.setattr(NixlAgent, "call", said)
    with pytest.raises(NixlFailed):
        reading.read(0, 0.0)
    reading.close()
    ended = state == "ERR"
    names = ("release_xfer_handle", "release_dlist_handle", "remove_remote_agent", "deregister_memory")
    assert [released[name] for name in names] == ([1, 2, 1, 1] if ended else [0, 0, 0, 0])
    assert len(reader._lost) == (0 if ended else 4)  # pyright: ignore[reportPrivateUsage]
    there.close()


@pytest.mark.parametrize("slot_bytes", [8, 4096, 3 * nixl.PIECE_BYTES // 2], ids=["bytes", "page", "pieces"])
def test_slots_are_read_whole(slot_bytes: int) -> None:
    giver, reader = NixlAgent(), NixlAgent()
    there, token = giver.stage(3, slot_bytes), secrets.token_bytes(nixl.TOKEN_BYTES)
    for place in range(3):
        there.slot(place)[:] = secrets.token_bytes(slot_bytes)
    giver.listen(token)
    reading = NixlReading(reader, there.describe(), there.address, 3, slot_bytes, token)
    for n, place in enumerate([0, 2, 1, 2], start=1):
        assert reading.read(place, 1e9) == there.slot(place)
        until = time.perf_counter() + 60
        while giver.n_read(token) < n:
            assert time.perf_counter() < until
    reading.close()
    giver.forget(token)
    there.close()
    there.close()
    assert not reader._met  # pyright: ignore[reportPrivateUsage]
    assert not reader._lost  # pyright: ignore[reportPrivateUsage]
    assert not giver._read  # pyright: ignore[reportPrivateUsage]


def test_what_is_staged_and_can_t_be_described_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, closed, close = NixlAgent(), list[nixl.StagedMemory](), nixl.StagedMemory.close

    def undescribed(_: nixl.StagedMemory) -> bytes:
        raise NixlFailed("not now")

    def let_go(memory: nixl.StagedMemory) -> None:
        closed.append(memory)
        close(memory)

    monkeypatch.setattr(nixl.StagedMemory, "describe", undescribed)
    monkeypatch.setattr(nixl.StagedMemory, "close", let_go)
    sender: Any = None
    with pytest.raises(NixlFailed, match="not now"):
        staged.StagedBlocks(sender, agent, bytes(32), 4096)
    assert len(closed) == 1
