"""`paceline pull` on a member of a fleet: a real process finds who has the model, and fetches it."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console
from tests.unit.machine.weights.members import belongs, member
from tests.unit.machine.weights.nodes import Fleet
from tests.unit.net.member.nodes import in_loop

from paceline.cli.models import ensure, run_pull
from paceline.core.errors import DownloadError, ModelNotFound
from paceline.fleet.card import ModelOffer, Role
from paceline.machine.weights import pull_from_fleet
from paceline.net.trust.folder import FleetFolder
from paceline.store.catalog import LocalModel, open_model
from paceline.store.home import Home

Homes = Callable[[str], Home]
Given = tuple[Home, str]


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between one round of asking and the next."""
    monkeypatch.setattr("paceline.machine.fetch._WAIT_S", 0.0)


def offer(model_id: str, digest: str) -> ModelOffer:
    return ModelOffer(model_id, Role.VERIFIER, "bf16", digest=digest, size_bytes=1)


def bring(ref: str, home: Home, words: list[str]) -> LocalModel | None:
    return pull_from_fleet(ref, home, lambda done, total: None, words.append)


@in_loop
async def test_pull_asks_the_fleet_first(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with member(fleet.trust, "giver-1", home, offer("sharded", digest)) as (address, library):
        belongs(taker, fleet.trust, "taker-1", "127.0.0.1:1", address)
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "paceline", "pull", "sharded"],
            env={"PACELINE_HOME": str(taker.root), "HF_ENDPOINT": "http://127.0.0.1:1", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "sharded comes from giver-1" in done.stdout
        assert "up --model sharded" in done.stdout
        assert library.reads
    assert open_model("sharded", taker).weights.digest == digest


@in_loop
async def test_a_part_of_a_file_s_name_finds_it_and_the_same_weights_come_under_any_name(
    fleet: Fleet, sharded: Given, new_home: Homes
) -> None:
    home, digest = sharded
    taker = new_home("taker")
    offers = (offer("org/m:big-Q4_1.gguf", "1" * 64), offer("org/m:big-Q8_0.gguf", "2" * 64))
    async with member(fleet.trust, "giver-1", home, *offers, offer("sharded", digest)) as (address, _):
        belongs(taker, fleet.trust, "taker-1", address)
        words: list[str] = []
        model = await asyncio.to_thread(bring, digest[:12], taker, words)
        assert model is not None
        said = f"What sharded is, no hub says but giver-1: the digest is {digest}"
        assert (model.name, words) == ("sharded", [said, "sharded comes from giver-1"])
        with pytest.raises(ModelNotFound, match="different models called 'org/m'"):
            await asyncio.to_thread(bring, "org/m", taker, words)
        with pytest.raises(Exception, match="giver-1: giver-1 can't give the weights: it does not have this model"):
            await asyncio.to_thread(bring, "org/m:q8_0", taker, words)
        assert await asyncio.to_thread(bring, "org/m:q2_k", taker, words) is None


@in_loop
async def test_in_no_fleet_or_with_nobody_there_nothing_is_found(fleet: Fleet, new_home: Homes) -> None:
    taker = new_home("taker")
    words: list[str] = []
    assert await asyncio.to_thread(bring, "org/m", taker, words) is None
    belongs(taker, fleet.trust, "taker-1", "127.0.0.1:1")
    assert await asyncio.to_thread(bring, "org/m", taker, words) is None
    assert words == []


@in_loop
async def test_a_revoked_node_is_not_asked(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with member(fleet.trust, "giver-1", home, offer("sharded", digest)) as (address, library):
        belongs(taker, fleet.trust, "taker-1", address)
        FleetFolder(taker.fleet).keep_revocations([fleet.trust.revoke("giver-1").sealed])
        assert await asyncio.to_thread(bring, "sharded", taker, []) is None
        assert library.reads == []


@in_loop
async def test_up_brings_a_model_that_only_the_fleet_has(
    fleet: Fleet, sharded: Given, new_home: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, digest = sharded
    taker = new_home("taker")
    monkeypatch.setenv("PACELINE_HOME", str(taker.root))
    out = Console(file=io.StringIO())
    ensure("sharded", out)
    async with member(fleet.trust, "giver-1", home, offer("sharded", digest)) as (address, library):
        belongs(taker, fleet.trust, "taker-1", address)
        await asyncio.to_thread(ensure, "sharded", out)
        assert open_model("sharded", taker).weights.digest == digest
        library.reads.clear()
        await asyncio.to_thread(ensure, "sharded", out)
        assert library.reads == []


@in_loop
async def test_when_the_hub_is_silent_the_fleet_is_asked_and_that_is_said(
    fleet: Fleet, sharded: Given, new_home: Homes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, _ = sharded
    taker = new_home("taker")
    monkeypatch.setenv("PACELINE_HOME", str(taker.root))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "200")
    async with member(fleet.trust, "giver-1", home, offer("org/m", "1" * 64)) as (address, _):
        belongs(taker, fleet.trust, "taker-1", address)
        with pytest.raises(DownloadError, match="no node of the fleet could give all of org/m"):
            await asyncio.to_thread(run_pull, "org/m")
    said = capsys.readouterr().out
    assert "the hub at http://127.0.0.1:1 can't be reached" in said
    assert "The fleet is asked instead" in said
