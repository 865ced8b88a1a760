from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.unit.cli.test_commands import assert_user_error, paceline

from paceline.cli import service
from paceline.core.errors import ConfigError

ARGS = ["--model", "a b", "--drain-s", "45", "--api-key", 'x"y%z$HOME\\']


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    for of_machine in (False, True):
        path = tmp_path / "paceline.service"
        path.write_text(service.unit(ARGS, tmp_path / "ho%me", 45, of_machine=of_machine))
        done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, [line for line in done.stderr.splitlines() if "paceline.service" in line]) == (0, [])


def test_the_unit_says_how_to_stop_and_when_to_start_again(tmp_path: Path) -> None:
    lines = service.unit(ARGS, tmp_path, 45, of_machine=False).splitlines()
    command = r'"-P" "-m" "paceline" "up" "--model" "a b" "--drain-s" "45" "--api-key" "x\"y%%z$$HOME\\"'
    assert f'ExecStart="{sys.executable}" {command}' in lines
    assert {"Restart=on-failure", "SuccessExitStatus=130 143", "TimeoutStopSec=60", "WantedBy=default.target"} <= set(lines)
    assert "WantedBy=multi-user.target" in service.unit([], tmp_path, 30, of_machine=True)
    assert "TimeoutStopSec=45" in service.unit([], tmp_path, 30, of_machine=True)


def test_the_machines_unit_names_a_user_and_is_kept_from_the_rest_of_the_machine(tmp_path: Path) -> None:
    lines = set(service.unit(ARGS, tmp_path, 45, of_machine=True, user="alice").splitlines())
    assert {
        "User=alice",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "PrivateTmp=yes",
        "RestrictSUIDSGID=yes",
    } <= lines
    assert f'ReadWritePaths="{tmp_path}"' in lines
    assert not any(line.startswith("User=") for line in service.unit(ARGS, tmp_path, 45, of_machine=False).splitlines())
    assert plistlib.loads(service.plist(ARGS, tmp_path, 45, "alice"))["UserName"] == "alice"


@pytest.mark.parametrize(
    ("folder", "file", "is_safe"),
    [
        (0o755, 0o644, True),
        (0o777, 0o644, False),
        (0o1777, 0o644, True),
        (0o755, 0o646, False),
        (0o755, 0o666, False),
        (0o770, 0o644, True),
    ],
)
def test_code_that_others_may_write_runs_in_no_service(tmp_path: Path, folder: int, file: int, *, is_safe: bool) -> None:
    lies, link = tmp_path / "code", tmp_path / "link"
    lies.mkdir()
    (lies / "python").touch()
    (lies / "python").chmod(file)
    lies.chmod(folder)
    link.symlink_to(lies / "python")
    for path in (lies / "python", link):
        with nullcontext() if is_safe else pytest.raises(ConfigError, match="changed by others"):
            service.check_code([path], os.getuid(), os.getgid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_code_of_another_user_runs_in_no_service(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    os.chown(tmp_path / "python", 12345, -1)
    with pytest.raises(ConfigError, match="changed by others"):
        service.check_code([tmp_path / "python"], 54321, 54321)
    service.check_code([tmp_path / "python"], 12345, 12345)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("flags", [[], ["--user", "root"], ["--user", "no-such-user-here"]])
def test_root_names_a_user_that_is_not_root(flags: list[str]) -> None:
    assert_user_error(paceline("service", "install", *flags), "user" if not flags else flags[1] if "no" in flags[1] else "root")


@pytest.mark.parametrize("word", ["a\rb", "a\nb", "a\x1bb", "a\u2028b"])
def test_a_flag_with_a_control_character_is_in_no_unit(word: str) -> None:
    assert_user_error(paceline("service", "install", "--print", "--served-name", word), "control character")


def test_the_property_list_comes_back(tmp_path: Path) -> None:
    read = plistlib.loads(service.plist(ARGS, tmp_path, 45))
    assert read["ProgramArguments"] == [sys.executable, "-P", "-m", "paceline", "up", *ARGS]
    assert (read["KeepAlive"], read["ExitTimeOut"]) == ({"SuccessfulExit": False}, 60)
    assert read["EnvironmentVariables"] == {"PACELINE_HOME": str(tmp_path)}


def test_paths_among_flags_are_from_where_the_service_was_installed(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "some").mkdir()
    (tmp_path / "key").touch()
    flags = ["--model", "a.gguf", "--model=./a.gguf", "--draft", "some", "--model", "of/the-hub", "--api-key-file", "key"]
    shown = paceline("service", "install", "--print", *flags, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    there = tmp_path / "a.gguf"
    assert all(arg in shown.stdout for arg in (f"--model={there}", f"{there}", "some", "of/the-hub", f"{tmp_path / 'key'}"))
    assert str(tmp_path / "some") not in shown.stdout
    assert "./a.gguf" not in shown.stdout
    assert "WorkingDirectory" not in shown.stdout


def test_a_file_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "units" / "paceline.service"
    for args in ([], ARGS):
        text = service.unit(args, tmp_path, 30, of_machine=False)
        service.put(path, text.encode())
        assert (path.read_text(), path.stat().st_mode & 0o777) == (text, 0o600)
    path.write_text("[Unit]\n")
    with pytest.raises(ConfigError, match="was not written by Paceline"):
        service.put(path, b"")
    assert path.read_text() == "[Unit]\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prot", "9"], "No such option: --prot"),
        (["--port", "abc"], "--port: 'abc' is not an integer"),
        (["--drain-s=soon"], "--drain-s: 'soon' is not a number"),
        (["--drain-s", "inf"], "--drain-s: 'inf' is more than 86400"),
        (["--model"], "'--model' requires an argument"),
        (["surplus"], "unexpected extra argument"),
    ],
)
def test_flags_that_up_does_not_take_are_refused_as_up_does(flags: list[str], said: str) -> None:
    refused = paceline("service", "install", "--print", *flags)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert said in refused.stderr


def test_a_stop_waits_as_long_as_the_flags_say() -> None:
    shown = paceline("service", "install", "--print", "--drain-s=45")
    assert "TimeoutStopSec=60" in shown.stdout or "<integer>60</integer>" in shown.stdout


def test_print_shows_the_file_and_changes_nothing() -> None:
    shown = paceline("service", "install", "--print", "--model", "some", "--port", "9000")
    assert shown.returncode == 0, shown.stderr
    assert service.MARK in shown.stdout
    assert '"up" "--model" "some" "--port" "9000"' in shown.stdout or "<string>9000</string>" in shown.stdout


@pytest.mark.skipif(Path("/run/systemd/system").is_dir() or sys.platform == "darwin", reason="a service could really be installed here")
def test_where_there_is_neither_systemd_nor_launchd_nothing_is_written() -> None:
    as_root = ["--user", "nobody"] if os.geteuid() == 0 else []
    refused = paceline("service", "install", *as_root)
    assert refused.returncode == 2
    assert "Neither systemd nor launchd" in refused.stderr or "changed by others" in refused.stderr
    assert_user_error(paceline("service", "uninstall"), "There is no")
    assert paceline("service", "status").returncode == 1
