"""A fleet of real processes on one machine: `init`, `join`, `up`, `status`; goodbyes, power cuts, restarts and revocations."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from tests.fleet.machines import EMPTY, Machine, machines, token_in, until

from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home


@pytest.fixture
def fleet(members: tuple[Machine, Machine]) -> tuple[Machine, Machine]:
    """The same, both running and in one another's view."""
    a, b = members
    for machine in members:
        if not machine.is_up:
            machine.up(*EMPTY)
    until(lambda: a.sees() == b.sees() == {"a", "b"})
    return a, b


def fail() -> NoReturn:
    raise AssertionError("a process was started without a pipe")


def test_a_machine_that_joined_needs_nothing_else_to_find_the_others(fleet: tuple[Machine, Machine]) -> None:
    a, b = fleet
    said = a.status()
    assert [node["node_id"] for node in said["nodes"]] == ["a", "b"]
    assert said["own_node_id"] == "a"
    assert all(node["memory_total_bytes"] > 0 for node in said["nodes"])
    assert "runs already" in a.run("up", *EMPTY, code=2)
    assert "No machine that is seen here has the model" in b.run("plan", "nobody-has-this", code=2)
    shown = b.run("status")
    assert a.node.address in shown
    assert "seen by b" in shown


def test_a_goodbye_is_seen_before_its_sender_has_ended(fleet: tuple[Machine, Machine]) -> None:
    a, b = fleet
    watching = subprocess.Popen(a.command("status", "--watch", "--json"), env=a.environment, stdout=subprocess.PIPE, text=True)
    with watching, watching.stdout or fail() as lines:
        shown = (frozenset(node["node_id"] for node in json.loads(line)["nodes"]) for line in lines)
        assert {"a", "b"} in shown
        b.node.stop()
        assert a.sees() == {"a"}
        assert {"a"} in shown
        watching.send_signal(signal.SIGINT)
    assert watching.returncode == 130
    assert "does not run" in b.run("status", code=2)


def test_a_restarted_node_supersedes_its_old_self(fleet: tuple[Machine, Machine]) -> None:
    a, b = fleet
    before = a.card_of("b")
    assert before is not None
    b.node.kill()
    b.up(*EMPTY)  # quicker than the old card expires, if the machine is not busy
    until(lambda: (card := a.card_of("b")) is not None and card.instance != before.instance)
    after = a.card_of("b")
    assert after is not None
    assert after.version > before.version
    assert after.addresses == (b.node.address,)


def test_a_stopped_node_does_not_answer_and_a_killed_one_leaves_at_once(fleet: tuple[Machine, Machine]) -> None:
    a, b = fleet
    b.node.process.send_signal(signal.SIGSTOP)
    assert "b does not answer" in a.run("status")
    b.node.process.send_signal(signal.SIGCONT)
    until(lambda: "b does not answer" not in a.run("status"))
    assert not any("refused" in line for line in b.node.said)
    b.node.kill()
    assert [node["node_id"] for node in a.status()["nodes"]] == ["a"]


def test_a_killed_node_is_gone_when_its_card_expires_and_never_shown_for_longer(fleet: tuple[Machine, Machine]) -> None:
    a, b = fleet
    b.node.kill()

    def gone() -> bool:
        nodes = a.sight().view.nodes
        assert all(live.age_s <= live.card.ttl_s for live in nodes)
        return [live.card.node_id for live in nodes] == ["a"]

    until(gone)
    assert any(failure.address == b.node.address for failure in a.sight().failures)


def test_the_other_way_round_a_restarted_ca_finds_its_members(fleet: tuple[Machine, Machine]) -> None:
    a, b = fleet
    a.node.stop()
    assert b.sees() == {"b"}
    a.up(*EMPTY)
    until(lambda: a.sees() == b.sees() == {"a", "b"})


def test_a_revoked_node_is_refused_now_and_at_its_next_start(fleet: tuple[Machine, Machine], tmp_path: Path) -> None:
    a, b = fleet
    with machines(tmp_path, Home.from_environment().kernels, "c") as (c,):
        c.run("join", token_in(a.run("token", "--address", "127.0.0.1")), "--name", "c")
        c.up(*EMPTY)
        until(lambda: a.sees() == b.sees() == c.sees() == {"a", "b", "c"})
        a.run("revoke", "c")
        until(lambda: a.sees() == b.sees() == {"a", "b"})
        assert a.sight().view.revoked == b.sight().view.revoked == ("c",)
        until(lambda: any("refused c" in line for line in a.node.said))
        until(lambda: any("this machine (c) was revoked" in line and "To join again" in line for line in c.node.said))
        until(lambda: bool(FleetFolder(Home(c.home).fleet).sealed_revocations()))
        c.node.kill()
        assert "was revoked from its fleet" in c.run("up", *EMPTY, code=2)
        until(lambda: a.sees() == {"a", "b"})


def test_a_machine_in_no_fleet_is_told_what_to_do(tmp_path: Path) -> None:
    with machines(tmp_path, Home.from_environment().kernels, "alone") as (alone,):
        for command in (("status",), ("up", "--no-model"), ("up", "--peer", "127.0.0.1:1")):
            assert "paceline join" in alone.run(*command, code=2)
