"""`paceline` on a machine that is as quick as the file `speed` in its home says, in tokens a second, and whose plan is as late as `plan_clock` says.

Put before a command: `paced_node.py PYTHON -m paceline up`. Once a change to another way was put off for an answer, there is a file `put_off`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.cli import main
from paceline.fleet.card import ModelOffer
from paceline.fleet.choices import Standing
from paceline.fleet.plan import Choice, Plan
from paceline.machine.capability import LocalOffers
from paceline.machine.models import Models
from paceline.net.member import upkeep
from paceline.node import pipelines
from paceline.store.home import Home

HOME = Home.from_environment().root
offers, look, change = LocalOffers.offers, Standing.look, Models[Any].change


def looked(standing: Standing, made: Plan | None, _: float, *, is_whole: bool) -> Choice | None:
    return look(standing, made, float((HOME / "plan_clock").read_text()), is_whole=is_whole)


def paced(*given: Any) -> Sequence[ModelOffer]:
    speed = float((HOME / "speed").read_text())
    return [replace(offer, tokens_per_second=speed, prefill_tokens_per_second=speed, steps=()) for offer in offers(*given)]


async def changed(*given: Any) -> bool:
    done = await change(*given)
    if not done:
        (HOME / "put_off").touch()
    return done


if __name__ == "__main__":
    upkeep.PORTRAIT_S, pipelines.REPLANNED_S = 0.5, 0.2
    LocalOffers.offers, Models.change, Standing.look = paced, changed, looked  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv[1:] = sys.argv[4:]
    main()
