"""Pulls over real sockets from a hub that cuts connections, ignores ranges, lies about bytes and asks for tokens."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.fakes.seeded_encoders import write_encoder

from paceline.core.errors import ConfigError, DownloadError, FetchInProgress, ModelFileError, ModelNotFound, UnsupportedModel
from paceline.core.weights import Pooling
from paceline.store import hub
from paceline.store import hub as download
from paceline.store import pull as pulling
from paceline.store.catalog import MANIFEST, list_models, open_model
from paceline.store.digests import DigestCache
from paceline.store.encoder_files import open_encoder_at
from paceline.store.home import Home
from paceline.store.pull import pull

COMMIT = "c0ffee" * 6 + "1234"


class Hub(ThreadingHTTPServer):
    """A hub with one repository. Its faults are set by the tests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        """Bytes after which each next connection for a large file is cut."""
        self.ignore_ranges = False
        self.corrupt = Counter[str]()
        """How many answers for a file carry a wrong byte."""
        self.statuses: list[int] = []
        """Statuses that the next file requests get."""
        self.extra_bytes = b""
        self.token: str | None = None
        self.listed: Any = None
        self.ranges: list[str | None] = []
        self.served = Counter[str]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listing(self) -> Any:
        if self.listed is not None:
            return self.listed
        siblings: list[dict[str, Any]] = []
        for name, data in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
            if name.endswith((".gguf", ".safetensors")):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"sha": COMMIT, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, form: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if self.server.token is not None and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.answer(401, b"")
        elif path == "/api/models/org/tiny/revision/main":
            self.answer(200, json.dumps(self.server.listing()).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self.send_file(path.removeprefix(f"/org/tiny/resolve/{COMMIT}/"))
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, name: str) -> None:
        hub = self.server
        if hub.statuses:
            self.answer(hub.statuses.pop(0), b"")
            return
        data = hub.files[name] + hub.extra_bytes
        hub.served[name] += 1
        if hub.corrupt[name] > 0:
            hub.corrupt[name] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        asked = self.headers.get("Range")
        start, status = 0, 200
        if asked is not None and not hub.ignore_ranges:
            start, status = int(asked.removeprefix("bytes=").removesuffix("-")), 206
        body = data[start:]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if name.endswith((".gguf", ".safetensors")):
            hub.ranges.append(asked)
            if hub.cuts:
                body = body[: hub.cuts.pop(0)]
                self.close_connection = True
        self.wfile.write(body)


@pytest.fixture
def server(gguf_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(hub, "token", lambda: None)
    made = Hub()
    made.files["tiny.gguf"] = gguf_model("llama", "Q4_1").write(tmp_path / "served.gguf").read_bytes()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def pull_tiny(server: Hub, home: Home, waits: list[float]) -> Any:
    def run(ref: str = "org/tiny", seen: list[tuple[int, int]] | None = None) -> Any:
        def progress(done: int, total: int) -> None:
            if seen is not None:
                seen.append((done, total))

        return pull(ref, home, progress, endpoint=server.address, sleep=waits.append)

    return run


def stored(home: Home) -> Path:
    return home.models / "org/tiny/tiny.gguf"


def parts(home: Home) -> list[Path]:
    return list((home.models / "org/tiny").glob("*.part"))


def test_a_pull_brings_checks_and_lists(server: Hub, pull_tiny: Any, home: Home) -> None:
    seen: list[tuple[int, int]] = []
    model = pull_tiny(seen=seen)
    assert (model.name, model.format, model.problem) == ("org/tiny", "GGUF Q4_1", None)
    assert stored(home).read_bytes() == server.files["tiny.gguf"]
    assert model.digest == hashlib.sha256(server.files["tiny.gguf"]).hexdigest()
    assert open_model("org/tiny", home).name == "org/tiny"
    size = len(server.files["tiny.gguf"])
    done = [here for here, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, size)
    assert {total for _, total in seen} == {size}
    assert not parts(home)


def test_a_second_pull_fetches_nothing(server: Hub, pull_tiny: Any) -> None:
    pull_tiny()
    pull_tiny("org/tiny:tiny")
    assert server.served["tiny.gguf"] == 1


def test_cut_connections_go_on_where_they_broke(server: Hub, pull_tiny: Any, home: Home, waits: list[float]) -> None:
    server.cuts = [1000, 3000, 0, 500]
    pull_tiny()
    assert stored(home).read_bytes() == server.files["tiny.gguf"]
    assert server.ranges == [None, "bytes=1000-", "bytes=4000-", "bytes=4000-", "bytes=4500-"]
    assert len(waits) == 4


def test_a_dead_connection_is_given_up_and_the_next_pull_goes_on(server: Hub, pull_tiny: Any, home: Home, waits: list[float]) -> None:
    server.cuts = [2000] + [0] * 20
    with pytest.raises(DownloadError, match="stopped at 2000 of") as caught:
        pull_tiny()
    assert "goes on from there" in caught.value.hint
    assert len(waits) == download.IDLE_ATTEMPTS
    assert [part.stat().st_size for part in parts(home)] == [2000]
    assert "org/tiny" not in [model.name for model in list_models(home)]
    with pytest.raises(ModelNotFound):
        open_model("org/tiny", home)
    server.cuts, server.ranges = [], []
    seen: list[tuple[int, int]] = []
    pull_tiny(seen=seen)
    assert server.ranges == ["bytes=2000-"]
    assert seen[0][0] == 2000
    assert stored(home).read_bytes() == server.files["tiny.gguf"]


def test_an_interrupted_pull_keeps_its_part(server: Hub, home: Home, waits: list[float]) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("org/tiny", home, interrupt, endpoint=server.address, sleep=waits.append)
    assert len(parts(home)) == 1
    pull("org/tiny", home, lambda done, total: None, endpoint=server.address, sleep=waits.append)
    assert stored(home).read_bytes() == server.files["tiny.gguf"]


def test_a_server_that_ignores_ranges_starts_over(server: Hub, pull_tiny: Any, home: Home) -> None:
    server.cuts, server.ignore_ranges = [3000], True
    pull_tiny()
    assert server.ranges == [None, "bytes=3000-"]
    assert stored(home).read_bytes() == server.files["tiny.gguf"]


def test_ignored_ranges_and_cuts_that_never_end_are_given_up(server: Hub, pull_tiny: Any) -> None:
    server.cuts, server.ignore_ranges = [5000, 4000] * 50, True
    with pytest.raises(DownloadError, match="stopped at"):
        pull_tiny()


def test_wrong_bytes_are_fetched_once_more_and_then_refused(server: Hub, pull_tiny: Any, home: Home) -> None:
    server.corrupt["tiny.gguf"] = 1
    pull_tiny()
    assert stored(home).read_bytes() == server.files["tiny.gguf"]
    shutil.rmtree(home.root)
    server.corrupt["tiny.gguf"] = 2
    with pytest.raises(DownloadError, match="wrong checksum, twice"):
        pull_tiny()
    assert not parts(home)
    assert not stored(home).exists()


def test_a_damaged_part_does_not_survive(server: Hub, pull_tiny: Any, home: Home) -> None:
    server.cuts = [2000] + [0] * 20
    with pytest.raises(DownloadError):
        pull_tiny()
    server.cuts = []
    (part,) = parts(home)
    part.write_bytes(b"x" * 2000)
    pull_tiny()
    assert stored(home).read_bytes() == server.files["tiny.gguf"]


def test_a_server_that_sends_too_much_is_refused(server: Hub, pull_tiny: Any, home: Home) -> None:
    server.listed = server.listing()
    server.extra_bytes = b"more" * 100000
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull_tiny()


def test_a_file_damaged_on_disk_is_fetched_again(server: Hub, pull_tiny: Any, home: Home) -> None:
    pull_tiny()
    data = server.files["tiny.gguf"]
    stored(home).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    pull_tiny()
    assert stored(home).read_bytes() == data
    assert DigestCache(home).known(stored(home)) == hashlib.sha256(data).hexdigest()


def test_passing_failures_are_tried_again_and_lasting_ones_not(server: Hub, pull_tiny: Any, waits: list[float]) -> None:
    server.statuses = [503, 429]
    pull_tiny()
    assert len(waits) == 2


@pytest.mark.parametrize(("status", "words"), [(404, "HTTP 404"), (403, "HF_TOKEN")])
def test_refusals_are_final(server: Hub, pull_tiny: Any, status: Any, words: str) -> None:
    server.statuses = [status]
    with pytest.raises(DownloadError, match=words):
        pull_tiny()


def test_a_full_disk_keeps_the_part(server: Hub, pull_tiny: Any, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", fsync)
    with pytest.raises(DownloadError, match="the disk is full") as caught:
        pull_tiny()
    assert "Free some space" in caught.value.hint
    assert len(parts(home)) == 1


def test_a_home_that_can_not_be_written(server: Hub, tmp_path: Path, waits: list[float]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="can't be written") as caught:
        pull("org/tiny", Home(tmp_path / "file"), lambda done, total: None, endpoint=server.address, sleep=waits.append)
    assert "PACELINE_HOME" in caught.value.hint


def test_a_disk_too_small_is_found_out_first(server: Hub, pull_tiny: Any, home: Home) -> None:
    server.listed = server.listing()
    server.listed["siblings"][0]["lfs"]["size"] = 1 << 60
    with pytest.raises(DownloadError, match="needs 1099511627776 MiB more"):
        pull_tiny()
    assert not server.served


def test_what_the_hub_does_not_have(server: Hub, pull_tiny: Any, home: Home, waits: list[float]) -> None:
    with pytest.raises(ModelNotFound, match="no org/other"):
        pull_tiny("org/other")
    with pytest.raises(ModelNotFound, match="revision v2"):
        pull_tiny("org/tiny@v2")
    with pytest.raises(ModelNotFound, match="match 'Q8_0'"):
        pull_tiny("org/tiny:Q8_0")
    server.token = "secret"
    with pytest.raises(ModelNotFound, match="private, gated"):
        pull_tiny()


def test_a_token_opens_what_is_gated(server: Hub, pull_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "secret"
    monkeypatch.setattr(hub, "token", lambda: "secret")
    assert pull_tiny().name == "org/tiny"


@pytest.mark.parametrize("body", [[], {}, {"sha": "../..", "siblings": []}, {"sha": COMMIT, "siblings": 3}, "text"])
def test_a_hub_that_talks_nonsense(server: Hub, pull_tiny: Any, body: Any) -> None:
    server.listed = body
    with pytest.raises(DownloadError, match="lists no files"):
        pull_tiny()


def test_names_that_leave_the_folder_are_never_written(server: Hub, pull_tiny: Any, home: Home) -> None:
    server.files |= {"../../escape.gguf": b"x", "/abs.gguf": b"x", "a\\b.gguf": b"x", "\x1b[2J.gguf": b"x"}
    server.listed = server.listing()
    server.listed["siblings"].append({"rfilename": "c.gguf", "size": 1, "lfs": {"sha256": "../../escape", "size": 1}})
    assert pull_tiny().name == "org/tiny"
    assert not list(home.root.parent.rglob("escape.gguf"))


def test_no_hub_at_all(home: Home, waits: list[float], server: Hub) -> None:
    address = server.address
    server.shutdown()
    server.server_close()
    with pytest.raises(DownloadError, match="can't be reached"):
        pull("org/tiny", home, lambda done, total: None, endpoint=address, sleep=waits.append)


def test_a_folder_of_safetensors(server: Hub, pull_tiny: Any, make_folder: Any, home: Home, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "made")
    server.files = {file.name: file.read_bytes() for file in folder.iterdir()} | {"README.md": b"#", "extra.bin": b"pickle"}
    model = pull_tiny()
    assert (model.format, model.family) == ("safetensors F32", "llama")
    assert open_model("org/tiny", home).weights.digest == model.digest
    assert {file.name for file in (home.models / "org/tiny").iterdir()} == {*(file.name for file in folder.iterdir()), MANIFEST}


def test_an_encoder_comes_with_its_pooling(server: Hub, pull_tiny: Any, home: Home, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "made", pooling=Pooling.CLS, modules=True)
    server.files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    model = pull_tiny()
    assert (model.name, model.path) == ("org/tiny", home.models / "org/tiny")
    assert open_encoder_at(model.path, home).tensors.spec.pooling is Pooling.CLS
    server.files["1_Pooling/config.json"] = b'{"pooling_mode_max_tokens": true}'
    with pytest.raises(UnsupportedModel, match="max_tokens"):
        pull_tiny()


def test_a_family_that_can_not_run_is_found_before_its_weights_come(server: Hub, pull_tiny: Any, make_folder: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "made", model_type="gemma9")
    server.files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(UnsupportedModel, match="gemma9"):
        pull_tiny()
    assert server.served["model.safetensors"] == 0


def test_a_file_that_can_not_run_is_found_by_its_beginning(
    server: Hub, pull_tiny: Any, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "HEAD_BYTES", 1 << 10)
    server.files["tiny.gguf"] = server.files["tiny.gguf"].replace(b"llama", b"gemma") + bytes(16 << 20)
    seen: list[tuple[int, int]] = []
    with pytest.raises(UnsupportedModel, match="architecture is 'gemma'") as caught:
        pull_tiny(seen=seen)
    assert "The nearest that runs is Gemma 3" in str(caught.value.hint)
    assert max(done for done, _ in seen) < 2 << 20
    assert not parts(home)
    assert not stored(home).exists()


def test_a_cut_of_text_that_is_not_known_is_found_by_the_beginning(
    server: Hub, pull_tiny: Any, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "HEAD_BYTES", 1 << 10)
    server.files["tiny.gguf"] = server.files["tiny.gguf"].replace(b"gpt-2", b"gpt-9") + bytes(16 << 20)
    with pytest.raises(UnsupportedModel, match="cuts text by 'gpt-9'"):
        pull_tiny()
    assert not parts(home)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_repositories_without_what_is_needed_are_refused_first(
    server: Hub, pull_tiny: Any, make_folder: Any, tmp_path: Path, missing: Any
) -> None:
    folder = make_folder(tmp_path / "made")
    server.files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != missing}
    with pytest.raises(UnsupportedModel, match=missing):
        pull_tiny()
    assert not server.served


def test_pickles_are_refused(server: Hub, pull_tiny: Any) -> None:
    server.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(UnsupportedModel, match="pickles"):
        pull_tiny()


def test_a_newer_revision_that_breaks_off_leaves_the_older_whole(
    server: Hub, pull_tiny: Any, make_folder: Any, gguf_model: Any, home: Home, tmp_path: Path
) -> None:
    older, newer = make_folder(tmp_path / "older"), make_folder(tmp_path / "newer", gguf_model(seed=1).tensors, rope_theta=20000.0)
    server.files = {file.name: file.read_bytes() for file in older.iterdir()}
    digest = pull_tiny().digest
    server.files = {file.name: file.read_bytes() for file in newer.iterdir()}
    server.cuts = [100] + [0] * 20
    with pytest.raises(DownloadError):
        pull_tiny()
    assert open_model("org/tiny", home).weights.digest == digest
    server.cuts = []
    assert pull_tiny().digest != digest
    assert open_model("org/tiny", home).spec.rope.theta == 20000.0


def test_a_pull_that_ends_between_two_renames_leaves_no_mixture(
    server: Hub, pull_tiny: Any, make_folder: Any, gguf_model: Any, home: Home, tmp_path: Path
) -> None:
    older, newer = make_folder(tmp_path / "older"), make_folder(tmp_path / "newer", gguf_model(seed=1).tensors, rope_theta=20000.0)
    server.files = {file.name: file.read_bytes() for file in older.iterdir()}
    pull_tiny()
    in_the_way = home.models / "org/tiny" / "model.safetensors"
    kept = in_the_way.read_bytes()
    in_the_way.unlink()
    (in_the_way / "something").mkdir(parents=True)
    server.files = {file.name: file.read_bytes() for file in newer.iterdir()}
    with pytest.raises(DownloadError, match="can't be renamed"):
        pull_tiny()
    shutil.rmtree(in_the_way)
    in_the_way.write_bytes(kept)  # the older weights under the newer configuration
    assert [model.name for model in list_models(home)] == ["smollm2-135m"]
    assert pull_tiny().name == "org/tiny"
    assert open_model("org/tiny", home).spec.rope.theta == 20000.0


def test_two_pulls_of_one_model_do_not_meet(server: Hub, home: Home, waits: list[float]) -> None:
    met: list[str] = []

    def pull_again(done: int, total: int) -> None:
        with pytest.raises(FetchInProgress, match="org/tiny is being fetched already") as caught:
            pull("org/tiny", home, lambda done, total: None, endpoint=server.address, sleep=waits.append)
        met.append(caught.value.hint)

    pull("org/tiny", home, pull_again, endpoint=server.address, sleep=waits.append)
    assert met
    assert pull("org/tiny", home, lambda done, total: None, endpoint=server.address, sleep=waits.append).name == "org/tiny"
    assert not list(home.partial.iterdir())


def test_what_is_on_disk_is_verified_and_registered(gguf_model: Any, make_folder: Any, tmp_path: Path, home: Home) -> None:
    def quiet(done: int, total: int) -> None:
        raise AssertionError("nothing is fetched")

    path = gguf_model().write(tmp_path / "mine.gguf")
    assert pull(str(path), home, quiet).name == "mine"
    assert open_model("mine", home).name == "mine"
    assert pull(str(make_folder(tmp_path / "folder")), home, quiet).name == "folder"
    assert pull(str(path), home, quiet).name == "mine"
    assert pull("smollm2", home, quiet).name == "smollm2-135m"
    assert [model.name for model in list_models(home)][1:] == ["folder", "mine"]
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="taken"):
        pull(str(gguf_model().write(tmp_path / "elsewhere" / "mine.gguf")), home, quiet)
    (tmp_path / "bad.gguf").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        pull(str(tmp_path / "bad.gguf"), home, quiet)
    with pytest.raises(ModelNotFound):
        pull(str(tmp_path / "none.gguf"), home, quiet)
    with pytest.raises(ModelNotFound):
        pull("nothing", home, quiet)
