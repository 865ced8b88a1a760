"""Which addresses of engines may be shared, and what is kept of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.machine.foreign.shares import MAX_BYTES, EngineShare, add_share, change_shares, check_url, read_shares
from paceline.store.home import Home


@pytest.mark.parametrize(
    ("text", "kept", "leaves"),
    [
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080", False),
        ("localhost:11434", "http://localhost:11434", False),
        ("http://[::1]:8080", "http://[::1]:8080", False),
        ("https://192.168.1.9:8443", "https://192.168.1.9:8443", False),
        ("https://[fe80::1]:1", "https://[fe80::1]:1", False),
        ("https://8.8.8.8/openai/v1", "https://8.8.8.8/openai", True),
        ("https://no-such-host.invalid", "https://no-such-host.invalid", True),
    ],
)
def test_loopback_and_https_may_be_shared(text: str, kept: str, leaves: bool) -> None:
    assert check_url(text, plain_http=False) == (kept, leaves)


@pytest.mark.parametrize(
    "text",
    [
        "http://192.168.1.9:8080",
        "192.168.1.9:8080",
        "http://8.8.8.8",
        "http://127.0.0.1.example.org:8080",
        "http://[::ffff:8.8.8.8]:80",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:99999",
        "http://user:secret@127.0.0.1:8080",
        "http://127.0.0.1:8080/?key=secret",
        "http://127.0.0.1:8080/#x",
        "",
    ],
)
def test_other_addresses_are_refused_and_no_secret_is_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_url(text, plain_http=False)
    assert "secret" not in str(refused.value)


def test_http_to_another_machine_is_marked() -> None:
    url, leaves = check_url("http://192.168.1.9:8080", plain_http=True)
    assert not leaves
    assert EngineShare(url, plain_http=True).sharing.plain_http
    assert not EngineShare("http://127.0.0.1:8080").sharing.plain_http


def test_what_is_shared_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert read_shares(home) == ()
    shares = (EngineShare("http://127.0.0.1:8080", "mine", ("a", "b"), "k-secret"), EngineShare("https://box.lan", leaves_network=True))
    change_shares(home, lambda _: shares)
    assert read_shares(home) == shares
    assert home.engines.stat().st_mode & 0o777 == 0o600
    assert "k-secret" not in repr(read_shares(home))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '[{"url": "http://[::1", "api_key": "k-secret"}]',
        "[" * 100_000,
        " " * (MAX_BYTES + 1),
        '[{"url": 5, "api_key": "k-secret"}]',
        '[{"api_key": "k-secret"}]',
        "\x00",
    ],
)
def test_a_damaged_file_is_an_error_that_repeats_no_key(tmp_path: Path, content: str) -> None:
    home = Home(tmp_path)
    home.engines.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_shares(home)
    assert "k-secret" not in str(refused.value)


def test_a_pipe_in_its_place_is_an_error_and_no_wait(tmp_path: Path) -> None:
    home = Home(tmp_path)
    os.mkfifo(home.engines)
    with pytest.raises(ConfigError):
        read_shares(home)


def test_a_file_that_others_can_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = Home(tmp_path)
    add_share(home, EngineShare("http://127.0.0.1:1"))
    read_shares(home)
    assert not caplog.records
    home.engines.chmod(0o644)
    read_shares(home)
    assert "chmod 600" in caplog.text


def test_what_several_processes_share_at_once_is_all_kept(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert all(one is None for one in pool.map(lambda port: add_share(home, EngineShare(f"http://127.0.0.1:{port}")), range(1, 81)))
    assert len(read_shares(home)) == 80
