"""Stages run what they are sent, over real sockets: two machines give the bytes of one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import MODEL, SPEC, Net, User, batch_of, hosting, in_thread, rows_of, soon, wanted

from paceline.backends import torch
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.model import ActivationDtype, WeightsFormat
from paceline.ways.pipeline.executor.route import NextStage
from paceline.ways.pipeline.executor.stage import Stage


@in_loop
async def test_two_machines_give_the_bytes_of_one() -> None:
    weights = WeightsFormat.BF16
    alone = await in_thread(torch.load, SeededWeights(SPEC), LoadOptions(SPEC.all_layers, weights, 8, edges=False))
    stage = Stage(alone, SPEC.all_layers, base_block=0, n_blocks=8, max_rows=16, max_context=128, width=SPEC.hidden)
    net = Net()
    async with hosting(net, "a", load=torch.load) as a, hosting(net, "b", load=torch.load) as b, User(net) as user:
        first = await user.open(a, wanted(0, 4, weights=weights))
        second = await user.open(b, wanted(4, 6, weights=weights))
        assert first.opened.numerics_id == second.opened.numerics_id == alone.numerics_id
        route = await user.route((a, first), (b, second))
        batches = [
            (batch_of(1, rows=5, blocks=(3,)), rows_of(5)),
            (batch_of(2, rows=9, first=5, blocks=()), rows_of(9, 1)),
            (batch_of(3, rows=1, first=14, blocks=(0,), path=1), rows_of(1, 2)),
            (batch_of(4, rows=16, blocks=(1,), sequence=2), rows_of(16, 3)),
        ]
        for batch, x_TD in batches:
            expected = stage.run(batch, x_TD).tobytes()
            assert (await route.run(batch, x_TD)).tobytes() == expected
        await until(lambda: (first.report.received, first.report.computed, first.report.sent) == (4, 4, 4) == (second.report.sent,) * 3)
        assert second.report.queue_depth == 0
        assert second.report.p95_latency_ms > 0
        assert second.report.latency_s >= second.report.busy_s > 0
        assert a.meter.latency.all().keys() == {f"{MODEL}:0-3"}
        assert b.meter.latency.all().keys() == {f"{MODEL}:4-5"}
    alone.close()


@in_loop
async def test_one_shard_runs_parts_of_its_layers_in_blocks_apart() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        whole = await user.open(a, wanted(0, 6))
        part = await user.open(a, wanted(2, 4))
        assert len(a.loads.asked) == 1
        x_TD = rows_of(4)
        for stage, n_layers in ((whole, 6), (part, 2)):
            route = await user.route((a, stage))
            assert np.array_equal(await route.run(batch_of(1), x_TD), x_TD + n_layers)
        assert len(set(a.runner.blocks)) == 2
        assert max(a.runner.blocks) < a.runner.n_blocks


@pytest.mark.parametrize("dtype", list(ActivationDtype))
@in_loop
async def test_activations_of_every_kind_go_through(dtype: ActivationDtype) -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a, wanted(0, 1, dtype=dtype))
        ticket = bytes(range(32))
        expected = user.ends.expect(ticket, dtype, SPEC.hidden)
        await stage.connect(NextStage(user.identity.node_id, (f"127.0.0.1:{user.listener.port}",), ticket))
        sink = await in_thread(user.ends.way(a.next_stage(stage.opened.ticket), dtype), soon())
        x_TD = np.full((2, SPEC.hidden), 0x3F00, np.uint16)
        await in_thread(sink.send, batch_of(1, rows=2), x_TD, soon())
        source = await in_thread(expected.accept, soon())
        _, y_TD = await in_thread(source.receive, soon())
        assert np.array_equal(y_TD, x_TD + 1)
        sink.close()
        source.close()
