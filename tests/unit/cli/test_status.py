"""`paceline status` shows what other machines say of themselves, as text and as nothing else."""

from __future__ import annotations

import asyncio
import io
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.fakes.fleets import TestFleet
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served
from tests.unit.net.member.nodes import in_loop, make_node, running

from paceline.cli import chat, doctor, status
from paceline.cli.doctor import Level
from paceline.cli.fleet_status import show
from paceline.cli.plan import fleet_view
from paceline.cli.running import EndpointLoad, KvDiskLoad, KvPeerLoad, announced, endpoints_here, show_endpoints, starting
from paceline.cli.running import running as running_here
from paceline.cli.status import run_status
from paceline.core.clock import SystemClock
from paceline.core.errors import MembershipError
from paceline.core.ids import NodeId, Trust
from paceline.core.inference import Progress
from paceline.core.model import LayerRange
from paceline.core.stats import DraftUse
from paceline.fleet.card import Device, ModelOffer, NodeCard, Role, ShardState
from paceline.fleet.eligibility import Clash, FleetView, LiveCard
from paceline.machine.settings import NodeSettings
from paceline.net.discovery import AddressBook
from paceline.net.member.state import Looked, Sight
from paceline.net.protocol import OtherVersion
from paceline.net.trust.folder import FleetFolder
from paceline.store.home import Home


def test_nothing_a_member_says_is_taken_for_markup_or_commands_the_terminal() -> None:
    offer = ModelOffer("[/red]", Role.VERIFIER, "[int4]", warm=True)
    shard = ModelOffer("m", Role.SHARD, "int8", warm=True, shard=ShardState(LayerRange(3, 14), 4, 1))
    addresses = ("[fd00::1]:8154", "[::1]:8154")
    card = NodeCard(NodeId("b"), 1, addresses, b"i", 120, 0, backend="[/]", models=(offer, shard))
    book = AddressBook()
    book.failed("[fd00::2]:8154", "b refused: \x1b]0;pwned\x07\nb: all is well", 0.0)
    clash = Clash(NodeId("b"), ("[fd00::3]:1",), ("[fd00::4]:1",), 1.0)
    sight = Sight(
        FleetView(NodeId("a"), (LiveCard(card, 1.0, 0, Trust.GUEST),), (clash,), ()),
        book.failures,
        0,
        other_versions=(OtherVersion(NodeId("c"), 1, 2), OtherVersion(NodeId("d"), 3, 2)),
    )
    console = Console(file=io.StringIO(), width=200)
    show(Looked("f" * 16, sight), console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for part in (
        *addresses,
        "guest",
        "[/red] ([int4])",
        "b: m layers 3 to 13 (int8, 1 of 4 streams)",
        "[fd00::2]:8154",
        "[fd00::3]:1, there at [fd00::4]:1",
        "c speaks protocol version 1, and this machine version 2",
        "Update Paceline on c",
        "d speaks protocol version 3, and this machine version 2",
        "Update Paceline on this machine",
        "?]0;pwned??b: all is well",
    ):
        assert part in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("line", "is_named"),
    [("a [0..15] -> b.2 [16..31]: 10 tokens/s", True), ("a, drafting: b.2", True), ("a -> b.22 [3..4]", False), ("my-b.2 -> a", False)],
)
def test_a_running_plan_names_its_machines_that_do_not_answer(line: str, *, is_named: bool) -> None:
    cards = [NodeCard(NodeId(name), 1, (f"{name}:1",), b"i", 120, 0) for name in ("a", "b.2")]
    book = AddressBook()
    book.failed("b.2:1", "no answer", 0.0)
    view = FleetView(NodeId("a"), tuple(LiveCard(card, 1.0, 0, Trust.MEMBER) for card in cards), (), ())
    console = Console(file=io.StringIO(), width=200)
    show(Looked("f" * 16, Sight(view, book.failures, 0, plans=(("m", line),))), console)
    assert isinstance(console.file, io.StringIO)
    (shown,) = [each for each in console.file.getvalue().splitlines() if "runs here as planned" in each]
    assert ("b.2 does not answer now" in shown) == is_named


def test_each_device_of_a_node_is_shown_with_its_memory() -> None:
    processors = Device("cpu-avx512bf16", "some processor", 64 << 30, 48 << 30, 0, weights=("stored",))
    card = NodeCard(
        NodeId("b"),
        1,
        ("b:1",),
        b"i",
        120,
        0,
        backend="torch-cuda",
        memory_total_bytes=8 << 30,
        memory_free_bytes=7 << 30,
        devices=(processors,),
        ring_address="mac.local:1",
    )
    console = Console(file=io.StringIO(), width=200)
    show(Looked("f" * 16, Sight(FleetView(NodeId("b"), (LiveCard(card, 0.0, 0, Trust.MEMBER),), (), ()), (), 0)), console)
    assert isinstance(console.file, io.StringIO)
    gpu, other = (line for line in console.file.getvalue().splitlines() if " of " in line)
    assert "torch-cuda" in gpu
    assert "7.0 GiB of 8.0 GiB" in gpu
    assert "cpu-avx512bf16" in other
    assert "48.0 GiB of 64.0 GiB" in other
    assert "MLX ring, mac.local:1" in console.file.getvalue()


def test_two_files_under_one_name_are_shown() -> None:
    offer = ModelOffer("m", Role.VERIFIER, "int4", digest="1" * 64)
    offers = {"a": offer, "b": replace(offer, digest="2" * 64)}
    cards = [NodeCard(NodeId(name), 1, (f"{name}:1",), b"i", 120, 0, models=(one,)) for name, one in offers.items()]
    view = FleetView(NodeId("a"), tuple(LiveCard(card, 0.0, 0, Trust.MEMBER) for card in cards), (), ())
    console = Console(file=io.StringIO(), width=200)
    show(Looked("f" * 16, Sight(view, (), 0)), console)
    assert isinstance(console.file, io.StringIO)
    (shown,) = (line for line in console.file.getvalue().splitlines() if "1" * 12 in line)
    assert "m" in shown
    assert "2" * 12 in shown


def test_drafts_are_shown_with_what_came_of_them() -> None:
    proposer = ModelOffer("small", Role.PROPOSER, "int4", 120.0, warm=True)
    card = NodeCard(NodeId("b"), 1, ("b:1",), b"i", 120, 0, models=(proposer,))
    view = FleetView(NodeId("a"), (LiveCard(card, 1.0, 0, Trust.MEMBER),), (), ())
    used = DraftUse("ngram", drafts=20, drafted_tokens=100, accepted_tokens=50)
    asked = DraftUse("fleet", 4, 16, 4, "b", "small", blocks=9, hop_s=0.0123, failures=2)
    lost = DraftUse("gone", trouble="No node in the fleet drafts with 'gone'")
    console = Console(file=io.StringIO(), width=200)
    show(Looked("f" * 16, Sight(view, (), 0, (used, asked, lost))), console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for part in (
        "drafts with small (int4, 120 tokens/s)",
        "drafts here, ngram: 50% right, 2.5 tokens a draft, 50 steps saved\n",
        "drafts here, small on b: 25% right, 1.0 tokens a draft, 4 steps saved; 9 blocks asked for, 12 ms from ask to answer; 2 failed",
        "drafts here, gone: none verified yet; no drafts at present: No node in the fleet drafts with 'gone'",
    ):
        assert part in shown


@pytest.mark.parametrize("models", [(), (ModelOffer("small", Role.PROPOSER, "int4", warm=True),)])
def test_that_nobody_drafts_is_said_where_somebody_could(models: tuple[ModelOffer, ...]) -> None:
    card = NodeCard(NodeId("b"), 1, ("b:1",), b"i", 120, 0, models=models)
    view = FleetView(NodeId("b"), (LiveCard(card, 0.0, 0, Trust.MEMBER),), (), ())
    console = Console(file=io.StringIO(), width=200)
    show(Looked("f" * 16, Sight(view, (), 0, (DraftUse("fleet", trouble="No node's drafts would save time"),))), console)
    assert isinstance(console.file, io.StringIO)
    assert ("No node's drafts would save time" in console.file.getvalue()) == bool(models)


def shown_of(*endpoints: EndpointLoad) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    show_endpoints(list(endpoints), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_an_endpoint_is_shown_whole_on_a_narrow_terminal() -> None:
    names = ("smollm2-135m", "an-alias-that-is-as-long-as-some-models-names-are")
    figures: dict[str, Any] = {
        "client_tokens_per_s": 81.6,
        "running": 4,
        "waiting": 0,
        "tokens_per_s": 90.0,
        "kv_used": 0.12,
        "memory_bytes": 632 << 20,
    }
    assert shown_of(EndpointLoad("http://127.0.0.1:24910", 1, "ok", names, 1, **figures)) == [
        f"http://127.0.0.1:24910/v1: ok, serves {', '.join(names)}",
        "  its clients: 1 request under way, 82 tokens/s",
        "  this process: 4 running, 0 waiting, 90 tokens/s, 12% of KV in use, 632 MiB",
    ]


def test_kv_on_the_disk_is_shown_where_there_is_some() -> None:
    disk = KvDiskLoad(3 << 30, 512, 7, 900, failed=1, evicted=20, read_per_s=128.4, written_per_s=0.0)
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), kv_disk=disk))[-1] == (
        "  KV on the disk: 3.0 GiB; blocks: 512 read (128/s), 7 missed, 900 written, 1 failed, 20 evicted"
    )


def test_kv_of_other_machines_is_shown_where_some_came_or_went() -> None:
    peers = KvPeerLoad(512, 7, 30, fetched_per_s=64.2)
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), kv_peers=peers))[-1] == (
        "  KV of other machines: blocks: 512 fetched (64/s), 7 missed, 30 given"
    )
    pushed = KvPeerLoad(0, 0, 2, pushed=40, nixl_bytes=3 << 20)
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), kv_peers=pushed))[-1] == (
        "  KV of other machines: blocks: 0 fetched, 40 computed there, 0 missed, 2 given; 3 MiB came by NIXL"
    )
    lost = KvPeerLoad(0, 3, 0, pushed=40, pushed_per_s=8.0, leases=1, failed={"silent": 2, "watchdog": 1})
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), kv_peers=lost))[-1] == (
        "  KV of other machines: blocks: 0 fetched, 40 computed there (8/s), 3 missed, 0 given; 1 prompt computed here for others now; "
        "prompts not whole: 2 silent, 1 watchdog"
    )
    wrong = KvPeerLoad(30, 0, 0, liars=("p", "q"))
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), kv_peers=wrong))[-1] == (
        "  KV of other machines: blocks: 30 fetched, 0 missed, 0 given; WRONG KV CAME FROM p, q: left out for an hour"
    )


def test_an_endpoint_that_serves_no_model_is_not_said_to_ask_for_a_key() -> None:
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok", ())) == ["http://127.0.0.1:1/v1: ok, serves no model now"]
    assert "asks for a key" in shown_of(EndpointLoad("http://127.0.0.1:1", 1, "ok"))[0]
    assert shown_of(EndpointLoad("http://127.0.0.1:1", 1, "gone")) == ["http://127.0.0.1:1/v1: gone"]


@in_loop
async def test_nodes_that_are_tried_here_are_shown_in_a_fleet_or_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, mine, tried = TestFleet(), tmp_path / "mine", tmp_path / "local-1"
    node, served = make_node(fleet, tmp_path, "local-1"), Served(ScriptedInference())
    (mine / "running").mkdir(parents=True)
    (tried / "running").symlink_to(mine / "running")
    look = partial(asyncio.to_thread, partial(run_status, as_json=False, watch=False))
    try:
        async with running(node):
            monkeypatch.setenv("PACELINE_HOME", str(tried))
            with announced(served.url, has_key=False, certificate=None, owner_key=None):
                monkeypatch.setenv("PACELINE_HOME", str(mine))
                await look()
                assert "seen by local-1" in capsys.readouterr().out
                view, _, _, _ = await asyncio.to_thread(fleet_view)
                assert view is not None
                assert [card.node_id for card in view()] == ["local-1"]
                first, second, *_ = [each async for each in doctor._fleet(Home(mine), (), SystemClock())]
                assert "in no fleet; what follows is of the nodes that paceline up --local-nodes runs" in first.what
                assert (second.subject, second.what) == ("local-1", "no other machine is known here")
                folder = FleetFolder(Home(mine).fleet)
                folder.write_secret(folder.identity_file, fleet.member("desk").to_pem())
                await look()
                assert "seen by local-1" in capsys.readouterr().out
        assert await asyncio.to_thread(fleet_view) == (None, None, (), {})
        assert "(desk) does not run, so this is about this machine alone" in capsys.readouterr().err
        with announced(served.url, has_key=False, certificate=None, owner_key=None):
            with pytest.raises(MembershipError, match="desk"):
                await look()
            assert served.url in capsys.readouterr().out, "what runs is shown all the same"
    finally:
        served.close()


def test_what_keeps_failing_is_shown_by_status_and_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    inference = ScriptedInference()
    inference.reported = Progress(busy=False, seconds_since_step=0.0, failing=("fleet-links", "no mDNS on this machine"))
    served = Served(inference)
    try:
        with announced(served.url, has_key=False, certificate=None, owner_key=None):
            (seen,) = endpoints_here(Home(tmp_path))
            found = {each.what: each.level for each in doctor._apis([seen]) if each.check == "background"}
    finally:
        served.close()
    assert seen.state == "ok"
    assert shown_of(seen)[-1] == "  keeps failing: fleet-links; no mDNS on this machine"
    assert found == {f"it keeps failing: {what}": Level.NOTE for what in seen.failing}


def test_what_is_wrong_is_said_once_and_not_as_what_keeps_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    inference = ScriptedInference()
    inference.reported = Progress(busy=False, seconds_since_step=0.0, error="RuntimeError: the kernels burn")
    served = Served(inference)
    try:
        with announced(served.url, has_key=False, certificate=None, owner_key=None):
            (seen,) = endpoints_here(Home(tmp_path))
            found = [each for each in doctor._apis([seen]) if each.check != "port.api" or each.level is not Level.OK]
    finally:
        served.close()
    assert (seen.state, seen.error, seen.failing) == ("failed", "RuntimeError: the kernels burn", ())
    shown = shown_of(seen)
    assert shown[0].startswith(f"{served.url}/v1: failed (RuntimeError: the kernels burn), serves")
    assert "keeps failing" not in " ".join(shown)
    assert [each.what for each in found] == ["/health says failed: RuntimeError: the kernels burn"]


def test_in_no_fleet_endpoints_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(status, "WATCH_S", 0.0)
    seen = iter([EndpointLoad("http://127.0.0.1:1", 1, state, ("m",)) for state in ("ok", "ok", "stopping")])

    def endpoints(_: Home) -> list[EndpointLoad]:
        try:
            return [next(seen)]
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(status, "endpoints_here", endpoints)
    with pytest.raises(KeyboardInterrupt):
        run_status(as_json=False, watch=True)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("http")]
    assert shown == ["http://127.0.0.1:1/v1: ok, serves m", "http://127.0.0.1:1/v1: stopping, serves m"]


def test_an_endpoint_that_starts_is_shown_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    home, served, notes = Home(tmp_path), Served(ScriptedInference()), ExitStack()
    note = partial(announced, served.url, has_key=False, certificate=None, owner_key=None)
    try:
        with note(is_ready=False):
            assert ([one.url for one in starting(home)], running_here(home)) == ([served.url], [])
            assert shown_of(*endpoints_here(home)) == [f"{served.url}/v1: starting"]
            stale = (tmp_path / "running" / f"{os.getpid()}.json").read_bytes()

            def starts(_: float) -> None:
                notes.enter_context(note())

            monkeypatch.setattr(chat, "time", SimpleNamespace(sleep=starts))
            found = chat._endpoint_here(NodeSettings(max_running=1), None, None)
            assert found is not None
            assert found.url == served.url
            assert "starts on this machine: it is waited for" in capsys.readouterr().err
        notes.close()
        # What another process left, whose number this one has.
        (tmp_path / "running" / f"{os.getpid()}.json").write_bytes(stale)
        assert (starting(home), running_here(home)) == ([], [])
    finally:
        served.close()


@pytest.mark.parametrize(
    ("read", "tokens", "said"), [(512, 8000, "512 of 8000 prompt tokens read"), (0, 9, "0 of 9 prompt tokens read"), (0, 0, None)]
)
def test_an_endpoint_s_load_says_how_far_prompts_are_read(read: int, tokens: int, said: str | None) -> None:
    shown = shown_of(
        EndpointLoad("http://127.0.0.1:1", 1, "ok", ("m",), running=1, waiting=0, reading_tokens_read=read, reading_tokens=tokens)
    )
    assert any((said or "prompt tokens") in line for line in shown) == (said is not None)
