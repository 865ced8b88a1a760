"""`paceline doctor` against real nodes and real sockets: each thing that can be wrong is made wrong, and named."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.cli.test_commands import paceline
from tests.unit.net.member.nodes import Still, in_loop, make_node, running, until_seen

from paceline import __version__
from paceline.backends.cpu import probe
from paceline.cli import doctor
from paceline.cli.doctor import Finding, Level, OwnSide, examine, judge_node, judge_own
from paceline.cli.running import GONE, STARTING, EndpointLoad
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.net.member import reach
from paceline.net.member.reach import Barrier, Reach, Setting
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home

OWN = Setting(0.0, 4000, 2, "3.11.1", "0.60.0")
MODEL = ModelOffer("m", Role.VERIFIER, "int4", digest="d", numerics_id="one")


class Off(SystemClock):
    """A clock that is wrong."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def wall(self) -> float:
        return super().wall() + self._by_s


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is silent here stays so."""
    monkeypatch.setattr(reach, "LOOK_S", 3.0)


async def found(root: Path, name: str, monkeypatch: pytest.MonkeyPatch, *peers: str) -> list[Finding]:
    """What the doctor finds on a machine of the fleet, of the fleet."""
    monkeypatch.setattr(doctor, "_machine", lambda _home: ())
    monkeypatch.setenv("PACELINE_HOME", str(root / name))
    return await examine(peers, SystemClock())


def of(findings: list[Finding], check: str, level: Level) -> list[Finding]:
    return [one for one in findings if (one.check, one.level) == (check, level)]


def problems(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.check, one.subject) for one in findings if one.level is Level.PROBLEM]


def enrolled(fleet: TestFleet, root: Path, name: str) -> None:
    """A machine of the fleet whose node does not run."""
    folder = FleetFolder(root / name / "fleet")
    folder.write_secret(folder.identity_file, fleet.member(name).to_pem())


def test_a_machine_in_no_fleet_is_well_and_told_so_by_the_exit_code() -> None:
    done = paceline("doctor", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"]) == (0, True), done.stdout
    by_check = {one["check"]: one for one in said["findings"]}
    assert {"versions", "kernels", "memory", "disk", "fleet"} <= by_check.keys()
    assert by_check["fleet"]["level"] == "note"
    assert f"paceline {__version__}" in by_check["versions"]["what"]
    wrong = paceline("doctor", "--peer", "nowhere")
    assert wrong.returncode == 2
    assert "'nowhere' is not host:port" in wrong.stderr


def test_what_serves_nothing_is_not_praised_and_what_runs_is_not_blamed_for_the_memory_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:1"
    states = (
        EndpointLoad(url, 1, "ok", ("m",)),
        EndpointLoad(url, 1, "ok", ()),
        EndpointLoad(url, 1, "ok"),
        *(EndpointLoad(url, 1, state) for state in (STARTING, GONE)),
    )
    found = [next(doctor._apis([one])) for one in states]
    assert [one.level for one in found] == [Level.OK, Level.NOTE, Level.OK, Level.NOTE, Level.PROBLEM]
    assert found[-1].what == "it gives no answer"
    assert "no model that it could serve" in found[1].what
    assert "paceline load" in found[1].todo
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1 << 20)
    levels: list[Level] = []
    for runs in ([], [states[0]]):
        monkeypatch.setattr(doctor, "endpoints_here", lambda _, runs=runs: runs)
        levels += [one.level for one in doctor._machine(Home(tmp_path)) if one.check == "memory"]
    assert levels == [Level.PROBLEM, Level.NOTE]
    (kernels,) = [one for one in doctor._machine(Home(tmp_path)) if one.check == "kernels"]
    assert "with a model" in kernels.todo


@in_loop
async def test_two_nodes_that_are_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, offer = TestFleet(), ModelOffer("m", Role.VERIFIER, "int4", digest="1" * 64)
    a = make_node(fleet, tmp_path, "a", offers=(offer,))
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a, offers=(replace(offer, digest="2" * 64),))
        async with running(b):
            await until_seen(a, "a", "b")
            findings = await found(tmp_path, "a", monkeypatch)
            assert problems(findings) == []
            (unlike,) = of(findings, "models", Level.NOTE)
            assert all(word in unlike.what for word in ("1" * 12, "2" * 12))
            assert {one.check for one in findings if (one.subject, one.level) == ("b", Level.OK)} == {
                "port.grpc", "port.tensor", "clock", "versions"
            }  # fmt: skip
            # The same without a node that runs, from an address alone.
            enrolled(fleet, tmp_path, "c")
            alone = await found(tmp_path, "c", monkeypatch, *b.addresses)
            assert problems(alone) == []
            assert of(alone, "node", Level.NOTE)
            assert of(alone, "port.tensor", Level.OK)[0].subject == "b"


@in_loop
async def test_a_closed_port_a_stranger_and_another_fleet_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    enrolled(fleet, tmp_path, "a")
    other = make_node(TestFleet(), tmp_path / "elsewhere", "b")
    with closed() as nowhere, silent() as mute:
        server = await asyncio.start_server(_speak_http, "127.0.0.1", 0)
        http = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, running(other):
            asked = (nowhere, mute, http, other.addresses[0], "no-such-host.invalid:8154")
            findings = {one.subject: one for one in await found(tmp_path, "a", monkeypatch, *asked)}
    for address, words, todo in zip(
        asked,
        ("refused", "says nothing", "does not speak as a node", "no certificate of this fleet", "no host of that name"),
        ("let TCP port", "is stopped", "Another program", "another fleet", "Correct the name"),
        strict=True,
    ):
        assert findings[address].level is Level.PROBLEM
        assert words in findings[address].what
        assert todo in findings[address].todo


@in_loop
async def test_a_tensor_port_that_is_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    enrolled(fleet, tmp_path, "a")
    b = make_node(fleet, tmp_path, "b")
    async with running(b):
        port = b.tensors.port
        await asyncio.to_thread(b.tensors.close)
        findings = await found(tmp_path, "a", monkeypatch, *b.addresses)
        (closed_port,) = of(findings, "port.tensor", Level.PROBLEM)
        assert closed_port.subject == f"b at 127.0.0.1:{port}"
        assert f"let TCP port {port} in there" in closed_port.todo
        assert "--tensor-port" in closed_port.todo


@in_loop
async def test_a_clock_that_is_wrong_and_other_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    enrolled(fleet, tmp_path, "a")
    b = make_node(fleet, tmp_path, "b")
    b._clock = Off(-3600)
    b._portrait = Versioned("0.0.9")
    async with running(b):
        findings = await found(tmp_path, "a", monkeypatch, *b.addresses)
        (clock,) = of(findings, "clock", Level.PROBLEM)
        assert clock.subject == "b"
        assert "3600 s behind" in clock.what
        (versions,) = of(findings, "versions", Level.NOTE)
        assert versions.what == f"paceline 0.0.9 there and {__version__} here"
        monkeypatch.setattr(doctor, "own_facts", lambda clock, port: _facts_of_another_arithmetic(clock, port))
        (versions,) = of(await found(tmp_path, "a", monkeypatch, *b.addresses), "versions", Level.PROBLEM)
        assert "its arithmetic is version 2, and this machine's 99" in versions.what


@in_loop
async def test_a_node_of_another_protocol_version_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    enrolled(fleet, tmp_path, "a")
    b = make_node(fleet, tmp_path, "b", protocol=PROTOCOL_VERSION + 1)
    async with running(b):
        (versions,) = of(await found(tmp_path, "a", monkeypatch, *b.addresses), "versions", Level.PROBLEM)
    assert versions.subject == b.addresses[0]
    assert f"b speaks protocol version {PROTOCOL_VERSION + 1}, and this machine version {PROTOCOL_VERSION}" in versions.what


@in_loop
async def test_a_certificate_out_of_its_time_is_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = TestFleet()
    enrolled(fleet, tmp_path, "a")
    b = make_node(fleet, tmp_path, "b")
    ahead = fleet.member("b", at=SystemClock().wall() + 3 * 86400)
    folder = FleetFolder(tmp_path / "b" / "fleet")
    folder.write_secret(folder.identity_file, ahead.to_pem())
    b = make_node(fleet, tmp_path, "b")
    async with running(b):
        (one,) = of(await found(tmp_path, "a", monkeypatch, *b.addresses), "port.grpc", Level.PROBLEM)
        assert "not yet valid" in one.what
        assert "Set the clock" in one.todo
        # On the machine itself, whose clock is behind the CA's.
        own = of(await found(tmp_path, "b", monkeypatch), "clock", Level.PROBLEM)
        assert own[0].subject == "b"


@in_loop
async def test_a_node_that_runs_and_does_not_answer_is_a_problem_and_one_met_before_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        folder = FleetFolder(tmp_path / "a" / "fleet")
        said = (folder.root / "running.json").read_bytes()
    with closed() as nowhere:
        folder.write_secret(folder.root / "running.json", said)  # as a process that hangs leaves it: this one lives
        folder.keep_peers([nowhere])
        findings = await found(tmp_path, "a", monkeypatch)
        assert problems(findings) == [("node", "a")]
        assert of(findings, "port.grpc", Level.NOTE)[0].subject == nowhere


def test_the_wrong_network_card_is_named() -> None:
    cards = {"192.168.1.5": "eth0", "10.0.0.5": "wg0", "172.17.0.1": "docker0", "127.0.0.1": "lo"}
    card = NodeCard(NodeId("b"), 1, ("192.168.1.9:8154", "172.17.0.1:8154"), b"", 120, 0, models=(MODEL,))
    member = TestFleet().member("b").member
    good = Reach("10.0.0.9:8154", "10.0.0.5", member=member, card=card, setting=OWN)
    lost = Reach("192.168.1.9:8154", "192.168.1.5", Barrier.SILENT, "nothing came back within 5 s")
    here = OwnSide(("192.168.1.5",), cards, OWN, replace(card, models=(replace(MODEL, numerics_id="two"),)))
    findings = list(judge_node(NodeId("b"), card, [lost, good], here))
    (wrong,) = of(findings, "network card", Level.PROBLEM)
    assert "reached over wg0 (10.0.0.5), and this machine announces 192.168.1.5 on another network card" in wrong.what
    assert "--fleet-host 10.0.0.5" in wrong.todo
    (idle,) = of(findings, "network card", Level.NOTE)
    assert "announces 192.168.1.9:8154, and is not reached there" in idle.what
    assert "--fleet-host 10.0.0.9" in idle.todo
    assert "other bytes" in of(findings, "kernels", Level.NOTE)[0].what
    # It announces what leads to others, and more.
    several = replace(here, announced=("192.168.1.5", "10.0.0.5", "172.17.0.1"))
    assert of(list(judge_node(NodeId("b"), card, [good], several)), "network card", Level.PROBLEM) == []
    (more,) = judge_own(several, [good])
    assert "announces 172.17.0.1 (docker0), 192.168.1.5 (eth0) too" in more.what
    assert more.todo.endswith("paceline up --fleet-host 10.0.0.5")
    assert list(judge_own(replace(here, announced=("10.0.0.5",)), [good])) == []


def test_kernels_that_compute_otherwise_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home.from_environment()
    monkeypatch.setattr(doctor.cpu, "compiled", lambda _: True)
    assert doctor._kernels(home, "here").level is Level.OK
    monkeypatch.setattr(probe, "numerics_id", lambda *_: "0" * 16)
    wrong = doctor._kernels(home, "here")
    assert wrong.level is Level.PROBLEM
    assert "other bytes" in wrong.what
    assert "--device torch-cpu" in wrong.todo


@pytest.mark.parametrize(
    ("said", "level"),
    [
        ("enabled", Level.OK),
        ("RDMA is Enabled.", Level.OK),
        ("disabled", Level.NOTE),
        ("RDMA is not enabled", Level.NOTE),
        ("rdma isn't enabled", Level.NOTE),
        ("enabled: no", Level.NOTE),
        ("enabled = false", Level.NOTE),
        ("", Level.NOTE),
    ],
)
def test_rdma_counts_as_enabled_only_if_the_mac_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, level: Level) -> None:
    program = tmp_path / "rdma_ctl"
    program.write_text(f'#!/bin/sh\necho "{said}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor.platform, "mac_ver", lambda: ("26.2", ("", "", ""), ""))
    assert doctor._rdma("here").level is level


def test_little_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(doctor, "_kernels", lambda *_: Finding("kernels", Level.OK, "here", ""))
    monkeypatch.setattr(doctor, "LEAST_DISK", 1 << 60)
    assert {check for check, _ in problems(list(doctor._machine(Home.from_environment())))} == {"memory", "disk"}


def test_a_config_that_up_would_refuse_is_named_and_one_that_is_missing_is_fine(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert list(doctor._settings(home)) == []
    (tmp_path / "config.toml").write_text("[kv]\nrole = 'everything'\n")
    (wrong,) = doctor._settings(home)
    assert (wrong.check, wrong.level, wrong.subject) == ("config", Level.PROBLEM, str(tmp_path / "config.toml"))
    assert wrong.what == "[kv] role can't be 'everything'"
    assert '"prefill"' in wrong.todo


class Versioned(Still):
    """A portrait of another version's node."""

    def __init__(self, software: str) -> None:
        super().__init__()
        self._software = software

    def card(self, *args: object) -> NodeCard:
        return replace(super().card(*args), software=self._software)  # type: ignore[arg-type]


def _facts_of_another_arithmetic(clock: SystemClock, port: int) -> object:
    facts = reach.own_facts(clock, port)
    facts.arithmetic = 99
    return facts


@contextmanager
def closed() -> Iterator[str]:
    """An address where connections are refused, and stay so."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def _speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()
    writer.close()
