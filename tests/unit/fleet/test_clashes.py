from __future__ import annotations

from tests.unit.fleet.cards import card

from paceline.fleet.card import NodeCard
from paceline.fleet.intake import ClashWatch


def watched(*cards: NodeCard, at: float = 0.0) -> ClashWatch:
    watch = ClashWatch(memory_s=100.0, max_nodes=4)
    for one in cards:
        watch.see(one, at)
    return watch


def lives(*instances: int) -> list[NodeCard]:
    return [card("a", version, instance=instance) for version, instance in enumerate(instances, 1)]


def test_restarts_are_no_clash() -> None:
    assert watched(*lives(0, 0, 1, 1, 2, 3, 4, 5, 6)).clashes(0.0) == ()


def test_an_old_life_met_late_is_no_clash() -> None:
    assert watched(*lives(1, 0, 1)).clashes(0.0) == ()


def test_two_that_take_turns_are_one() -> None:
    watch = watched(*lives(0, 1, 0, 1))
    (clash,) = watch.clashes(30.0)
    assert (clash.node_id, clash.addresses, clash.other_addresses) == ("a", ("a-1:7000",), ("a-0:7000",))
    assert clash.seen_s_ago == 30.0


def test_two_cards_of_one_version_are_one() -> None:
    assert watched(card("a", 1, instance=0), card("a", 1, instance=1)).clashes(0.0) != ()


def test_a_clash_is_told_once_and_forgotten_in_time() -> None:
    watch = watched(*lives(0, 1, 0))
    assert watch.see(card("a", 10, instance=1), 10.0) is not None
    assert watch.see(card("a", 11, instance=0), 20.0) is None
    assert watch.clashes(120.0) != ()
    assert watch.clashes(121.0) == ()
    assert watch.see(card("a", 12, instance=1), 200.0) is not None


def test_so_many_ids_are_watched() -> None:
    watch = watched(*(card(f"n{number}", 1) for number in range(50)))
    assert len(watch._lives) == 4
