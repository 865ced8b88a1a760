"""Models from one node to another: real sockets, real mTLS, real files, a real process that is killed."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.machine.weights.nodes import Fleet, cause_of, lying_about, staged_files
from tests.unit.net.member.nodes import in_loop

from paceline.core.errors import ConfigError, DownloadError, FetchInProgress, ModelFileError, ModelNotFound, SourceLost, WrongBytes
from paceline.core.manifest import PIECE, ModelManifest, PieceRun
from paceline.fleet.placement import WeightsSource
from paceline.machine.fetch import fetch_model
from paceline.store import pull as pulling
from paceline.store.catalog import MANIFEST, Library, list_models, open_model, resolve
from paceline.store.home import Home, read_json_object
from paceline.store.partial import list_parts
from paceline.store.staging import Staging

ROOT = Path(__file__).parents[4]
Homes = Callable[[str], Home]
Given = tuple[Home, str]


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST}


@in_loop
async def test_a_model_comes_whole_and_is_listed_like_a_pulled_one(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as node:
        model = await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
        assert (model.name, model.digest, model.problem) == ("sharded", digest, None)
        assert await fetch_model(fleet.fetch(taker, node.source(digest, "sharded"))) == model
        n_pieces = len(node.library.reads)
    made = resolve("sharded", home).path
    assert folder_bytes(taker.models / "sharded") == folder_bytes(made)
    assert open_model("sharded", taker).weights.digest == digest
    assert n_pieces == sum(-(-file.stat().st_size // PIECE) for file in made.iterdir())
    assert [path.name for path in taker.partial.iterdir()] == []
    done = [here for here, _ in fleet.seen]
    assert done == sorted(done)
    assert done[-1] == fleet.seen[-1][1] == sum(file.stat().st_size for file in made.iterdir())
    assert fleet.announced == ["sharded comes from giver-1"]


@in_loop
async def test_what_was_fetched_can_be_given_on_without_being_read_first(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    async with fleet.node(home) as node:
        await fetch_model(fleet.fetch(new_home("second"), node.source(digest, "sharded")))
    async with fleet.node(new_home("second"), "giver-2") as node:
        await fetch_model(fleet.fetch(new_home("third"), node.source(digest, "sharded")))
    assert folder_bytes(new_home("third").models / "sharded") == folder_bytes(resolve("sharded", home).path)


@in_loop
async def test_the_bundled_model_comes_to_who_has_none(
    fleet: Fleet, bundled: Given, bundled_gguf: Path, new_home: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, digest = bundled
    taker = new_home("taker")
    async with fleet.node(home) as node:
        # The giver's description is made before the package goes missing for everybody.
        await fetch_model(fleet.fetch(home, node.source(digest, "smollm2-135m")))
        node.library.describe(digest, lambda done, total: None)
        monkeypatch.setattr("paceline.store.catalog._BUNDLED_PACKAGE", "llm_not_there")
        model = await fetch_model(fleet.fetch(taker, node.source(digest, "smollm2-135m")))
    assert (model.name, model.digest) == ("smollm2-135m", digest)
    assert open_model("smollm2", taker).weights.digest == digest
    with (taker.models / "smollm2-135m" / bundled_gguf.name).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == digest


@pytest.mark.parametrize("pieces", [0, 1, 5, 13])
@in_loop
async def test_a_fetch_that_was_killed_goes_on(fleet: Fleet, sharded: Given, new_home: Homes, tmp_path: Path, pieces: int) -> None:
    home, digest = sharded
    taker = new_home("taker")
    identity = tmp_path / "identity.pem"
    identity.write_bytes(fleet.trust.member("taker-2").to_pem())
    async with fleet.node(home) as node:
        command = [
            sys.executable,
            "-m",
            "tests.unit.machine.weights.child",
            str(identity),
            node.address,
            digest,
            "sharded",
            str(taker.root),
        ]
        child = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT)

        def kill(count: int) -> None:
            if count == pieces:
                child.kill()
                child.wait()

        node.library.before_read = kill
        try:
            assert await asyncio.to_thread(child.wait, 60) == -signal.SIGKILL
        finally:
            child.kill()
        assert [model.name for model in list_models(taker)][1:] == []
        assert list_parts(taker) == []
        here = pieces_here(taker, resolve("sharded", home).path)
        node.library.before_read = lambda count: None
        node.library.reads.clear()
        await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
        again = len(node.library.reads)
    made = resolve("sharded", home).path
    assert folder_bytes(taker.models / "sharded") == folder_bytes(made)
    # Nothing came twice, nothing was left out.
    assert again + here == sum(-(-file.stat().st_size // PIECE) for file in made.iterdir())


def pieces_here(taker: Home, made: Path) -> int:
    """How many pieces of staged files are what they should be."""
    here = 0
    for file in staged_files(taker):
        ours, theirs = file.read_bytes(), (made / file.name).read_bytes()
        here += sum(ours[at : at + PIECE] == theirs[at : at + PIECE] for at in range(0, len(theirs), PIECE))
    return here


@in_loop
async def test_another_node_goes_on_where_one_died(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as first, fleet.node(home, "giver-2") as second:
        first.dies_after(8)
        await fetch_model(fleet.fetch(taker, first.source(digest, "sharded"), second.source(digest, "sharded")))
        assert len(second.library.reads) > 0
    assert folder_bytes(taker.models / "sharded") == folder_bytes(resolve("sharded", home).path)
    assert any(words.startswith("giver-1 did not go on") for words in fleet.announced)
    assert fleet.announced[-1] == "sharded comes from giver-2"


@in_loop
async def test_with_no_other_node_it_is_said_and_what_came_is_kept(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as node:
        node.dies_after(12)
        with pytest.raises(DownloadError, match=r"no node of the fleet could give all of sharded \(giver-1: giver-1 can't give") as caught:
            await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
    assert cause_of(caught.value) is SourceLost
    assert "kept" in caught.value.hint
    assert staged_files(taker)
    assert len(list_models(taker)) == 1


@in_loop
async def test_a_damaged_piece_is_refused_and_another_node_asked(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")

    def damaged(place: tuple[int, int], data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if place == (1, 2) else data

    async with fleet.node(home) as first, fleet.node(home, "giver-2") as second:
        first.library.change = damaged
        with pytest.raises(DownloadError, match=r"piece 2 of .* another checksum") as caught:
            await fetch_model(fleet.fetch(taker, first.source(digest, "sharded")))
        assert cause_of(caught.value) is WrongBytes
        assert len(list_models(taker)) == 1
        second.library.reads.clear()
        await fetch_model(fleet.fetch(taker, first.source(digest, "sharded"), second.source(digest, "sharded")))
        assert (1, 2) in second.library.reads
        assert (0, 0) not in second.library.reads
    assert folder_bytes(taker.models / "sharded") == folder_bytes(resolve("sharded", home).path)


@in_loop
async def test_a_file_that_is_another_than_its_digest_says_is_removed(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    """The node's pieces fit its description, and the whole does not fit the digest."""
    home, digest = sharded
    taker = new_home("taker")
    other = bytes(PIECE)

    def lie(manifest: ModelManifest) -> ModelManifest:
        return lying_about(manifest, pieces=hashlib.sha256(other).digest() + manifest.files[0].pieces[32:])

    async with fleet.node(home) as first, fleet.node(home, "giver-2") as second:
        first.library.describe_as = lie
        first.library.change = lambda place, data: other if place == (0, 0) else data
        with pytest.raises(DownloadError, match="was promised") as caught:
            await fetch_model(fleet.fetch(taker, first.source(digest, "sharded")))
        assert cause_of(caught.value) is WrongBytes
        assert len(staged_files(taker)) == len(list(resolve("sharded", home).path.iterdir())) - 1
        assert len(list_models(taker)) == 1
        await fetch_model(fleet.fetch(taker, second.source(digest, "sharded")))
        assert {file for file, _ in second.library.reads} == {0}
    assert folder_bytes(taker.models / "sharded") == folder_bytes(resolve("sharded", home).path)


def new_files(folder: Path, part: str) -> list[Path]:
    return [path for path in folder.iterdir() if part in path.name]


@pytest.mark.parametrize("name", ["../../escape.gguf", "/tmp/escape.gguf", "a/../../escape.gguf", "part.json", "evil.py", "C:\\x.gguf"])
@in_loop
async def test_names_that_no_model_file_has_are_never_written(
    fleet: Fleet, sharded: Given, new_home: Homes, tmp_path: Path, name: str
) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as node:
        node.library.describe_as = lambda manifest: lying_about(manifest, name=name)
        with pytest.raises(DownloadError, match="not one of a model's"):
            await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
        assert node.library.reads == []
    assert not taker.root.exists()
    assert not list(new_files(tmp_path, "escape")) + list(new_files(Path("/tmp"), "escape"))


@in_loop
async def test_another_model_than_the_one_asked_for_is_refused_before_it_comes(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    async with fleet.node(home) as node:
        node.library.describe_as = lambda manifest: lying_about(manifest, sha256="0" * 64)
        with pytest.raises(DownloadError, match="not those of the model"):
            await fetch_model(fleet.fetch(new_home("taker"), node.source(digest, "sharded")))
        node.library.describe_as = lambda manifest: lying_about(manifest, in_digest=False)
        with pytest.raises(DownloadError, match="out of the digest"):
            await fetch_model(fleet.fetch(new_home("taker"), node.source(digest, "sharded")))
        assert node.library.reads == []


@pytest.mark.parametrize("name", ["../up", "a/../../b", ".hidden", "x" * 300, "a:b/c\0"])
@in_loop
async def test_names_that_no_model_can_have_are_refused(fleet: Fleet, sharded: Given, new_home: Homes, name: str) -> None:
    home, digest = sharded
    async with fleet.node(home) as node:
        with pytest.raises(ConfigError, match="can't be a model's name"):
            await fetch_model(fleet.fetch(new_home("taker"), node.source(digest, name.replace(":", "\0"))))
    assert not new_home("taker").root.exists()


@in_loop
async def test_two_fetches_of_one_model_don_t_mix(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as node:
        fetches = [fetch_model(fleet.fetch(taker, node.source(digest, "sharded"))) for _ in range(2)]
        done = await asyncio.gather(*fetches, return_exceptions=True)
    assert sorted(type(result).__name__ for result in done) == ["FetchInProgress", "LocalModel"]
    assert any(isinstance(result, FetchInProgress) for result in done)
    assert folder_bytes(taker.models / "sharded") == folder_bytes(resolve("sharded", home).path)


@in_loop
async def test_a_full_disk_is_said_and_keeps_what_came(
    fleet: Fleet, sharded: Given, new_home: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, digest = sharded
    taker = new_home("taker")
    written: list[int] = []
    write = Staging.write

    def full(self: Staging, file: int, piece: int, data: bytes) -> None:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(piece)
        write(self, file, piece, data)

    async with fleet.node(home) as node:
        with monkeypatch.context() as patched:
            patched.setattr(Staging, "write", full)
            with pytest.raises(DownloadError, match="the disk is full") as caught:
                await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
        assert "Free some space" in caught.value.hint
        node.library.reads.clear()
        await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
        assert not {(0, 0), (0, 1), (0, 2)} & set(node.library.reads)


@in_loop
async def test_a_disk_too_small_is_found_out_first(fleet: Fleet, sharded: Given, new_home: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    home, digest = sharded
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 << 20}))
    async with fleet.node(home) as node:
        with pytest.raises(DownloadError, match=r"needs 1\d MiB more and .* has 5 MiB free"):
            await fetch_model(fleet.fetch(new_home("taker"), node.source(digest, "sharded")))
        assert node.library.reads == []


@in_loop
async def test_a_cancelled_fetch_leaves_nothing_running_and_goes_on(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as node:
        task = asyncio.create_task(fetch_model(fleet.fetch(taker, node.source(digest, "sharded"))))
        loop = asyncio.get_running_loop()
        node.library.before_read = lambda count: loop.call_soon_threadsafe(task.cancel) if count == 6 else None  # type: ignore[assignment]
        with pytest.raises(asyncio.CancelledError):
            await task
        node.library.before_read = lambda count: None
        assert (await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))).digest == digest


@in_loop
async def test_nodes_that_don_t_answer_or_have_nothing_are_passed_over(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    async with fleet.node(home, "busy-1", streams=0) as busy, fleet.node(new_home("empty"), "empty-1") as empty, fleet.node(home) as node:
        nowhere = WeightsSource(node.source(digest, "sharded").node_id, ("127.0.0.1:1", node.address), "sharded", digest, 1)
        sources = [busy.source(digest, "sharded"), empty.source(digest, "sharded"), nowhere]
        assert (await fetch_model(fleet.fetch(new_home("taker"), *sources))).digest == digest
    assert fleet.announced[0] == "busy-1 did not go on: busy-1 can't give the weights: it gives weights to as many others as it will"
    assert fleet.announced[1] == "empty-1 did not go on: empty-1 can't give the weights: it does not have this model"


@in_loop
async def test_a_model_that_runs_from_a_file_of_ones_own_is_given_too(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    location = resolve("sharded", home)
    elsewhere = new_home("elsewhere")
    assert open_model(str(location.path), elsewhere).location == location
    assert open_model(str(location.path), elsewhere).weights.digest == digest
    with pytest.raises(ModelNotFound):
        Library(elsewhere).describe(digest, lambda done, total: None)
    manifest = Library(elsewhere, [location]).describe(digest, lambda done, total: None)
    assert manifest == Library(home).describe(digest, lambda done, total: None)
    # Beside the one that runs nothing else becomes reachable.
    with pytest.raises(ModelNotFound):
        Library(elsewhere, [location]).describe("0" * 64, lambda done, total: None)


@in_loop
async def test_what_keeps_failing_alike_is_said_once(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    _, digest = sharded
    async with fleet.node(new_home("empty"), "empty-1") as empty:
        with pytest.raises(DownloadError):
            await fetch_model(fleet.fetch(new_home("taker"), empty.source(digest, "sharded")))
    assert fleet.announced == ["empty-1 did not go on: empty-1 can't give the weights: it does not have this model"]


@in_loop
async def test_a_stranger_gets_nothing(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    async with fleet.node(home) as node:
        with pytest.raises(DownloadError, match="UNAVAILABLE"):
            await fetch_model(Fleet().fetch(new_home("taker"), node.source(digest, "sharded")))


@in_loop
async def test_a_file_that_changes_while_it_is_given_is_not_mixed(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    first = min(resolve("sharded", home).path.glob("*.safetensors"))
    async with fleet.node(home) as node:
        node.library.before_read = lambda count: os.utime(first, ns=(1, 1)) if count == 3 else None
        with pytest.raises(DownloadError):
            await fetch_model(fleet.fetch(new_home("taker"), node.source(digest, "sharded")))
    assert fleet.announced[1] == "giver-1 did not go on: giver-1 can't give the weights: its file of the model changed"


@in_loop
async def test_what_came_and_can_not_run_is_not_listed(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    """A tokenizer is not in the digest: that it can't be read shows when the model is opened."""
    home, digest = sharded
    taker = new_home("taker")
    (resolve("sharded", home).path / "tokenizer.json").write_text("{}")
    async with fleet.node(home) as node:
        with pytest.raises(ModelFileError, match="not a tokenizer"):
            await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
    assert len(list_models(taker)) == 1


@in_loop
async def test_a_name_that_a_registered_model_has_is_not_taken_over(fleet: Fleet, sharded: Given, new_home: Homes, tmp_path: Path) -> None:
    home, digest = sharded
    taker = new_home("taker")
    (taker.models / "sharded").mkdir(parents=True)
    (taker.models / "sharded" / MANIFEST).write_text('{"path": "/somewhere/else"}')
    async with fleet.node(home) as node:
        with pytest.raises(ConfigError, match="taken by /somewhere/else"):
            await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
    assert read_json_object(taker.models / "sharded" / MANIFEST) == {"path": "/somewhere/else"}


@in_loop
async def test_a_link_in_the_staging_folder_leads_nowhere(fleet: Fleet, sharded: Given, new_home: Homes, tmp_path: Path) -> None:
    home, digest = sharded
    taker, precious = new_home("taker"), tmp_path / "precious"
    precious.write_text("mine")
    async with fleet.node(home) as node:
        name = node.library.describe(digest, lambda *_: None).files[0].name
        (taker.partial / digest).mkdir(parents=True)
        (taker.partial / digest / name).symlink_to(precious)
        with pytest.raises(DownloadError):
            await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
    assert precious.read_text() == "mine"


@in_loop
async def test_a_size_that_no_disk_has_makes_no_file(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    async with fleet.node(home) as node:
        true = node.library.describe(digest, lambda *_: None)
        size = 100 << 40
        staging = Staging("sharded", lying_about(true, size=size), taker, taker.partial / digest, None, {})
        with pytest.raises(DownloadError, match="MiB free"):
            staging.missing([PieceRun(0, 0, -(-size // PIECE))], lambda _: None)
    assert staged_files(taker) == []
