"""What KV at another node is worth."""

from __future__ import annotations

import pytest

from paceline.core.ids import NodeId
from paceline.core.model import ModelRef
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.ways.kv.price import FASTER, OPENING_S, KvPrice, PrefillPrice, explain_prompts, marked, price, run_of

LINK = Link(NodeId("b"), "b:1", 0.001, 1e8)


def offer(per_s: float) -> ModelOffer:
    return ModelOffer("m", Role.VERIFIER, "int4", 10.0, per_s, "d" * 64, warm=True)


def test_it_is_fetched_from_as_many_blocks_on_as_make_up_for_asking() -> None:
    found = price(1_000_000, 16, offer(400.0), LINK)
    assert found is not None
    assert found == KvPrice(OPENING_S + 0.004, 0.01, 0.04)
    assert found.least_blocks == 2  # 24 ms of asking, against 22 ms that each saves of what counts
    assert found.saved_s(1) == 0.0
    assert found.saved_s(100) == pytest.approx(3.0 - 0.024)
    assert "from 32 tokens on: 1600 a second come from there, and 400 are computed here" in found.words(16)


def test_it_is_not_fetched_where_computing_is_about_as_fast_or_nothing_was_measured() -> None:
    slow = price(1_000_000, 16, offer(1600.0 / FASTER + 1), LINK)
    assert slow is not None
    assert slow.least_blocks is None
    assert slow.saved_s(10_000) == 0.0
    assert "is not fetched" in slow.words(16)
    assert price(1, 16, offer(0.0), LINK) is None
    assert price(1, 16, None, LINK) is None
    assert price(1, 16, offer(100.0), None) is None


def test_what_blocks_took_lately_counts_instead_of_the_link() -> None:
    found = price(1_000_000, 16, offer(400.0), LINK, 1e7)
    assert found is not None
    assert found.least_blocks is None


def test_a_prefix_reaches_to_the_last_mark_of_it() -> None:
    keys = [bytes([number]) * 16 for number in range(1, 21)]
    marks = {keys[3][:8], keys[9][:8], bytes(8)}
    assert run_of(marks, marked(marks, keys)) == 10
    assert run_of(marks, marked(marks, keys[:9])) == 4
    assert run_of({bytes(8)}, marked(marks, keys)) == 0


def card(name: str, per_s: float, role: Role = Role.VERIFIER, numerics: str = "n", to: str = "") -> NodeCard:
    shape = ModelShape(30, 576, 2_212_560, 30_081_384, 768, 8192)
    shown = ModelOffer("m", role, "int4", 10.0, per_s, "d" * 64, warm=True, numerics_id=numerics, shape=shape)
    links = (Link(NodeId(to), "x:1", 0.001, 1e8),) if to else ()
    return NodeCard(NodeId(name), 1, (f"{name}:1",), b"i", 120, 0, models=(shown,), links=links)


def test_it_is_said_which_prompts_are_computed_elsewhere_and_why() -> None:
    cards = [
        card("d", 100.0),
        card("like", 100.0, to="d"),
        card("other", 4000.0, numerics="m", to="d"),
        card("p", 4000.0, Role.PREFILL, to="d"),
        card("several", 0.0, to="d"),
        card("unmeasured", 4000.0),
    ]
    said = explain_prompts({one.node_id: one for one in cards}, NodeId("d"), ModelRef("d" * 64, "int4"), 500)
    like = "prompts of 32 new tokens or more, while answers are written here, are computed there"
    assert said == [
        f"like: {like}: 100 a second come, and 100 are computed here; one of 500 stays at d",
        "p: prompts of 16 new tokens or more are computed there: 4000 a second come, and 100 are computed here; one of 500 goes there",
        "several: whether prompts are computed there is in the log of d: cards don't say how fast several machines are",
        "unmeasured: prompts are not computed there: its speed, or the link, is not measured",
    ]
    assert explain_prompts({one.node_id: one for one in cards}, NodeId("gone"), ModelRef("d" * 64, "int4"), 500) == []


@pytest.mark.parametrize("there_s", [0.005, 0.05, 0.07, 0.078, 0.1, 0.112])
def test_what_is_said_is_what_is_decided_whether_or_not_answers_are_written(there_s: float) -> None:
    cost = PrefillPrice(0.05, 0.001, there_s, 0.1, 32)
    for n_writing, least in ((0, cost.least_blocks), (1, cost.least_beside), (8, cost.least_beside)):
        decided = next((n for n in range(1, 10_000) if cost.saved_s(n, n, n_writing) > 0), None)
        assert least == decided
        assert ("" if least is None else f"of {16 * least} ") in cost.words(16)


def test_a_machine_that_writes_answers_has_prompts_computed_by_one_as_fast_and_not_by_one_that_is_slower() -> None:
    fetched = KvPrice(0.05, 0.001, 0.1)
    alike, slower = (PrefillPrice(0.05, 0.001, there_s, 0.1, 32) for there_s in (0.1, 0.112))
    assert alike.saved_s(256, 256) == slower.saved_s(256, 256, 8) == 0.0
    assert alike.saved_s(256, 256, 8) == pytest.approx(9 * 25.6 - alike.pushed_s(256, 256))
    assert alike.saved_s(2, 2, 8) == 0.0, "the call itself takes a quarter of that time"
    assert fetched.saved_s(240, 8) > alike.saved_s(256, 256, 8), "what another machine has comes first"
