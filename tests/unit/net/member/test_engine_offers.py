"""What a node offers while its engine is down: nothing of it; and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.machine.echo_engine import EchoEngine
from tests.unit.machine.test_host import drain, host_of, request
from tests.unit.machine.weights.conftest import new_home  # noqa: F401
from tests.unit.net.member.nodes import in_loop, until, until_seen
from tests.unit.ways.pipeline.host.test_serving import card_of, nodes

from paceline.core.clock import SystemClock
from paceline.core.errors import ExecutorUnavailable, PacelineError, WayNotAllowed
from paceline.core.inference import ServedModel
from paceline.core.model import ModelRef
from paceline.core.text import Tokenizer
from paceline.engine.config import EngineConfig
from paceline.fleet.card import ModelShape, Role
from paceline.machine.capability import WarmModel
from paceline.machine.host import EngineHost
from paceline.machine.speed import Speed
from paceline.node.build import BuiltNode
from paceline.node.serving import FleetServing
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home

SHAPE = ModelShape(n_layers=2, hidden=64, layer_bytes=1 << 16, edge_bytes=1 << 16, kv_bytes_per_token_per_layer=64, max_context=128)


def built(*engines: EchoEngine, way: str = "alone", tokens_per_second: float = 10.0) -> BuiltNode:
    """A node with an engine, and those that take its place."""
    speed = Speed(tokens_per_second, 100.0, "n" * 16, holds_identity=True, vocabulary="v" * 32)
    warm = WarmModel(ModelRef("d" * 64, "int4", "echo"), SHAPE, 100, 1 << 20, speed)
    host = host_of(engines[0], 4, *engines[1:], way=way)
    return BuiltNode(host, ServedModel("echo", 0, 100, cast("Tokenizer", None), "fp"), (), "echo", warm)


def offers_echo(viewer: FleetServing, name: str) -> bool:
    return any(offer.warm and offer.model_id == "echo" for offer in card_of(viewer, name).models)


@in_loop
async def test_an_engine_that_failed_is_off_the_card_until_there_is_another(new_home: Callable[[str], Home]) -> None:  # noqa: F811
    first, second, last = EchoEngine(crash_at=1), EchoEngine(), EchoEngine(crash_at=1)
    mended, broken = built(first, second), built(last)
    with closing(mended), closing(broken):
        async with nodes(TestFleet(), ("a", new_home("a"), None), ("b", new_home("b"), None)) as (a, b):
            await until_seen(a.fleet, "a", "b")
            await asyncio.gather(a.attach(mended), b.attach(broken))
            await until(lambda: offers_echo(a, "b") and offers_echo(b, "a"))
            [ended] = await drain(broken.host.generate("echo", request()))
            assert ended.code == "engine_gone"
            assert not b._local.all
            await until(lambda: not offers_echo(a, "b"))
            # One that is mended is asked again, by itself and others.
            await drain(mended.host.generate("echo", request()))
            await until(lambda: mended.host.is_up and offers_echo(b, "a"))
            assert len(await drain(mended.host.generate("echo", request("after")))) == 3


@in_loop
async def test_a_request_moves_on_to_a_node_whose_engine_lives(new_home: Callable[[str], Home]) -> None:  # noqa: F811
    broken, sound = built(EchoEngine(crash_at=1)), built(EchoEngine())
    with closing(broken), closing(sound):
        async with nodes(TestFleet(), ("a", new_home("a"), None), ("b", new_home("b"), None)) as (a, b):
            await until_seen(a.fleet, "a", "b")
            await asyncio.gather(a.attach(broken), b.attach(sound))
            await until(lambda: offers_echo(a, "a") and offers_echo(a, "b"))  # else the first request may not be a's own
            # Its first token never came, so that the other answers it from the beginning; and those after it.
            for name in ("one", "two"):
                chunks = await drain(a.inference.generate("echo", request(name)))
                assert [chunk.token_ids for chunk in chunks if chunk.token_ids] == [(0,), (1,), (2,)]
                assert not broken.host.is_up


@in_loop
async def test_a_request_moves_on_from_a_node_that_serves_in_no_way_that_it_allows(new_home: Callable[[str], Home]) -> None:  # noqa: F811
    fast, slow = built(EchoEngine(), way="pipeline", tokens_per_second=1000.0), built(EchoEngine())
    with closing(fast), closing(slow):
        async with nodes(TestFleet(), *((name, new_home(name), None) for name in "abc")) as (door, b, c):
            await until_seen(door.fleet, *"abc")
            await asyncio.gather(b.attach(fast), c.attach(slow))
            await until(lambda: "echo" in door.inference._routes and len(door.inference._routes["echo"].stops) == 2)
            chunks = await drain(door.inference.generate("echo", replace(request(), ways=frozenset({"alone"}))))
            assert [chunk.token_ids for chunk in chunks if chunk.token_ids] == [(0,), (1,), (2,)]
            assert door.fleet.meter.retried == 1, "the faster one was asked first, and refused"
            with pytest.raises(WayNotAllowed, match="the request allows draft") as refused:
                await drain(door.inference.generate("echo", replace(request("none"), ways=frozenset({"draft"}))))
            assert refused.value.field == "ways"
            assert door.fleet.meter.retried == 3


@in_loop
async def test_every_model_that_is_loaded_is_on_the_card_for_as_long_as_it_is(new_home: Callable[[str], Home]) -> None:  # noqa: F811
    config, speed = EngineConfig(max_context=100, max_running=2, max_waiting=2), Speed(10.0, 100.0, "n" * 16, True, "v" * 32)

    def named(name: str, engine: EchoEngine) -> BuiltNode:
        model = ServedModel(name, 0, 100, cast("Tokenizer", None), "fp")
        host = EngineHost(engine, engine.close, model, config, SystemClock())
        warm = WarmModel(ModelRef(name * 64, "int4", name), SHAPE, 100, 1 << 20, speed)
        return BuiltNode(host, model, (), name, warm, ModelLocation(name, Path(f"/nowhere/{name}")))

    def offered(viewer: FleetServing) -> set[str]:
        return {offer.model_id for offer in card_of(viewer, "a").models if offer.warm and offer.role is Role.VERIFIER}

    first, second, third = EchoEngine(), EchoEngine(crash_at=1), EchoEngine()
    async with nodes(TestFleet(), ("a", new_home("a"), None), ("b", new_home("b"), None)) as (a, b):
        with closing(a.models):
            await until_seen(a.fleet, "a", "b")
            for name, engine in (("x", first), ("y", second), ("z", third)):
                await a.attach(named(name, engine))
            await until(lambda: offered(b) == {"x", "y", "z"})
            for name in "xz":
                await until(lambda name=name: name in b.inference._routes)
                assert [chunk.token_ids for chunk in await drain(b.inference.generate(name, request(name)))] == [(0,), (1,), (2,)]
            # An engine that failed takes its own model off the card, and no other.
            await drain(a.inference.generate("y", request("y")))
            await until(lambda: offered(b) == {"x", "z"})
            await a.models.unload("x", 1.0)
            await until(lambda: offered(b) == {"z"} and list(b.inference._routes) == ["z"])
            assert [chunk.token_ids for chunk in await drain(b.inference.generate("z", request("again")))] == [(0,), (1,), (2,)]


@in_loop
async def test_another_node_is_told_so(new_home: Callable[[str], Home]) -> None:  # noqa: F811
    broken = built(EchoEngine(crash_at=1))
    with closing(broken):
        async with nodes(TestFleet(), ("a", new_home("a"), None)) as (a,):
            await a.attach(broken)
            await drain(broken.host.generate("echo", request()))
            with pytest.raises(ExecutorUnavailable) as refused:
                await drain(a.inference.generate("echo", request("late")))
            assert isinstance(refused.value, PacelineError)
            assert refused.value.code == "engine_gone"
