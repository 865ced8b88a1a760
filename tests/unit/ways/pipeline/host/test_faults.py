"""A session that can't go on says so, and whom it blames: what comes in, what goes out, itself."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import SPEC, Bits, Net, User, batch_of, hosting, in_thread, rows_of, soon, wanted

from paceline.core.errors import PacelineError, PipelineStalled, ShardCorrupt, ShardUnavailable
from paceline.core.ids import NodeId
from paceline.net.tensor import dialling, listener
from paceline.net.tensor.pipe import tune
from paceline.ways.pipeline.client import RemoteStage
from paceline.ways.pipeline.executor.route import PipelineFault
from paceline.ways.pipeline.executor.stage import StageBatch
from paceline.ways.pipeline.host.session import HostLimits


async def loss_of(stage: RemoteStage) -> PipelineFault:
    return await asyncio.wait_for(asyncio.wrap_future(stage.lost), 100)


def spoiled(bits: int) -> Bits:
    x_TD = rows_of(4)
    x_TD[2, 17] = bits
    return x_TD


@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x4780, 0xC780])
@in_loop
async def test_values_that_are_no_activations_are_the_senders_fault(bits: int) -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))
        await route.run(batch_of(1), spoiled(0x477F))
        await in_thread(route.sink.send, batch_of(2, sequence=2, blocks=(1,)), spoiled(bits), soon())
        loss = await loss_of(stage)
        assert loss.code == ShardCorrupt.code
        assert loss.reported
        assert (loss.code, loss.node_id) == ("shard_corrupt", "user")
        assert (stage.report.received, stage.report.computed) == (2, 1)
        assert a.meter.corruption == 1
        await until(lambda: a.host.sessions == 0)


WRONG = {
    "a block that was not leased": batch_of(1, blocks=(8,)),
    "a position without a block": batch_of(1, first=13),
    "a path that is none": batch_of(1, path=2),
    "more rows than agreed": batch_of(1, rows=17, blocks=(0, 1)),
}


@pytest.mark.parametrize("batch", WRONG.values(), ids=WRONG.keys())
@in_loop
async def test_batches_that_can_not_be_are_the_senders_fault_and_never_run(batch: StageBatch) -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))
        await in_thread(route.sink.send, batch, rows_of(batch.n_rows), soon())
        loss = await loss_of(stage)
        assert loss.reported
        assert (loss.code, loss.node_id) == ("bad_request", "user")
        assert not a.runner.running.is_set()


@in_loop
async def test_rows_of_another_width_are_the_senders_fault() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))
        await in_thread(route.sink.send, batch_of(1), np.zeros((4, SPEC.hidden + 1), np.uint16), soon())
        loss = await loss_of(stage)
        assert loss.reported
        assert (loss.code, loss.node_id) == ("shard_corrupt", "user")
        assert a.meter.corruption == 1


@in_loop
async def test_an_input_that_breaks_is_the_senders_fault() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        first, second = await user.open(a), await user.open(b, wanted(3, 6))
        route = await user.route((a, first), (b, second))
        await route.run(batch_of(1), rows_of(4))
        await first.close()
        loss = await loss_of(second)
        assert loss.code == ShardUnavailable.code
        assert loss.reported
        assert loss.node_id == "a"
        await until(lambda: b.host.sessions == 0)


@in_loop
async def test_an_output_that_breaks_is_the_receivers_fault() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        first, second = await user.open(a), await user.open(b, wanted(3, 6))
        route = await user.route((a, first), (b, second))
        await route.run(batch_of(1), rows_of(4))
        await second.close()
        await until(lambda: b.host.sessions == 0)
        await _push(route.sink, first, 2)
        loss = await loss_of(first)
        assert loss.code == ShardUnavailable.code
        assert loss.reported
        assert loss.node_id == "b"


def _tuned_to_hold_little(sock: socket.socket) -> None:
    """Have the system queue some KB of a connection, where it would some MB."""
    tune(sock)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, buffer, 4096)


@in_loop
async def test_a_receiver_that_takes_nothing_is_a_stall_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dialling, listener):
        monkeypatch.setattr(module, "tune", _tuned_to_hold_little)
    net = Net()
    async with hosting(net, "a", limits=HostLimits(stall_s=0.1)) as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))
        await _push(route.sink, stage, 1)
        loss = await loss_of(stage)
        assert loss.code == PipelineStalled.code
        assert loss.reported
        assert loss.node_id == "user"
        assert stage.report.computed > stage.report.sent


async def _push(sink: object, stage: RemoteStage, first: int) -> None:
    """Send until the stage is gone, or for long enough."""
    for batch_id in range(first, first + 400):
        if stage.lost.done():
            return
        batch = batch_of(batch_id)
        try:
            await in_thread(sink.send, batch, rows_of(4), soon())  # type: ignore[attr-defined]
        except PacelineError:
            return


@in_loop
async def test_kernels_that_fail_are_the_stages_own_fault(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))

        def broken(*_: object) -> Bits:
            raise RuntimeError("a kernel failed")

        a.runner.run_layers = broken  # type: ignore[method-assign]
        await in_thread(route.sink.send, batch_of(1), rows_of(4), soon())
        loss = await loss_of(stage)
        assert loss.reported
        assert (loss.code, loss.node_id) == ("pipeline_error", None)
        assert "a kernel failed" in caplog.text
        assert "array" not in caplog.text, "activations are in no log"


@in_loop
async def test_sessions_on_one_shard_take_turns_and_one_that_waits_too_long_says_so() -> None:
    net = Net()
    async with hosting(net, "a", limits=HostLimits(turn_s=0.05)) as a, User(net) as user:
        first, second = await user.open(a), await user.open(a)
        one, other = await user.route((a, first)), await user.route((a, second))
        a.runner.gate.clear()
        await in_thread(one.sink.send, batch_of(1), rows_of(4), soon())
        await in_thread(a.runner.running.wait, 10)
        await in_thread(other.sink.send, batch_of(1), rows_of(4), soon())
        loss = await loss_of(second)
        assert loss.code == PipelineStalled.code
        assert loss.reported
        assert loss.node_id is None
        a.runner.gate.set()
        source = await in_thread(one.expected.accept, soon())
        await in_thread(source.receive, soon())
        assert not first.lost.done()


@in_loop
async def test_nothing_that_a_revoked_neighbour_sends_is_run() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        first, second = await user.open(a), await user.open(b, wanted(3, 6))
        route = await user.route((a, first), (b, second))
        await route.run(batch_of(1), rows_of(4))
        net.fleet.revoke("a")
        b.host.revoked(NodeId("a"))
        loss = await loss_of(second)
        assert loss.reported
        assert (loss.node_id, "revoked" in loss.message) == ("a", True)


@in_loop
async def test_nothing_is_sent_to_a_revoked_neighbour() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        first, second = await user.open(a), await user.open(b, wanted(3, 6))
        route = await user.route((a, first), (b, second))
        await route.run(batch_of(1), rows_of(4))
        a.runner.gate.clear()
        await in_thread(route.sink.send, batch_of(2, sequence=2, blocks=(1,)), rows_of(4), soon())
        await in_thread(a.runner.running.wait, 10)
        net.fleet.revoke("b")
        a.host.revoked(NodeId("b"))
        a.runner.gate.set()
        loss = await loss_of(first)
        assert loss.reported
        assert (loss.node_id, "revoked" in loss.message) == ("b", True)
        await until(lambda: a.host.sessions == 0)
        assert second.report.received <= 1
