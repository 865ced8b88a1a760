"""Views that change, and what a node serves its model by as they do: replanned.txt. A machine that comes and goes moves nothing."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.fleet_text import FleetText, blocks

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.fleet.choices import BETTER, FAILED_S, HELD_S, Standing
from paceline.fleet.placement import headline
from paceline.fleet.plan import Plan, PlanRequest
from paceline.node.ways import plan

TEXT = (Path(__file__).parent / "replanned.txt").read_text()


class Replanned:
    """A node, and how often it moved."""

    def __init__(self, model: str = "mid") -> None:
        self.model = model
        self.fleet = FleetText()
        self.standing: Standing | None = None
        self.moves = 0

    def read(self, lines: list[str]) -> list[str]:
        said: list[str] = []
        flaps: tuple[str, int, int, int] | None = None
        for line in lines:
            match line.split():
                case [] | ["#", *_]:
                    pass
                case ["at", seconds]:
                    said.append(self.look(float(seconds)))
                case ["gone", name]:
                    del self.fleet.cards[name]
                case ["flap", name, first, last, each]:
                    flaps = name, int(first), int(last), int(each)
                case _:
                    self.fleet.read(line)
        if flaps is not None:
            name, first, last, each = flaps
            card, said, shown = self.fleet.cards[name], [], ""
            for now in range(first, last, 5):
                self.fleet.cards.pop(name, None)
                if (now - first) // each % 2 == 0:
                    self.fleet.cards[name] = card
                shown = self.look(float(now))
            self.fleet.cards.pop(name, None)
            said.append(shown.partition(";")[0])
        return said

    def look(self, now: float, *, is_whole: bool = True) -> str:
        made = self.made()
        if self.standing is None:
            assert made is not None
            self.standing = Standing(made.chosen)
        to = self.standing.look(made, now, is_whole=is_whole)
        if to is not None:
            self.standing.moved(to)
            self.moves += 1
        rather = self.standing.rather
        return headline(self.standing.running) + ("" if rather is None else f"; rather {headline(rather)}")

    def made(self) -> Plan | None:
        try:
            return plan(self.fleet.cards.values(), PlanRequest(self.model, orchestrator=NodeId("a")))
        except PlacementError:
            return None


def test_a_model_is_moved_for_what_lasts() -> None:
    node = Replanned()
    for lines, expected in blocks(TEXT.partition("\n\n")[2]):
        assert node.read(lines) == expected, lines
    assert node.moves == 2


RANKS = """\
model cut layers 32 hidden 4096 layer 130M edges 600M kv 4096 context 65536 heads 8 inner 14336 words 128256 attention 25M
node a memory 12G/16G rate 60G
  has cut warm decode 12 prefill 110 numerics m
  link b 0.6ms 2500M
"""
OTHER = """\
node b memory 12G/16G rate 60G shards 12G
  has cut decode 12 prefill 110 numerics m
"""


def test_ranks_are_left_and_taken_up_again_once_that_lasts() -> None:
    node, ranks = Replanned("cut"), "ranks on a 50% + b 50%"
    node.read([*RANKS.splitlines(), *OTHER.splitlines()])
    assert node.look(0) == ranks
    card = node.fleet.cards.pop("b")
    assert [node.look(now) for now in (10, 69, 70)] == [f"{ranks}; rather a alone"] * 2 + ["a alone"]
    node.fleet.cards["b"] = card
    assert [node.look(now) for now in (80, 139, 140)] == [f"a alone; rather {ranks}"] * 2 + [ranks]
    assert node.look(1000) == ranks


def test_a_rank_that_runs_elsewhere_than_planned_is_brought_back_once_its_machine_stays() -> None:
    node, ranks = Replanned("cut"), "ranks on a 50% + b 50%"
    node.read([*RANKS.splitlines(), *OTHER.splitlines()])
    node.look(0)
    assert [node.look(now, is_whole=False) for now in (10, 69)] == [f"{ranks}; rather {ranks}"] * 2
    assert (node.look(70, is_whole=False), node.moves) == (ranks, 1)


def test_without_a_plan_nothing_moves() -> None:
    node = Replanned()
    node.read([line for line in TEXT.splitlines() if line.startswith(("model", "node a", "  has mid warm"))])
    node.look(0)
    assert node.standing is not None
    assert node.standing.look(None, 10 * HELD_S) is None
    assert BETTER > 1


def test_what_could_not_be_had_is_not_tried_again_for_long() -> None:
    node = Replanned()
    node.read(TEXT.partition("\n\n")[2].split("----")[0].splitlines())
    for line in ("node b memory 24G/32G rate 90G shards 24G", "  has mid decode 20 prefill 300 numerics m"):
        node.fleet.read(line)
    assert node.standing is not None
    made = node.made()
    node.standing.look(made, 0.0)
    to = node.standing.look(made, HELD_S)
    assert to is not None
    node.standing.failed(to, HELD_S)
    assert node.standing.look(made, HELD_S + FAILED_S - 1) is None
    assert node.standing.rather is not None
    assert node.standing.look(made, HELD_S + FAILED_S) is not None
