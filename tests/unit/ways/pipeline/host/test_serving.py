"""Nodes of a fleet that serve shards: layers fetched from another member, run, shown on cards, counted, and gone with the node."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.fakes.fleets import TestFleet
from tests.unit.machine.weights.conftest import new_home, sharded  # noqa: F401
from tests.unit.net.member.nodes import QUICK, in_loop, until, until_seen
from tests.unit.ways.pipeline.host.hosts import batch_of, in_thread, soon

from paceline.backends.options import LoadOptions
from paceline.core.clock import SystemClock
from paceline.core.errors import BadPipelineRequest, FleetError, NotTrusted, WeightsMismatch
from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype, LayerRange, WeightsFormat
from paceline.fleet.card import NodeCard, Role
from paceline.fleet.eligibility import Use
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.net.channels import Purpose
from paceline.net.tensor.dialling import tensor_addresses
from paceline.net.trust.certificates import Member
from paceline.net.trust.folder import FleetFolder
from paceline.node.serving import FleetServing
from paceline.store.catalog import open_model
from paceline.store.home import Home
from paceline.store.partial import list_parts
from paceline.ways.pipeline.client import open_stage
from paceline.ways.pipeline.executor.route import NextStage, StageRequest
from paceline.ways.pipeline.executor.stage import Stage
from paceline.ways.pipeline.host.ends import tensor_ends
from paceline.ways.pipeline.host.loading import load_layers
from paceline.ways.pipeline.host.serving import Hosting
from paceline.ways.pipeline.host.session import HostLimits

Homes = Callable[[str], Home]


def request_for(digest: str, layers: LayerRange, *, name: str = "sharded") -> StageRequest:
    return StageRequest(secrets.token_bytes(16), name, digest, WeightsFormat.BF16, layers, 8, 2, 16, report_s=0.05)


@asynccontextmanager
async def nodes(fleet: TestFleet, *made: tuple[str, Home, Hosting | None]) -> AsyncIterator[list[FleetServing]]:
    """Nodes that know the first one."""
    running: list[FleetServing] = []
    try:
        for name, home, hosting in made:
            home.fleet.mkdir(parents=True, exist_ok=True)
            if not home.kernels.exists():  # compiled once for all tests
                home.kernels.parent.mkdir(parents=True, exist_ok=True)
                home.kernels.symlink_to(Home.from_environment().kernels)
            folder = FleetFolder(home.fleet)
            folder.write_secret(folder.identity_file, fleet.member(name).to_pem())
            peers = running[0].fleet.addresses if running else ()
            settings = FleetSettings(0, "127.0.0.1", peers=peers, mdns=False, preset=parse_preset(QUICK))
            node = FleetServing(None, settings, home, SystemClock(), hosting)
            running.append(node)
            await node.start()
        yield running
    finally:
        await asyncio.gather(*(node.stop() for node in running))


def card_of(viewer: FleetServing, name: str) -> NodeCard:
    live = viewer.fleet.view().get(NodeId(name))
    assert live is not None
    return live.card


@in_loop
async def test_layers_are_fetched_run_shown_and_counted(sharded: tuple[Home, str], new_home: Homes) -> None:  # noqa: F811
    giver, digest = sharded
    layers = LayerRange(2, 5)
    async with nodes(TestFleet(), ("user", giver, None), ("host", new_home("host"), Hosting(HostLimits(max_streams=3), threads=1))) as (
        user,
        host,
    ):
        await until_seen(user.fleet, "user", "host")
        await until(lambda: card_of(user, "host").serves_shards)
        await until(lambda: any(offer.digest == digest for offer in card_of(host, "user").models))
        assert not card_of(host, "user").serves_shards
        card = card_of(user, "host")
        channel = user.fleet.channel(NodeId("host"), card.addresses, Use.HOLD_LAYERS)
        stage = await open_stage(channel, NodeId("host"), request_for(digest, layers))
        # Layers are opened as they arrive; what is on the disk is noted once all of it is written out.
        await until(lambda: [part.digest for part in list_parts(new_home("host"))] == [digest])
        ends = tensor_ends(user.fleet)
        ticket = secrets.token_bytes(32)
        expected = ends.expect(ticket, ActivationDtype.BF16, 256)
        await stage.connect(NextStage(NodeId("user"), tensor_addresses(user.fleet.addresses, ends.port), ticket))
        to = NextStage(NodeId("host"), tensor_addresses(card.addresses, stage.opened.tensor_port), stage.opened.ticket)
        sink = await in_thread(ends.way(to, ActivationDtype.BF16), soon())
        x_TD = (np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        await in_thread(sink.send, batch_of(1), x_TD, soon())
        source = await in_thread(expected.accept, soon())
        _, y_TD = await in_thread(source.receive, soon())
        options = LoadOptions(layers, WeightsFormat.BF16, 8, edges=False, kernel_cache=giver.kernels)
        alone = await in_thread(load_layers, open_model("sharded", giver).weights, options, lambda done, total: None)
        assert alone.numerics_id == stage.opened.numerics_id
        by_itself = Stage(alone, layers, base_block=0, n_blocks=8, max_rows=16, max_context=128, width=256)
        assert np.array_equal(y_TD, by_itself.run(batch_of(1), x_TD))
        alone.close()

        def offers() -> list[tuple[LayerRange, int, int, bool]]:
            found = [offer for offer in card_of(user, "host").models if offer.role is Role.SHARD and offer.shard is not None]
            return [(o.shard.layers, o.shard.streams, o.shard.max_streams, o.warm) for o in found if o.shard is not None]

        await until(lambda: offers() == [(layers, 1, 3, True)])
        assert host.shards is not None
        registry = CollectorRegistry()
        for collector in host.collectors:
            registry.register(collector)
        page = generate_latest(registry).decode()
        assert 'paceline_shard_latency_ms_count{shard_id="sharded:2-4"} 1.0' in page
        assert "paceline_shard_sessions 1.0" in page
        assert "paceline_shard_evictions_total 0.0" in page
        assert "paceline_shard_corruption_detected_total 0.0" in page
        await stage.close()
        await until(lambda: offers() == [(layers, 0, 3, True)])
        sink.close()
        source.close()


@in_loop
async def test_weights_of_another_digest_are_no_match(sharded: tuple[Home, str], new_home: Homes) -> None:  # noqa: F811
    giver, digest = sharded
    async with nodes(TestFleet(), ("user", new_home("user"), None), ("host", giver, Hosting(threads=1))) as (user, _):
        await until_seen(user.fleet, "user", "host")
        channel = user.fleet.channel(NodeId("host"), card_of(user, "host").addresses, Use.HOLD_LAYERS)
        with pytest.raises(WeightsMismatch, match=digest[:12]):
            await open_stage(channel, NodeId("host"), request_for("cd" * 32, LayerRange(0, 1)))
        with pytest.raises(BadPipelineRequest, match="Neither"):
            await open_stage(channel, NodeId("host"), request_for("cd" * 32, LayerRange(0, 1), name="unknown"))
        with pytest.raises(BadPipelineRequest, match="6 layers"):
            await open_stage(channel, NodeId("host"), request_for(digest, LayerRange(5, 9)))
        stage = await open_stage(channel, NodeId("host"), request_for(digest, LayerRange(0, 1)))
        await stage.close()


@in_loop
async def test_who_may_use_shards_is_the_hosts_choice_and_none_are_served_unasked(tmp_path: Path) -> None:
    def refuse(caller: Member) -> None:
        raise NotTrusted(f"{caller.node_id} is a guest", who=caller.node_id)

    made = [("user", Home(tmp_path / "user"), None), ("host", Home(tmp_path / "host"), Hosting(threads=1, check_caller=refuse))]
    async with nodes(TestFleet(), *made) as (user, host):
        await until_seen(user.fleet, "user", "host")
        channel = user.fleet.channel(NodeId("host"), host.fleet.addresses, Use.HOLD_LAYERS)
        with pytest.raises(NotTrusted, match="guest"):
            await open_stage(channel, NodeId("host"), request_for("ab" * 32, LayerRange(0, 1)))
        back = host.fleet.pool.get(Purpose.STREAM, user.fleet.addresses[0], user.fleet.identity.member)
        with pytest.raises(FleetError, match="unimplemented"):
            await open_stage(back, NodeId("user"), request_for("ab" * 32, LayerRange(0, 1)))
