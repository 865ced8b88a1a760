"""Peers that send other blocks than those asked for, too many, or none: the prompt is computed, the bytes are the same, and nothing stays lent."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.kv.sharers import DIGEST, Sharer, sharer, sharers
from tests.unit.ways.kv.test_sharing_kv import PROMPT, WHOLE, alone

from paceline.core.errors import ExecutorLost
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.net.channels import Purpose
from paceline.net.tensor.ends import TensorSender
from paceline.net.wire import kv_pb2 as wire
from paceline.net.wire.kv_pb2_grpc import KvServiceStub
from paceline.ways.kv import fetching, giving
from paceline.ways.kv.fetching import send_block

Send = Callable[[TensorSender, bytes, memoryview], object]
STALLS = 10.0
"""Tokens of prompts a second, as cards say: a fetch of the whole prompt may take ten seconds, also those that it waits for its turn."""
FIRST = 5
"""Blocks that are sent as they should be."""


class Turn:
    """Sends some blocks as it should, then does something else."""

    def __init__(self, then: Send) -> None:
        self.sent, self._then = 0, then
        self.reached = threading.Event()

    def __call__(self, sender: TensorSender, key: bytes, data: memoryview) -> None:
        self.sent += 1
        if self.sent > FIRST:
            self.reached.set()
            self._then(sender, key, data)
        else:
            send_block(sender, key, data)


def _put(sender: TensorSender, key: bytes, crc: int, data: memoryview | bytes) -> None:
    sender.send(key + crc.to_bytes(4, "little"), np.frombuffer(data, np.uint16), time.perf_counter() + 5)


def damaged(sender: TensorSender, key: bytes, data: memoryview) -> None:
    crc = zlib.crc32(data)
    data[0] ^= 1
    _put(sender, key, crc, data)


def lies(sender: TensorSender, key: bytes, data: memoryview) -> None:
    data[0] ^= 2  # a token's lowest bit
    send_block(sender, key, data)


def another(sender: TensorSender, key: bytes, data: memoryview) -> None:
    _put(sender, key[::-1], zlib.crc32(data), data)


def shorter(sender: TensorSender, key: bytes, data: memoryview) -> None:
    _put(sender, key, zlib.crc32(data[:8]), data[:8])


def longer(sender: TensorSender, key: bytes, data: memoryview) -> None:
    much = bytes(data) * 1000
    _put(sender, key, zlib.crc32(much), much)


def nothing_at_all(sender: TensorSender, key: bytes, data: memoryview) -> None:
    del key, data
    sender.send(b"", np.empty(0, np.uint16), time.perf_counter() + 5)


def twice(sender: TensorSender, key: bytes, data: memoryview) -> None:
    send_block(sender, key, data)
    send_block(sender, key, data)


def dies(sender: TensorSender, key: bytes, data: memoryview) -> None:
    del key, data
    sender.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens in the end, for what stalls until then."""
    event = threading.Event()
    yield event
    event.set()


async def fetches(asker: Sharer, giver: Sharer, monkeypatch: pytest.MonkeyPatch, turn: Turn) -> None:
    """One answer of which the giver had the prompt: right, whatever it sent."""
    await giver.answer("1", PROMPT)
    await asker.knows(giver)
    monkeypatch.setattr(giving, "send_block", turn)
    answer = await asker.answer("1", PROMPT)
    assert answer.token_ids == alone(PROMPT)
    assert turn.sent > FIRST
    await until(lambda: asker.sharing.meter.fetches.total() == 1)


@pytest.mark.parametrize("fault", [damaged, another, shorter, longer, nothing_at_all, twice], ids=lambda fault: fault.__name__)
@in_loop
async def test_a_peer_that_sends_another_block_is_not_believed_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Send
) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await fetches(b, a, monkeypatch, Turn(fault))
        assert b.sharing.meter.fetches == {"wrong": 1}
        assert FIRST <= b.sharing.meter.blocks["fetched"] <= FIRST + 1
        await until(lambda: not a.loans.out)
        monkeypatch.undo()
        other = PROMPT[:48][::-1]
        await a.answer("2", other)
        await b.knows(a)
        assert (await b.answer("2", other)).cached_tokens == 0


@in_loop
async def test_a_peer_that_dies_in_the_middle_costs_what_it_did_not_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await fetches(b, a, monkeypatch, Turn(dies))
        assert b.sharing.meter.fetches == {"lost": 1}
        assert b.sharing.meter.blocks["fetched"] == FIRST
        await until(lambda: not a.loans.out)


@in_loop
async def test_a_peer_that_stalls_is_left_after_as_long_as_computing_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(fetching, "SILENCE_S", 60)
    async with sharers(tmp_path, sharer("a", speed=STALLS), sharer("b", speed=STALLS)) as (a, b):
        await fetches(b, a, monkeypatch, Turn(lambda *_: gate.wait(60)))
        assert b.sharing.meter.fetches == {"late": 1}
        assert b.sharing.meter.blocks["fetched"] == FIRST
        gate.set()
        await until(lambda: not a.loans.out)


@in_loop
async def test_blocks_without_end_are_left_after_the_last_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(sender: TensorSender, key: bytes, data: memoryview) -> None:
        send_block(sender, key, data)
        if key == asked[WHOLE - 1]:
            while True:
                send_block(sender, key, data)

    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT)
        asked = list(a.bench.engine._scheduler.pool.cache._block_of)  # type: ignore[attr-defined]
        await b.knows(a)
        monkeypatch.setattr(giving, "send_block", endless)
        assert (await b.answer("1", PROMPT)).cached_tokens == 4 * WHOLE
        await until(lambda: b.sharing.meter.fetches == {"whole": 1} and not a.loans.out)


@in_loop
async def test_an_answer_that_is_not_wanted_any_more_does_not_wait_for_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT)
        await b.knows(a)
        turn = Turn(lambda *_: gate.wait(60))
        monkeypatch.setattr(giving, "send_block", turn)
        asked = GenerationRequest(RequestId("x"), tuple(PROMPT), 6, SamplingParams(seed=1))
        b.bench.add(asked)
        b.bench.engine.submit()
        await until(turn.reached.is_set)
        b.bench.engine.abort(asked.request_id)
        assert b.bench.run()[asked.request_id, 0].finish is FinishReason.ABORT
        await until(lambda: b.sharing.meter.fetches == {"left": 1})
        gate.set()
        await until(lambda: not a.loans.out)


@in_loop
async def test_kv_that_a_giver_loses_while_it_is_lent_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(sender: TensorSender, key: bytes, data: memoryview) -> None:
        if a.loans.out:
            a.loans.void(a.bench.engine._scheduler.pool)  # type: ignore[attr-defined]
            a.bench.runner.wipe()
        send_block(sender, key, data)

    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await fetches(b, a, monkeypatch, Turn(lose))
        assert b.sharing.meter.blocks["fetched"] == FIRST + 1


@pytest.mark.parametrize("end", ["export_block", "import_block"])
@in_loop
async def test_a_pool_that_is_lost_at_either_end_is_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT)
        await b.knows(a)
        runner, n = (a if end == "export_block" else b).bench.runner, 0
        copy = getattr(runner, end)

        def lost(*of: object) -> None:
            nonlocal n
            n += 1
            if n > FIRST:
                raise ExecutorLost("as where a rank of a tensor group is gone", ())
            copy(*of)

        monkeypatch.setattr(runner, end, lost)
        answer = await b.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 4 * FIRST)
        await until(lambda: not b.sharing._asking and not a.sharing._servicer._served.total())  # pyright: ignore[reportPrivateUsage]
        await until(lambda: not a.loans.out)
        assert b.sharing.meter.fetches == ({"lost": 1} if end == "export_block" else {"left": 1})
    assert not [record for record in caplog.records if record.exc_info]


@in_loop
async def test_a_prompt_computed_for_another_node_whose_pool_is_lost_ends_as_one_that_is_not_computed(tmp_path: Path) -> None:
    def lost(*of: object) -> None:
        raise ExecutorLost("as where a rank of a tensor group is gone", ())

    async with sharers(tmp_path, sharer("p", speed=10_000.0), sharer("d")) as (p, d):
        await p.computes_for(d)
        p.bench.runner.export_block = lost  # type: ignore[method-assign]
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: p.sharing.meter.prefills == {"not_computed": 1} and d.sharing.meter.pushes == {"write_failed": 1})
        await until(lambda: not p.loans.out)


@in_loop
async def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT)
        stub = KvServiceStub(b.node.pool.get(Purpose.STREAM, a.node.addresses[0], a.node.identity.member))

        async def refused(**changed: object) -> grpc.StatusCode:
            said = {
                "digest": DIGEST,
                "numerics_id": "null",
                "layout": a.kv.layout,
                "keys": bytes(32),
                "tensor_port": 9,
                "ticket": bytes(32),
            }
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.FetchBlocks(wire.FetchBlocksRequest(**{**said, **changed}))  # type: ignore[arg-type]
            return error.value.code()

        bad = grpc.StatusCode.INVALID_ARGUMENT
        for keys in (b"", bytes(31)):
            assert await refused(keys=keys) is bad
        assert await refused(keys=bytes(16 * (fetching.MOST_KEYS + 1))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await refused(ticket=b"x") is bad
        for port in (0, 1 << 16):
            assert await refused(tensor_port=port) is bad
        assert await refused(layout=bytes(16)) is grpc.StatusCode.FAILED_PRECONDITION
        assert await refused(digest="e" * 64) is grpc.StatusCode.NOT_FOUND
        none = await stub.FetchBlocks(
            wire.FetchBlocksRequest(digest=DIGEST, numerics_id="null", layout=a.kv.layout, keys=bytes(32), tensor_port=9, ticket=bytes(32))
        )
        assert none.n_blocks == 0
        await until(lambda: not a.loans.out)
