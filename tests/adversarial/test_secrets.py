"""Keys and tokens: they are in no argument that need be, no log, no page, and no file that others can read."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.cli.options import MAX_KEY_BYTES, ApiOptions, read_key
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, DownloadError
from paceline.server.serve import LASTS, own_certificate
from paceline.server.settings import ServerSettings, TlsFiles
from paceline.store.home import Home
from paceline.store.partial import make_way

Start = Callable[..., "subprocess.Popen[str]"]
KEY = "open-sesame-open-sesame"


def now() -> float:
    return SystemClock().wall()


def test_row_47_a_key_is_in_no_log_and_on_no_page(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(ScriptedInference(), ServerSettings(api_key=KEY))
    try:
        httpx.get(served.url + "/v1/models", headers={"Authorization": f"Bearer {KEY}x"})
        for path in ("/metrics", "/openapi.json", "/v1/models", "/health", "/none"):
            assert KEY not in served.http.get(path).text
    finally:
        served.close()
    assert KEY not in caplog.text
    assert KEY not in repr(served.settings)


def test_row_47_a_key_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_key(None, file) == KEY
    with pytest.raises(ConfigError, match="two API keys"):
        read_key(KEY, file)
    with pytest.raises(ConfigError, match="can't be read"):
        read_key(None, tmp_path / "none")
    with pytest.raises(ConfigError, match="fewer than 16"):
        ApiOptions(settings=ServerSettings(api_key="a")).check()
    for repeats in ("a" * 32, "password" * 2, "12" * 16, "aaaaabbbbbcccccd"):
        with pytest.raises(ConfigError, match="repeats itself"):
            ApiOptions(settings=ServerSettings(api_key=repeats)).check()


def test_row_47_a_file_that_is_longer_than_a_key_is_refused_and_not_cut(tmp_path: Path) -> None:
    """A key that was cut is another than the one its owner hands out."""
    file = tmp_path / "key"
    file.write_text(MAX_KEY_BYTES * "k")
    assert read_key(None, file) == MAX_KEY_BYTES * "k"
    file.write_text((MAX_KEY_BYTES + 1) * "k")
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        read_key(None, file)


def test_the_api_speaks_tls_13_by_a_certificate_of_its_own(tmp_path: Path) -> None:
    files = own_certificate(Home(tmp_path), ("nas.local",), now())
    assert files.key.stat().st_mode & 0o077 == 0
    assert own_certificate(Home(tmp_path), ("nas.local",), now()) == files
    served = Served(ScriptedInference(), ServerSettings(api_key=KEY), tls=files)
    try:
        assert served.url.startswith("https://")
        assert served.http.post("/v1/completions", json={"model": "echo", "prompt": "ab", "max_tokens": 2}).is_success
        stranger = ssl.create_default_context()
        with httpx.Client(verify=stranger) as client, pytest.raises(httpx.ConnectError, match="certificate"):
            client.get(served.url + "/health")
        old = ssl.create_default_context(cafile=files.certificate)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with httpx.Client(verify=old) as client, pytest.raises(httpx.ConnectError):
            client.get(served.url + "/health")
    finally:
        served.close()


def test_the_certificate_is_made_anew_when_it_ends_or_lacks_a_name(tmp_path: Path) -> None:
    home = Home(tmp_path)
    made = own_certificate(home, (), now()).certificate.read_bytes()
    assert own_certificate(home, (), now()).certificate.read_bytes() == made
    named = own_certificate(home, ("nas.local",), now()).certificate.read_bytes()
    assert named != made
    assert own_certificate(home, (), now()).certificate.read_bytes() == named
    assert own_certificate(home, (), now() + LASTS.total_seconds()).certificate.read_bytes() != named


def test_half_a_certificate_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    files = own_certificate(Home(tmp_path), (), now())
    with pytest.raises(ConfigError, match="go together"):
        ApiOptions(certificate=files.certificate).check()
    with pytest.raises(ConfigError, match="can't be used for TLS"):
        TlsFiles(files.certificate, files.certificate).context()
    with pytest.raises(ConfigError, match="no file"):
        TlsFiles(files.certificate, tmp_path / "none").context()


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in (root, *root.rglob("*")) if not path.is_symlink()}


def test_row_52_what_is_kept_can_be_written_by_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = f"umask 000; PACELINE_HOME={home} {sys.executable} -m paceline init --name desk"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = modes(home)
    assert len(found) > 3
    assert [name for name, mode in found.items() if mode & 0o022] == []
    secrets = [name for name in found if name.endswith(".pem")]
    assert secrets
    assert [name for name in secrets if found[name] & 0o077] == []


def test_row_52_a_home_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, link = tmp_path / "home", tmp_path / "link"
    home.mkdir()
    link.symlink_to(home)
    for path in (home, link):
        monkeypatch.setenv("PACELINE_HOME", str(path))
        home.chmod(0o755)
        Home.from_environment()
        for mode in (0o775, 0o757, 0o777):
            home.chmod(mode)
            with pytest.raises(ConfigError, match="Others may write"):
                Home.from_environment()


def test_row_52_another_users_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        Home.from_environment()


def layers(home: Home, number: int, nbytes: int, used: float) -> Path:
    folder = home.partial / f"{number:064x}"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(bytes(nbytes))
    (folder / "part.json").write_text("{}")
    os.utime(folder / "part.json", (used, used))
    return folder


def test_layers_for_others_have_a_budget_and_those_used_longest_ago_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    old, older, fresh = layers(home, 1, 1 << 20, 2000), layers(home, 2, 1 << 20, 1000), layers(home, 3, 1 << 20, 9_999)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk._replace(free=1 << 20))  # with 3 MiB here: 3.2 MiB are the budget
    make_way("m", "9" * 64, 1 << 20, home, now=10_000)
    assert (old.exists(), older.exists(), fresh.exists()) == (True, False, True)
    with pytest.raises(DownloadError, match="layers for other machines"):
        make_way("m", "9" * 64, 3 << 20, home, now=10_000)
    assert fresh.exists(), "what is being read stays"
