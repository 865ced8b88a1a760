"""Shared engines in `status`, `ps`, `plan` and `doctor`."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.cli.test_status import shown_of
from tests.unit.fleet.test_engines import card, engine_offer

from paceline.cli import doctor
from paceline.cli.doctor import Level
from paceline.cli.plan import run_plan, show
from paceline.cli.running import EndpointLoad
from paceline.cli.shared_engines import offer_words, read_states, state_lines
from paceline.core.errors import PlacementError
from paceline.fleet.card import ModelOffer, ModelShape, Role
from paceline.fleet.plan import PlanRequest
from paceline.machine.foreign.shares import EngineShare, change_shares
from paceline.machine.foreign.state import EngineState, SharedModel
from paceline.node.ways import explained
from paceline.store.home import Home

URL = "http://127.0.0.1:9"
MODEL = SharedModel(replace(engine_offer(), under_way=2), 4096, 1)
STATE = EngineState(URL, "llama-server b9000", (MODEL,), 2, 0)


def test_states_come_from_an_endpoint_as_they_were() -> None:
    states = (STATE, EngineState(URL, trouble="gone", plain_http=True))
    assert read_states(json.loads(json.dumps([asdict(state) for state in states]))) == states


@pytest.mark.parametrize("said", [None, [{}], [{"url": 1}], {"url": URL}, "x"])
def test_what_is_no_list_of_engines_is_refused(said: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read_states(said)


def test_an_offer_is_described_with_what_a_person_should_know() -> None:
    words = offer_words(engine_offer(0.0, "m\x1b[31m", leaves_network=True, plain_http=True))
    for part in ("llama-server b9000", "Q4_K_M", "4 slots", "not measured yet", "leaves your network", "unencrypted"):
        assert part in words
    assert "\x1b" not in words
    encoder = replace(engine_offer(0.0, capabilities=("rerank", "schemas")), role=Role.EMBEDDER)
    assert "rerank" in (said := offer_words(encoder))
    assert "schemas" not in said
    assert "measured" not in said
    assert "20 tokens/s" in offer_words(MODEL.offer)
    assert "2 busy" in offer_words(MODEL.offer)


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        ({}, ("4 slots", "20 tokens/s", "first token after 2.56 s")),
        ({"capacity": 6}, ("6 at once", "20 tokens/s")),
        ({"load_s": 12.0}, ("loads first: 12 s", "first token after 2.56 s")),
        ({"load_s": 0.0}, ("loads first: about 10.7 s, estimated",)),
    ],
    ids=["told", "measured", "a load", "no load measured"],
)
def test_an_offer_says_what_was_measured(engine: dict[str, object], parts: tuple[str, ...]) -> None:
    words = offer_words(engine_offer(**engine))
    assert all(part in words for part in parts)
    assert ("slots" in words) == ("capacity" not in engine)
    shown, _ = planned(engine_offer(**engine))
    assert ("loads first" in shown) == ("load_s" in engine)


@pytest.mark.parametrize(
    ("state", "part"),
    [
        (STATE, "memory not counted"),
        (replace(STATE, trouble="it hangs"), "does not answer: it hangs"),
        (EngineState(URL, trouble="refused"), f"at {URL} does not answer"),
        (replace(STATE, models=()), "no model"),
        (replace(STATE, models=(replace(MODEL, trouble="a request failed"),)), "not offered now: a request failed"),
    ],
)
def test_status_shows_each_shared_engine_under_its_endpoint(state: EngineState, part: str) -> None:
    (line,) = state_lines(state)
    assert part in line
    assert f"  {line}" in shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), engines=(state,)))


def planned(*offers: ModelOffer, exact: bool = False) -> tuple[str, dict[str, object]]:
    made = explained(PlanRequest("m", exact=exact), lambda: [card("a", *offers), card("b")])
    console = Console(file=io.StringIO(), width=160)
    show(console, made)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), made.as_json()


@pytest.mark.parametrize(("speed", "part"), [(20.0, "measured"), (0.0, "not measured yet")])
def test_a_plan_for_a_model_that_only_engines_have_names_node_engine_and_what_it_does_not_promise(speed: float, part: str) -> None:
    shown, said = planned(engine_offer(speed))
    for word in ("a, in llama-server b9000, Q4_K_M", part, "promises no bytes"):
        assert word in shown
    assert said["chosen"] is None
    (engine,) = said["engines"]
    assert (engine["node_id"], engine["promise"]) == ("a", "none")


def test_no_engine_answers_a_request_for_exact_bytes() -> None:
    with pytest.raises(PlacementError, match="promises the bytes of m"):
        planned(engine_offer(), exact=True)


def test_engines_stand_next_to_the_plan_of_own_kernels() -> None:
    own = ModelOffer(
        "m",
        Role.VERIFIER,
        "stored",
        20.0,
        200.0,
        "1" * 64,
        warm=True,
        numerics_id="cpu/1",
        shape=ModelShape(24, 2048, 1 << 20, 3 << 20, 2048, 32768),
    )
    slow, said = planned(own, engine_offer(1.0))
    assert said["chosen"] is not None
    assert "in llama-server b9000" in slow
    assert "go first to" not in slow
    assert "go first to a, in llama-server" in planned(own, engine_offer(200.0))[0]
    assert "go first to" not in planned(own, engine_offer(200.0, digest="2" * 64))[0]
    assert "go first to" not in planned(own, engine_offer(200.0, leaves_network=True))[0]
    assert "llama-server" not in planned(own, engine_offer(200.0), exact=True)[0]


def test_a_machine_in_no_fleet_plans_with_the_engines_that_it_shares(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.plan.shared_here", lambda: [engine_offer(name="only-here")])
    run_plan(PlanRequest("only-here"), (None, None, (), {}), as_json=True)
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["model_id"] == "only-here"


def test_the_doctor_names_shared_engines_that_do_not_answer(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert list(doctor._engines(home, ())) == []
    change_shares(home, lambda _: [EngineShare(URL), EngineShare("http://127.0.0.1:19")])
    seen = EndpointLoad("http://127.0.0.1:1", 1, "ok", engines=(replace(STATE, models=(replace(MODEL, trouble="it failed"),)),))
    found = [(one.level, one.subject) for one in doctor._engines(home, (seen,))]
    assert found == [(Level.OK, URL), (Level.NOTE, URL), (Level.PROBLEM, "http://127.0.0.1:19")]
    home.engines.write_bytes(b"{")
    assert [one.level for one in doctor._engines(home, ())] == [Level.PROBLEM]
