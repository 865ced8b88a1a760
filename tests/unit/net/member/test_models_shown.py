"""What a node shows of other nodes' models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.adversarial.machines import NAME, Engine, Made, machines, offer
from tests.unit.net.member.nodes import in_loop, until

from paceline.core.ids import NodeId
from paceline.core.inference import ServedModel
from paceline.fleet.messages import Effect


@in_loop
async def test_a_thread_that_looks_for_a_model_as_news_come_in_finds_what_is_shown(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as intake:
        async with machines(tmp_path, Made("desk", Engine()), Made("nas")) as (desk, nas):
            found: list[tuple[Sequence[ServedModel], bool]] = []

            def look(effect: Effect) -> None:
                """Told behind the inference, on the event loop, which stands still meanwhile."""
                del effect
                models, expects = intake.submit(nas.inference.models), intake.submit(nas.inference.expects, NAME)
                found.append((models.result(), expects.result()))

            nas.node.listen(look)
            desk.portrait.offers = (offer(100),)
            desk.node.look_again()
            await until(lambda: [model.name for model in nas.inference.models()] == [NAME])
            assert found


@in_loop
async def test_a_context_that_changes_where_the_model_runs_is_shown_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's does, with the machines that lease it KV: what the door goes by would refuse what fits, or let in what does not."""
    monkeypatch.setattr("paceline.ways.forward.inference.CONTEXT_S", 0.01)
    engine = Engine()
    async with machines(tmp_path, Made("desk", engine), Made("nas")) as (desk, nas):
        desk.portrait.offers = (offer(100),)
        desk.node.look_again()
        for context in (4096, 512, 8192):
            engine.context = context
            await until(lambda context=context: [model.max_context for model in nas.inference.models()] == [context])


@in_loop
async def test_a_node_whose_engine_is_down_asks_itself_for_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its card still has the model for a moment: at a stop it would call a server of its own that has ended, and warn of it."""
    async with machines(tmp_path, Made("desk", Engine())) as (desk,):
        called: list[NodeId] = []
        reach = desk.node.channel

        def channel(node_id: NodeId, *args: Any) -> grpc.aio.Channel:
            called.append(node_id)
            return reach(node_id, *args)

        monkeypatch.setattr(desk.node, "channel", channel)
        local = desk.inference._local
        local.show(local.inference, local.all, ())
        desk.portrait.offers = (offer(100),)
        desk.node.look_again()
        await until(lambda: bool(desk.inference._fetching))
        await asyncio.sleep(0)
        assert not called
