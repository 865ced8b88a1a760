"""What a node shows of other nodes' models."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.adversarial.machines import NAME, Engine, Made, machines, offer
from tests.unit.node.fleet.nodes import in_loop, until

from paceline.fleet.effects import Effect
from paceline.server.inference import ServedModel


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
